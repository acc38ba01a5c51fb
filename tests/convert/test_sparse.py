"""Sparse codecs: which entries they choose, what they send, and what stays behind."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradwire
from gradwire import codecs, kernels
from gradwire.codecs import encoding
from gradwire.convert.conversion import Conversion
from gradwire.convert.m22 import M22
from gradwire.convert.sbc import SBC
from gradwire.convert.sparse import Sparse, sent_positions
from gradwire.convert.stc import STC
from gradwire.convert.topk import TopK, whole_model_threshold
from gradwire.errors import FrameError, SpecError
from gradwire.frame import headers
from support.cases import for_each
from support.helpers import BACKENDS, FLOATS, bits, check_same, encode_into, gradient, use_backend

VALUES = ("fp32", "fp16", "bf16", "fp4", "fp8", "e3m2b3")
METHODS = ("sbc", "stc", *(f"topk:values={v}" for v in VALUES), "m22:m=0", "m22:bits=3")
CARD = {0.1: 4.756, 0.01: 8.108, 0.001: 11.495}  # bits per position


def with_p(spec: str, p: float, **more: object) -> str:
    name, _, rest = spec.partition(":")
    return f"{name}:" + ",".join([f"p={p}", *([rest] if rest else []), *(f"{k}={v}" for k, v in more.items())])


def plain_choice(u: list[float], k: int) -> list[int]:
    """The k largest magnitudes, lowest positions first among equals, zeros never; ascending."""
    order = sorted((i for i in range(len(u)) if u[i]), key=lambda i: (-abs(u[i]), i))
    return sorted(order[:k])


def plain_mean(x: list[float]) -> float:
    """Eight sums of every eighth entry, then their sum."""
    sums = [0.0] * 8
    for i, value in enumerate(x):
        sums[i % 8] += value
    total = 0.0
    for part in sums:
        total += part
    return total / len(x) if x else 0.0


def plain_sbc(u: list[float], k: int) -> tuple[list[int], float]:
    sides = [plain_choice([x if sign * x > 0 else 0.0 for x in u], k) for sign in (1, -1)]
    means = [plain_mean([abs(u[i]) for i in side]) for side in sides]
    return (sides[0], means[0]) if means[0] >= means[1] else (sides[1], -means[1])


# ── which entries ─────────────────────────────────────────────────────────────────────────────────


@for_each("p", [0.5, 0.1, 0.01, 0.001])
@for_each("count", [1, 7, 100, 4099, 100_003])
def test_choice_is_that_of_torch_topk(backend: str, count: int, p: float) -> None:
    x = gradient(count, seed=count)
    k = math.ceil(count * p - 1e-9)
    frame = gradwire.codec(f"topk:p={p},values=fp32").encode(x)
    expected = torch.topk(x.abs(), k).indices.sort().values
    assert torch.equal(sent_positions(frame), expected)
    check_same(gradwire.decode(frame), torch.zeros(count).scatter(0, expected, x[expected]))


entries = st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, -2.0, 2.0, 1e-45, -3e38]), min_size=9, max_size=90)


@given(entries, st.integers(1, 100), st.booleans())
def test_ties_and_zeros(u: list[float], k: int, one_sign: bool) -> None:
    x = torch.tensor(u)
    expected = plain_sbc(x.tolist(), k)[0] if one_sign else plain_choice(u, k)
    for name in BACKENDS:
        with use_backend(name):
            done, positions, values = kernels.select(x, None, None, 1.0, k, 1, one_sign)
            assert (done, positions.tolist()) == (len(u), expected)
            check_same(values, x[positions])


@given(entries, st.integers(1, 30))
def test_sbc_follows_the_paper(u: list[float], k: int) -> None:
    positions, value = plain_sbc([float(np.float32(x)) for x in u], k)
    frame = gradwire.codec(f"sbc:k={k}").encode(torch.tensor(u))
    expected = torch.zeros(len(u))
    expected[positions] = value
    assert sent_positions(frame).tolist() == positions
    check_same(gradwire.decode(frame), expected)


@given(entries, st.integers(1, 30))
def test_stc_follows_the_paper(u: list[float], k: int) -> None:
    x = torch.tensor(u)
    positions = plain_choice(x.tolist(), k)
    expected = torch.zeros(len(u))
    expected[positions] = torch.sign(x[positions]) * plain_mean([abs(x.tolist()[i]) for i in positions])
    check_same(gradwire.decode(gradwire.codec(f"stc:k={k}").encode(x)), expected)


def test_one_sided(backend: str) -> None:
    """Without negative entries, or with fewer positive ones than k, means are over what there is."""
    x = torch.tensor([1.0, 2.0, 3.0, 0.0, 4.0] * 4)
    check_same(gradwire.decode(gradwire.codec("sbc:k=4").encode(x)), torch.where(x == 4, 4.0, 0.0))
    check_same(gradwire.decode(gradwire.codec("sbc:k=4").encode(-x)), torch.where(x == 4, -4.0, 0.0))
    few = torch.full((20,), -1.0)
    few[3], few[7] = 1.0, 2.0  # their mean is above 1, that of the twenty others
    assert gradwire.decode(gradwire.codec("sbc:k=10").encode(few)).nonzero().flatten().tolist() == [3, 7]


def test_count(backend: str) -> None:
    x = gradient(100)
    for p, k in ((0.07, 7), (0.001, 1), (0.29, 29), (0.999, 100), (1e-9, 1)):
        assert len(sent_positions(gradwire.codec(f"stc:p={p}").encode(x))) == k
    for k in (1, 99, 100, 101, 10**12):
        assert len(sent_positions(gradwire.codec(f"topk:k={k}").encode(x))) == min(k, 100)


# ── native and reference ──────────────────────────────────────────────────────────────────────────


def tensors() -> dict[str, torch.Tensor]:
    """Some that mislead the sample, some that make every entry a candidate."""
    n = 300_000
    clustered = gradient(n, 3) * 1e-6
    clustered[1000:4000] = gradient(3000, 4)
    ascending = gradient(n, 5).abs().sort().values
    misleading = gradient(n, 10) * 1e-6  # all large entries are where the sample looks
    seen = kernels.sample(torch.arange(n, dtype=torch.float32), None, 1.0).long()
    misleading[seen[:1000]] = gradient(1000, 11)
    stairs = torch.randint(1, 6, (n,), generator=torch.Generator().manual_seed(1)).float()
    stairs[seen] = 0.25  # so that all are candidates, and have to be thinned out on the way
    stairs[n - 9000 :: 5] = 6.0
    return {
        "usual": gradient(n, 1),
        "stairs": stairs,
        "clustered": clustered,
        "misleading": misleading,
        "ascending": ascending,
        "descending": -ascending.flip(0),
        "equal": torch.full((n,), -0.25),
        "few": torch.where(torch.arange(n) % 9973 == 5, gradient(n, 6), 0.0),
        "ties": torch.randint(-3, 4, (n,), generator=torch.Generator().manual_seed(0)).float(),
        "subnormal": gradient(n, 7) * 1e-38,
        "small": gradient(20_011, 8),
    }


@for_each("name", list(tensors()))
def test_native_selection_is_the_reference(name: str) -> None:
    x = tensors()[name]
    memory = (gradient(x.numel(), 9) * x.abs().max() * 0.1).where(x != 0, torch.tensor(0.0))
    for k in (1, 30, 3000, 80_000):
        for one_sign in (False, True):
            for e in (None, memory):
                found = {}
                for backend in BACKENDS:
                    with use_backend(backend):
                        out = torch.empty_like(x) if k == 30 else None if e is None else e.clone()
                        source = out if e is not None and k != 30 else e  # in place, or not
                        done, positions, values = kernels.select(x, source, out, 0.5, k, 1, one_sign)
                        left = None if out is None else bits(out)
                        found[backend] = (done, bits(positions), bits(values), left)
                assert all(f == found["reference"] for f in found.values()), (k, one_sign, e is None)


@for_each("spec", METHODS)
def test_frames_are_the_same_on_all_backends(spec: str) -> None:
    for count, p in ((50_000, 0.02), (3000, 0.3), (33, 0.1)):
        found = set()
        for backend in BACKENDS:
            with use_backend(backend):
                memory = gradient(count, 1) * 0.5
                frame = encode_into(gradwire.codec(with_p(spec, p)), gradient(count), residual=memory, decay=0.9)
                found.add((frame, bits(memory), bits(gradwire.decode(frame))))
        assert len(found) == 1


# ── what stays behind ─────────────────────────────────────────────────────────────────────────────


@for_each("dtype", FLOATS)
@for_each("spec", METHODS)
def test_error_memory_is_exact(backend: str, spec: str, dtype: torch.dtype) -> None:
    codec = gradwire.codec(with_p(spec, 0.05))
    memory = torch.zeros(1000)
    for step, scale in enumerate((1e-3, 1.0, 3e4, 1e-7)):
        grad = (gradient(1000, step, scale=scale)).clamp(-6e4, 6e4).to(dtype)
        u = grad.float() + memory * 0.9
        frame = encode_into(codec, grad, residual=memory, decay=0.9)
        decoded = gradwire.decode(frame)
        assert decoded.dtype == dtype
        # SBC sends one side; nothing else has fewer than k, since no entry is 0.
        assert len(sent_positions(frame)) == 50
        check_same(memory, u - decoded.float())


@for_each("spec", METHODS)
def test_memory_may_be_missing_or_elsewhere(backend: str, spec: str) -> None:
    codec, x, e = gradwire.codec(with_p(spec, 0.1)), gradient(500), gradient(500, 1)
    plain = codec.encode(x)
    out = torch.empty(500)
    assert encode_into(codec, x, residual_out=out) == plain
    check_same(out, x - gradwire.decode(plain))
    elsewhere, before = torch.empty(500), e.clone()
    frame = encode_into(codec, x, residual=e, residual_out=elsewhere)
    check_same(e, before)
    check_same(elsewhere, x + e - gradwire.decode(frame))
    assert encode_into(codec, x, residual=e) == frame
    check_same(e, elsewhere)


@for_each("bad", [math.nan, math.inf, -math.inf])
@for_each("spec", ["sbc", "stc", "topk", "topk:values=fp4", "m22"])
def test_non_finite(backend: str, spec: str, bad: float) -> None:
    codec, e = gradwire.codec(spec), gradient(5000, 1)
    for at in (0, 2500, 4999):
        x = gradient(5000)
        x[at] = bad
        memory, out = e.clone(), torch.empty(5000)
        for options in ({}, {"residual": memory}, {"residual": memory, "residual_out": out}):
            frame = encode_into(codec, x, **options)
            assert headers.read_header(memoryview(frame)).nonfinite
            check_same(gradwire.decode(frame), x)
            check_same(memory, e)
        check_same(out, e)


@pytest.mark.skipif(len(BACKENDS) == 1, reason="the reference looks first")
@pytest.mark.parametrize("spec", ["sbc", "topk"])
def test_large_memory_is_restored_to_rounding(spec: str) -> None:
    n = encoding.CHECKED_AHEAD + 1000
    x, e = gradient(n), gradient(n, 1)
    x[n - 500] = math.nan
    memory = e.clone()
    out = torch.empty(gradwire.codec(spec).max_frame_bytes(x), dtype=torch.uint8)
    gradwire.codec(spec).encode_into(x, out, residual=memory, decay=0.5)
    torch.testing.assert_close(memory, e, rtol=1e-5, atol=1e-8)
    check_same(memory[n - 400 :], e[n - 400 :])


def test_sums_that_overflow_are_limited(backend: str) -> None:
    x, e = gradient(5000), gradient(5000, 1)
    x[4000], e[4000] = 3e38, 3e38
    memory = e.clone()
    frame = encode_into(gradwire.codec("topk:k=2,values=fp32"), x, residual=memory)
    assert gradwire.decode(frame)[4000] == torch.finfo(torch.float32).max
    assert memory[4000] == 0 and bool((memory[:4000] == (x + e)[:4000]).sum() >= 3999)
    memory[7] = math.nan  # a memory that is not finite spoils no frame
    check_same(gradwire.decode(encode_into(gradwire.codec("sbc"), x, residual=memory)), x)


# ── decoding ──────────────────────────────────────────────────────────────────────────────────────


@for_each("spec", METHODS)
def test_decode_into_weighted_and_added(backend: str, spec: str) -> None:
    frame = gradwire.codec(with_p(spec, 0.03)).encode(gradient(1000))
    header, payload = codecs.open_frame(codecs.as_bytes(frame))
    decoded = gradwire.decode(frame)
    for dtype in FLOATS:
        start = gradient(1000, 5).to(dtype)
        for weight in (1.0, 0.25):
            out = start.clone()
            codecs.decode_payload(header, payload, out, weight, True)
            check_same(out, start + decoded.to(dtype) * weight)
            codecs.decode_payload(header, payload, out, weight, False)
            check_same(out + 0.0, decoded.to(dtype) * weight + 0.0)


@for_each("shape", [(), (1,), (5, 0), (3, 7), (2, 1, 5)])
@for_each("dtype", FLOATS)
def test_shapes(backend: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for spec in METHODS:
        x = gradient(max(1, math.prod(shape)))[: math.prod(shape)].reshape(shape).to(dtype)
        decoded = gradwire.decode(gradwire.codec(with_p(spec, 0.5)).encode(x))
        assert (decoded.shape, decoded.dtype) == (x.shape, x.dtype)
        zero = torch.zeros(shape, dtype=dtype)
        check_same(gradwire.decode(gradwire.codec(spec).encode(zero)), zero)


def test_strided_tensors_and_segments(backend: str) -> None:
    x = gradient(600).reshape(20, 30).t()
    codec = gradwire.codec("topk:p=0.1,values=fp32")
    check_same(gradwire.decode(codec.encode(x)), gradwire.decode(codec.encode(x.contiguous())))
    assert encode_into(codec, gradient(600), segments=[100, 500]) == codec.encode(gradient(600))


def test_all_zero_frame_has_one_byte(backend: str) -> None:
    for spec in METHODS:
        frame = gradwire.codec(spec).encode(torch.zeros(1000))
        header = headers.read_header(memoryview(frame))
        assert (header.codec, header.payload_length) == (headers.SPARSE, 1)
        assert sent_positions(frame).numel() == 0


@for_each("spec", METHODS)
def test_extreme_values(backend: str, spec: str) -> None:
    codec = gradwire.codec(with_p(spec, 0.2))
    for scale in (1e-44, 1e-38, 1e38):
        x = torch.sign(gradient(50)) * scale * torch.linspace(1, 3, 50)
        memory = torch.zeros(50)
        decoded = gradwire.decode(encode_into(codec, x, residual=memory))
        assert bool(torch.isfinite(decoded).all())
        check_same(memory, x - decoded)


# ── sizes, thresholds, parameters ─────────────────────────────────────────────────────────────────


@pytest.mark.skipif(len(BACKENDS) == 1, reason="slow on the reference kernels")
@pytest.mark.parametrize("p", list(CARD))
def test_bits_per_position(p: float) -> None:
    """Within 2% of the paper's figure, with header, the one float and everything."""
    x = torch.randn(1_000_000, generator=torch.Generator().manual_seed(1))
    k = math.ceil(p * 1_000_000)
    for way in ("auto", "golomb"):
        frame = gradwire.codec(f"sbc:p={p},positions={way}").encode(x)
        assert len(sent_positions(frame)) == k
        assert 8 * len(frame) <= 1.02 * CARD[p] * k
    signs = gradwire.codec(f"stc:p={p}").encode(x)
    assert 8 * len(signs) <= 1.02 * (CARD[p] + 1) * k


