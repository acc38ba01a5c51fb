"""Quantizers with a few levels in each bucket: the payload they share, on every backend."""

from __future__ import annotations

import random
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradwire
from gradwire.convert.level_buckets import make_buckets
from gradwire.convert.level_numbers import round_outward
from gradwire.convert.levels import EVEN, EXPLICIT, SYMMETRIC, level_values
from gradwire.kernels import reference
from support.cases import for_each
from support.helpers import (
    BACKENDS,
    FLOATS,
    assemble,
    bits,
    check_contract_3,
    check_same,
    encode_into,
    gradient,
    native,
    repair,
    use_backend,
)
from support.plain_coders import plain_varint
from support.plain_decoder import plain_decode

SPECS = (
    "bingrad", "bingrad:form=pb,precision=fp16", "orq", "orq:levels=9,search=exact,precision=fp32,bucket=100",
    "orq:levels=3,clip=2.5,coder=raw", "orq:levels=129,search=polished,bucket=300", "qsgd",
    "qsgd:levels=33,norm=l2,bucket=70",
    "terngrad", "terngrad:clip=2.5,bucket=0", "signsgd", "signsgd:bucket=0,precision=fp32", "linear",
    "linear:levels=2,bucket=4,precision=fp32", "linear:levels=255", "tinyscript", "tinyscript:levels=5,bucket=64",
)  # fmt: skip
UNBIASED = tuple(s for s in SPECS if s.startswith(("orq", "qsgd", "terngrad", "linear")) and "clip" not in s)


def edge_tensors() -> dict[str, torch.Tensor]:
    x = gradient(300, 3)
    return {
        "zero": torch.zeros(300),
        "minus zero": torch.zeros(300).neg(),
        "equal": torch.full((300,), -0.3),
        "positive": x.abs(),
        "negative": -x.abs(),
        "one of many": torch.eye(300)[7],
        "two values": x.sign(),
        "subnormal": x * 1e-38,
        "smallest": torch.full((300,), 1e-45),
        "huge": x.sign() * 3e38,
        "mixed": torch.where(x > 0, x * 1e38, x * 1e-38),
        "fewer than levels": x[:9],
        "one": x[:1],
        "scalar": x[0],
        "matrix": x.reshape(3, 1, 100),
        "not contiguous": x.reshape(30, 10).T[::2],
    }


@for_each("spec", SPECS)
def test_frames_decode_to_what_the_page_says(spec: str, backend: str) -> None:
    codec = gradwire.codec(spec)
    for name, tensor in edge_tensors().items():
        for dtype in FLOATS if backend == BACKENDS[-1] else FLOATS[:1]:
            given_tensor = tensor.to(dtype)
            if not bool(torch.isfinite(given_tensor).all()):
                continue
            frame = codec.encode(given_tensor, seed=5)
            check_same(gradwire.decode(frame), plain_decode(frame).tensor.reshape(tensor.shape)), name


@pytest.mark.skipif(native is None, reason="no native module")
@for_each("spec", SPECS)
def test_all_backends_write_the_same_bytes(spec: str) -> None:
    codec = gradwire.codec(spec)
    for seed, (name, tensor) in enumerate({**edge_tensors(), "large": gradient(2500, 1, beta=0.4)}.items()):
        if "exact" in spec and name == "large":
            tensor = tensor[:600]  # noqa: PLW2901
        results = set()
        for name_of_backend in BACKENDS:
            with use_backend(name_of_backend):
                memory = gradient(tensor.numel(), 9).reshape(tensor.shape)
                flat = tensor.contiguous()
                frame = encode_into(codec, flat, residual=memory, decay=0.7, seed=seed + (3 << 40))
                added = torch.ones(tensor.shape)
                header, payload = gradwire.codecs.open_frame(gradwire.codecs.as_bytes(frame))
                gradwire.codecs.decode_payload(header, payload, added, 0.25, True)
                results.add((frame, bits(memory), bits(added)))
        assert len(results) == 1, name