def test_whole_model_threshold(backend: str) -> None:
    parts = [gradient(1000, 1), gradient(3000, 2) * 3, torch.zeros(0), gradient(17, 3).reshape(17, 1) * 100]
    together = torch.cat([t.flatten() for t in parts])
    for p in (0.001, 0.01, 0.3):
        k = math.ceil(p * together.numel())
        threshold = whole_model_threshold(parts, p)
        assert threshold == float(together.abs().sort(descending=True).values[k - 1])
        sent = 0
        for make in (SBC, STC, TopK, M22):
            for t in parts:
                codec = codecs.Codec("test", make(threshold=threshold))
                positions = sent_positions(codec.encode(t)) if t.numel() else torch.empty(0)
                expected = (t.flatten().abs() >= threshold).nonzero().flatten()
                if make is SBC:
                    assert set(positions.tolist()) <= set(expected.tolist())
                else:
                    assert positions.tolist() == expected.tolist()
                sent += len(positions) if make is TopK else 0
        assert sent == k
    assert whole_model_threshold([torch.zeros(5), torch.ones(2)], 0.5) == 0.0
    with pytest.raises(ValueError, match="NaN"):
        whole_model_threshold([torch.tensor([1.0, math.nan])], 0.5)


def test_threshold_between_two_floats(backend: str) -> None:
    x = torch.tensor([1.0, 1 + 2**-23, 1 - 2**-24, 0.0, -2.0, -0.5, 0.25, 0.125, 3.0])
    for threshold, count in ((1.0, 4), (1 + 2**-30, 3), (0.0, 8), (1e300, 0)):
        assert len(sent_positions(codecs.Codec("t", TopK(threshold=threshold)).encode(x))) == count


@for_each(
    ("spec", "match"),
    [
        ("sbc:p=0", "sbc: p: '0' is not a number above 0 and below 1"),
        ("stc:p=1", "above 0 and below 1"),
        ("topk:p=-0.1", "above 0 and below 1"),
        ("topk:p=x", "above 0 and below 1"),
        ("topk:p=nan", "above 0 and below 1"),
        ("topk:k=0", "from 1 to 281474976710656"),
        ("topk:k=1.5", "not a whole number"),
        ("topk:values=fp64", "allowed: .*"),
        ("sbc:values=fp16", "unknown parameter of sbc"),
        ("sbc:positions=huffman", "auto, golomb, rans"),
        ("sbc:decay=2", "from 0 to 1"),
    ],
)
def test_bad_parameters(spec: str, match: str) -> None:
    with pytest.raises(SpecError, match=match):
        gradwire.codec(spec)


def test_bad_arguments_of_converters() -> None:
    for make in (SBC, STC, TopK, M22):
        for bad in (
            {"p": 0},
            {"p": 1.0},
            {"k": 0},
            {"positions": "other"},
            {"threshold": -1.0},
            {"threshold": math.nan},
        ):
            with pytest.raises(SpecError):
                make(**bad)


def test_recipes() -> None:
    for name in ("sbc", "stc", "topk"):
        recipe = gradwire.recipe(name)
        assert recipe.decay == 1 and isinstance(recipe.codec.converter, Sparse)
        assert recipe.codec.converter.p == 0.01
    assert str(gradwire.codec("topk:k=5")) == "topk:p=0.01,k=5,values=bf16,positions=auto"
    assert gradwire.codec(str(gradwire.codec("topk:k=5"))) == gradwire.codec("topk:k=5")