@pytest.mark.skipif(native is None, reason="no native module")
@pytest.mark.parametrize(
    "method, levels", [("greedy", 5), ("greedy", 33), ("polished", 9), ("exact", 5), ("two", 2), ("pair", 2)]
)
@given(data=st.data())
def test_native_search_equals_the_reference(method: str, levels: int, data: st.DataObject) -> None:
    kind = st.floats(width=32, allow_nan=False, allow_infinity=False)
    entries = data.draw(st.lists(st.one_of(kind, st.sampled_from([0.0, -0.0, 1.0, -1.0])), min_size=1, max_size=80))
    x = torch.tensor(entries, dtype=torch.float32)
    starts = np.unique([0, len(x) // 3, len(x)])
    limits = np.full(len(starts) - 1, 2.0, dtype=np.float32) if data.draw(st.booleans()) else None
    expected = reference.search_levels(x, None, 0.0, starts, limits, levels, method)
    for name in BACKENDS[1:]:
        native.use(name)
        found = native.search_levels(x, None, 0.0, starts, limits, levels, method)
        assert found.tobytes() == expected.tobytes(), name


@pytest.mark.skipif(native is None, reason="no native module")
@pytest.mark.parametrize("kind", ["normal", "heavy", "offset", "even", "sparse", "equal", "large", "tiny", "far apart"])
def test_search_in_large_buckets(kind: str) -> None:
    """ORQ selects among parts of a range, and gives up where that leaves too many. BinGrad-b sorts only bins in which a
    split could gain most; where sums are not exact, everything."""
    rng = np.random.default_rng(len(kind))
    for count in (64, 513, 3000):
        x = rng.standard_normal(count)
        x = {
            "normal": x, "heavy": x**9, "offset": x * 1e-3 + 5, "even": np.round(3 * x), "large": np.abs(x) * 1e30,
            "sparse": np.where(rng.random(count) < 0.9, 0, x), "equal": np.repeat(x[: count // 7 + 1], 7)[:count],
            "tiny": x * 1e-40, "far apart": np.sign(x) * 10.0 ** rng.uniform(-30, 30, count),
        }[kind]  # fmt: skip
        u = torch.from_numpy(x.astype(np.float32))
        for method, levels, bucket in (("greedy", 5, 2048), ("polished", 9, 512), ("two", 2, 512)):
            starts = np.append(np.arange(0, count, bucket), count)
            expected = reference.search_levels(u, None, 0.0, starts, None, levels, method)
            for name in BACKENDS[1:]:
                native.use(name)
                found = native.search_levels(u, None, 0.0, starts, None, levels, method)
                assert found.tobytes() == expected.tobytes(), (method, name)


@for_each("spec", SPECS)
def test_error_feedback_conserves_what_receivers_decode(spec: str) -> None:
    codec = gradwire.codec(spec)
    for dtype in FLOATS:
        for count in (9, 1001):
            grad, memory = gradient(count, 2).to(dtype), gradient(count, 4)
            before = memory.clone()
            frame = encode_into(codec, grad, residual=memory, decay=0.9, seed=1)
            check_contract_3(gradwire.decode(frame), memory, grad, before, 0.9)


@for_each("spec", SPECS)
def test_segments_keep_their_own_levels(spec: str) -> None:
    """A small tensor beside one that is a million times as large is coded as well as it would be alone."""
    codec = gradwire.codec(spec)
    small, large = gradient(600, 1, scale=1e-6), gradient(700, 2, scale=1.0)
    frame = encode_into(codec, torch.cat([large, small]), segments=[700, 600], seed=3)
    check_same(gradwire.decode(frame), plain_decode(frame).tensor)
    error = (gradwire.decode(frame)[700:] - small).square().sum() / small.square().sum()
    alone = (gradwire.decode(codec.encode(small)) - small).square().sum() / small.square().sum()
    assert error < 1.5 * alone + 1e-3


@for_each("spec", ["orq", "orq:levels=129,precision=fp32", "linear:precision=fp32", "bingrad", "qsgd"])
@for_each("sizes", [[1] * 40, [1, 300, 1], [3] * 7 + [500], [2, 2, 2], [600, 5], [259] * 3])
def test_segments_of_any_size_fit_what_was_announced(spec: str, sizes: list[int]) -> None:
    codec, tensor = gradwire.codec(spec), gradient(sum(sizes), 8)
    out = torch.empty(codec.max_frame_bytes(tensor), dtype=torch.uint8)
    frame = bytes(out[: codec.encode_into(tensor, out, segments=sizes)].tolist())
    check_same(gradwire.decode(frame), plain_decode(frame).tensor)


def test_small_segments_share_a_bucket() -> None:
    layout = make_buckets(100, (1, 1, 30, 4, 60, 4), 20, 5)
    assert layout.segments == (32, 4 + 60 + 4) or layout.segments == (36, 64)
    assert layout.starts.tolist() == [0, 20, 36, 56, 76, 96, 100]
    assert make_buckets(100, (), 100, 5).bucket == 0  # one bucket is written in one way


def test_equal_buckets_are_written_once() -> None:
    assert len(gradwire.codec("orq").encode(torch.zeros(1 << 16))) < 50
    assert len(gradwire.codec("linear").encode(torch.full((1 << 16,), 0.1, dtype=torch.bfloat16))) < 50


@for_each("spec", UNBIASED)
@for_each("dtype", FLOATS)
def test_no_entry_lies_outside_the_levels_of_unbiased_methods(spec: str, dtype: torch.dtype) -> None:
    """Every entry is between two values that receivers get: otherwise it could not be met on average."""
    for count, scale in ((9, 1e-3), (257, 1e-3), (513, 1e-3), (700, 3.7), (700, 1e-7)):
        tensor = gradient(count, count, scale=scale).to(dtype)
        position = 0
        for size, levels in plain_decode(gradwire.codec(spec).encode(tensor)).buckets:
            part = tensor[position : position + size].double()
            position += size
            assert levels[0] <= part.min() and part.max() <= levels[-1]
        assert position == count or count * dtype.itemsize <= 32  # those are stored


def test_rounding_outward_is_the_nearest_number_outside() -> None:
    x = np.concatenate([gradient(2000, 1).numpy(), gradient(500, 2, scale=1e-8).numpy(), [0.0, 1.0, -1.0, 65504.0]])
    x = x.astype(np.float32)
    for precision in (torch.float16, torch.bfloat16):
        for direction in (-1, 1):
            y = round_outward(x, precision, direction)
            assert (direction * (y - x.astype(np.float64)) >= 0).all()
            kept = torch.from_numpy(y).to(precision)
            assert (kept.float().numpy() == y).all() and np.isfinite(y).all()
            nearest = torch.from_numpy(x).to(precision).float().numpy()
            assert ((y == nearest) == (direction * (nearest - x.astype(np.float64)) >= 0)).all()


def test_even_levels_have_exact_ends_and_middle() -> None:
    numbers = np.array([[-0.1, 0.7]], dtype=np.float32)
    table = level_values(numbers, EVEN, 7, torch.float32)[0]
    assert table[0] == numbers[0, 0] and table[-1] == numbers[0, 1]
    symmetric = level_values(np.array([[0.3]], dtype=np.float32), SYMMETRIC, 5, torch.float32)[0]
    assert symmetric[2] == 0 and bool((symmetric == -symmetric.flip(0)).all())
    assert bool((level_values(numbers, EXPLICIT, 2, torch.float16)[0] == torch.from_numpy(numbers[0]).half()).all())


# ── bad input ─────────────────────────────────────────────────────────────────────────────────────


@for_each("spec", SPECS)
def test_non_finite_gradients_travel_as_they_are(spec: str) -> None:
    for bad in (float("nan"), float("inf"), -float("inf")):
        tensor, memory = gradient(600), gradient(600, 1)
        tensor[123] = bad
        before = memory.clone()
        frame = encode_into(gradwire.codec(spec), tensor, residual=memory)
        check_same(gradwire.decode(frame), tensor)
        check_same(memory, before)


@for_each(
    "spec, says",
    [
        ("orq:levels=4", "nearest is 3"), ("orq:levels=7", "nearest is 5"), ("orq:levels=100", "nearest is 129"),
        ("orq:levels=1000", "129"), ("orq:levels=x", "3, 5, 9"), ("orq:levels=5,bucket=9", "from 10"),
        ("orq:search=best", "greedy, polished, exact"), ("orq:precision=fp8", "fp32, fp16, bf16"),
        ("orq:clip=-1", "from 0"),
        ("orq:bucket=-1", "whole number"), ("orq:bucket=2.5", "whole number"), ("orq:coder=zip", "auto, raw"),
        ("qsgd:levels=4", "steps of 2"), ("qsgd:norm=l1", "l2, max"), ("linear:levels=1", "from 2 to 255"),
        ("linear:levels=256", "from 2 to 255"), ("bingrad:form=c", "b, pb"), ("bingrad:levels=2", "form"),
        ("tinyscript:levels=0", "from 2"), ("terngrad:decay=2", "from 0 to 1"),
    ],
)  # fmt: skip
def test_bad_parameters_say_what_is_allowed(spec: str, says: str) -> None:
    with pytest.raises(gradwire.SpecError, match=says):
        gradwire.codec(spec)


@for_each("spec", [*SPECS[:4], "qsgd", "signsgd:bucket=100", "linear:coder=huffman"])
def test_damage_is_a_frame_error(spec: str, backend: str) -> None:
    rng = random.Random(spec)
    codec = gradwire.codec(spec)
    frames = [codec.encode(gradient(n, 1)) for n in (9, 50, 400)]
    frames.append(encode_into(codec, gradient(400), segments=[150, 250]))
    for _ in range(150):
        frame = bytearray(rng.choice(frames))
        header = gradwire.frame.headers.read_header(memoryview(bytes(frame)))
        how = rng.randrange(3)
        if how == 0:
            frame[rng.randrange(header.length, len(frame))] ^= 1 << rng.randrange(8)
        payload = bytes(frame[header.length :])
        if how == 1:
            payload = payload[: rng.randrange(len(payload))]
        elif how == 2:
            payload += bytes([rng.randrange(256)])
        damaged = assemble(payload, header.shape, header.codec, header.dtype, header.flags)
        try:
            decoded = gradwire.decode(damaged)
        except gradwire.FrameError:
            continue
        assert how == 0 and bool(torch.isfinite(decoded).all())


def payload(
    bucket: int = 0, s: int = 3, table: int = 0, numbers: tuple[float, ...] = (-1, 0, 1), more: bytes = b""
) -> bytes:
    packed = b"".join(struct.pack("<f", x) for x in numbers)
    return plain_varint(bucket) + bytes([s, table]) + more + packed + b"\1\0"  # all entries have symbol 0


def test_the_shortest_payload_is_valid() -> None:
    decoded = gradwire.decode(assemble(payload(), (20,), 4))
    check_same(decoded, torch.full((20,), -1.0))
    segmented = payload(more=b"\2\7\x0d", numbers=(-1, 0, 1, -2, 0, 2))
    check_same(gradwire.decode(assemble(segmented, (20,), 4, flags=2)), torch.tensor([-1.0] * 7 + [-2.0] * 13))


@for_each(
    "bad, flags",
    [
        (payload(s=1), 0), (payload(s=0), 0), (payload(table=3), 0), (payload(table=12), 0), (payload(table=16), 0),
        (payload(numbers=(0, 1, -1)), 0), (payload(numbers=(-1, 0, float("nan"))), 0), (payload(bucket=21), 0),
        (payload(numbers=(-1, 0, float("inf"))), 0), (payload(numbers=(-1, 0, 1e38)), 0), (payload(bucket=5), 0),
        (payload(numbers=(-1, -0.0, 1)), 0), (payload(table=2, numbers=(-1,)), 0),
        (payload(table=1, numbers=(1, 0)), 0),
        (payload(bucket=20), 0), (payload() + b"\0", 0), (payload(more=b"\0"), 2), (payload(more=b"\1\7"), 2),
        (payload(more=b"\2\5\x0f", numbers=(-1, 0, 1) * 2), 2), (payload()[:-1], 0), (b"", 0),
    ],
)  # fmt: skip
def test_hostile_payloads_are_frame_errors(bad: bytes, flags: int) -> None:
    with pytest.raises(gradwire.FrameError):
        gradwire.decode(assemble(bad, (20,), 4, flags=flags))


def test_levels_of_integers_or_nothing_are_frame_errors() -> None:
    for shape, dtype in (((0,), torch.float32), ((20,), torch.int32)):
        with pytest.raises(gradwire.FrameError):
            gradwire.decode(assemble(payload(), shape, 4, dtype))
    frame = gradwire.codec("orq").encode(gradient(50))
    with pytest.raises(gradwire.FrameError):
        gradwire.decode(repair(frame[:3] + bytes([frame[3] | 0x40]) + frame[4:]))


@pytest.mark.skipif(native is None, reason="no native module")
def test_native_code_checks_its_arguments() -> None:
    x, starts = torch.zeros(10), np.array([0, 10])
    values = torch.zeros(1, 3)
    for bad in ([0, 11], [0, 5], [1, 10], [0, 5, 5, 10], [0, 12, 10], [0]):
        wrong = np.array(bad)
        with pytest.raises(ValueError):
            native.bucket_stats(x, None, 0.0, wrong)
        with pytest.raises(ValueError):
            native.search_levels(x, None, 0.0, wrong, None, 3, "greedy")
        with pytest.raises(ValueError):
            native.assign_levels(x, None, None, 0.0, torch.zeros(max(1, len(bad) - 1), 3), wrong, None)
        with pytest.raises(ValueError):
            native.spread_levels(np.zeros(10, np.uint8), torch.zeros(max(1, len(bad) - 1), 3), wrong, x, False)
    with pytest.raises(ValueError):
        native.search_levels(x, None, 0.0, starts, None, 4, "greedy")
    with pytest.raises(ValueError):
        native.search_levels(x, torch.zeros(9), 0.0, starts, None, 3, "greedy")
    with pytest.raises(ValueError):
        native.search_levels(x, None, 0.0, starts, np.zeros(2, np.float32), 3, "greedy")
    with pytest.raises(ValueError):
        native.assign_levels(x, None, torch.zeros(9), 0.0, values, starts, 1)
    with pytest.raises(ValueError):
        native.assign_levels(x, None, None, 0.0, torch.zeros(2, 3), starts, 1)
    with pytest.raises(ValueError):
        native.spread_levels(np.zeros(9, np.uint8), values, starts, x, False)


@for_each("spec", SPECS)
def test_memory_beyond_the_range_of_the_dtype(spec: str) -> None:
    """No level is beyond what receivers can hold: they would find the levels in disorder."""
    x, memory = gradient(3000, 1).half(), gradient(3000, 2, scale=1e37)
    codec, after = gradwire.codec(spec), torch.empty(3000)
    frame = encode_into(codec, x, residual=memory, residual_out=after, decay=0.5)
    check_contract_3(gradwire.decode(frame), after, x, memory, 0.5)