def test_sent_positions_of_other_frames() -> None:
    x = gradient(100)
    assert sent_positions(gradwire.codec("none").encode(x)).tolist() == list(range(100))
    for frame in (gradwire.codec("co3").encode(x), gradwire.codec("sbc").encode(x)[:-1], b""):
        with pytest.raises(FrameError):
            sent_positions(frame)
    frame = torch.frombuffer(bytearray(gradwire.codec("sbc").encode(x)), dtype=torch.uint8)
    assert len(sent_positions(frame)) == 1


def test_select_stops_before_what_is_not_finite(backend: str) -> None:
    """And writes nothing from there on."""
    x, e = gradient(10_000), gradient(10_000, 1)
    x[7777] = math.inf
    memory = e.clone()
    done, positions, values = kernels.select(x, memory, memory, 0.5, 10)
    assert done <= 7777 and not len(positions) and not len(values)
    check_same(memory[:done], x[:done] + e[:done] * 0.5)
    check_same(memory[done:], e[done:])
    job = Conversion(x, x, e.clone(), None)
    with pytest.raises(gradwire.convert.conversion.NonFinite):
        SBC().select(job)


@pytest.mark.slow
@pytest.mark.skipif(len(BACKENDS) == 1, reason="needs the native kernels")
def test_more_than_2_31_entries() -> None:
    n = 2**31 + 5000
    x = torch.zeros(n)
    places = [3, 2**31 - 1, 2**31, n - 1]
    x[places] = torch.tensor([1.0, -2.0, 3.0, -4.0])
    done, positions, values = kernels.select(x, None, None, 1.0, 3)
    assert (done, positions.tolist(), values.tolist()) == (n, places[1:], [-2.0, 3.0, -4.0])
    kernels.scatter(x, positions, -values, True)
    assert x[places].tolist() == [1.0, 0.0, 0.0, 0.0]
    kernels.scatter(x, positions, values, False)
    assert x[places].tolist() == [0.0, -2.0, 3.0, -4.0]
