"""Input that is hard or wrong: each kind has a defined result."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch

import gradwire
from gradwire import GradwireError
from support.cases import for_each
from support.helpers import BACKENDS, FLOATS, SPECS, bits, check_contract_3, check_same, encode_into, gradient
from support.plain_decoder import plain_decode

NONFINITE = 1


# ── NaN and infinities ────────────────────────────────────────────────────────────────────────────


def check_travels_as_it_is(codec: gradwire.Codec, tensor: torch.Tensor, **options: object) -> None:
    memory = gradient(tensor.numel(), 9)
    elsewhere, kept, in_place = torch.full_like(memory, 7.0), memory.clone(), memory.clone()
    frame = encode_into(codec, tensor, residual=in_place, decay=0.9, **options)
    found = plain_decode(frame)
    assert (found.codec, found.flags) == (0, NONFINITE)
    check_same(gradwire.decode(frame), tensor)
    assert encode_into(codec, tensor, residual=memory, residual_out=elsewhere, decay=0.9, **options) == frame
    for after in (memory, elsewhere, in_place):
        check_same(after, kept)
    if not options:
        assert codec.encode(tensor) == frame


@for_each("dtype", FLOATS)
@for_each("spec", SPECS)
def test_non_finite_tensors_travel_as_they_are(backend, spec, dtype):
    for bad in (math.nan, math.inf, -math.inf):
        for count, position in ((1, 0), (5, 4), (100, 0), (100, 99)):
            tensor = gradient(count).to(dtype)
            tensor[position] = bad
            check_travels_as_it_is(gradwire.codec(spec), tensor)


@for_each("position", [0, 63, 64, 12_345, 65_536, 199_999])
@for_each("spec", ["co3", "gennorm", "co3:format=e2m1"])
def test_one_nan_among_many(backend, spec, position):
    """Also where the sample that the fit looks at does not see it."""
    tensor = gradient(200_000)
    tensor[position] = math.nan
    check_travels_as_it_is(gradwire.codec(spec), tensor)


def test_nan_payloads_and_signed_zeros_keep_their_bits(backend):
    words = torch.tensor([0x7FC00001, -0x3FFFFF, 0x7F800001, -0x80000000, 0, 1], dtype=torch.int32)
    tensor = words.view(torch.float32)
    check_travels_as_it_is(gradwire.codec("co3"), tensor)


def test_non_finite_segments(backend):
    tensor = gradient(150)
    tensor[120] = math.inf
    check_travels_as_it_is(gradwire.codec("co3"), tensor, segments=[50, 50, 50])


def test_memory_of_a_large_tensor_survives_a_nan(backend):
    """In place and beyond the size that is looked through first, it comes back to fp32 rounding."""
    count = 2**22 + 100
    tensor, memory = (gradient(n).repeat(count // n + 1)[:count] for n in (2000, 1000))
    tensor[count - 50] = math.nan
    kept = memory.clone()
    frame = encode_large(gradwire.codec("co3"), tensor, memory)
    check_same(gradwire.decode(frame), tensor)
    # Three rounded operations on numbers of the size of g, e and what was sent, then a division by 0.9.
    scale = tensor[:-50].abs().max() + kept.abs().max()
    gap = (memory - kept).abs()
    assert float(gap[:-50].max()) <= 8 * 2.0**-24 * float(scale) / 0.9
    assert bool((gap[-50:] == 0).all())


def encode_large(codec: gradwire.Codec, tensor: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    out = torch.empty(codec.max_frame_bytes(tensor), dtype=torch.uint8)
    return out[: codec.encode_into(tensor, out, residual=memory, decay=0.9)]


@for_each("bad", [math.nan, math.inf])
@for_each("count", [5, 100, 200_000])
def test_memory_that_is_not_finite_never_makes_a_bad_frame(backend, count, bad):
    """It should never come to that; if it does, the frame is still one that decodes, or the caller is told."""
    memory = torch.zeros(count)
    memory[count // 2] = bad
    try:
        frame = encode_into(gradwire.codec("co3"), gradient(count), residual=memory, decay=0.9)
    except GradwireError:
        return
    decoded = gradwire.decode(frame)
    assert decoded.isfinite().all() or plain_decode(frame).flags & NONFINITE


# ── numbers at the edges ──────────────────────────────────────────────────────────────────────────


@for_each("dtype", FLOATS)
@for_each("spec", SPECS)
def test_zeros_stay_zero(backend, spec, dtype):
    large = 70_000 if spec == "gennorm" or backend == BACKENDS[-1] else 200
    for count in (1, 9, 100, large):
        for zero in (torch.zeros(count, dtype=dtype), -torch.zeros(count, dtype=dtype)):
            memory = torch.zeros(count)
            frame = encode_into(gradwire.codec(spec), zero, residual=memory, decay=0.9)
            assert gradwire.decode(frame).count_nonzero() == memory.count_nonzero() == 0
            if frame[3] & 15 == 1:
                assert len(frame) <= (24 if count <= 2**16 else count // 100)


EDGES = {
    "smallest": torch.full((100,), 1e-45),
    "subnormal": gradient(100) * 1e-37,
    "mixed subnormal": torch.cat([gradient(50) * 1e-38, gradient(50) * 1e-35]),
    "wide": torch.cat([torch.full((50,), 1e38), torch.full((50,), 1e-38), torch.zeros(3)]),
    "one giant": torch.cat([gradient(99), torch.tensor([1e38])]),
    "largest": torch.full((100,), torch.finfo(torch.float32).max),
    "both largest": torch.tensor([1.0, -1.0] * 50) * torch.finfo(torch.float32).max,
    "constant": torch.full((100,), 0.1),
    "one entry": torch.cat([torch.zeros(99), torch.ones(1)]),
    "two sizes": torch.tensor([1.0] * 50 + [1e-3] * 50),
}


@for_each("name", EDGES)
@for_each("spec", SPECS)
def test_edges_of_the_range(backend, spec, name):
    """Finite in, finite out, and what is not sent is remembered, three times over."""
    tensor, memory = EDGES[name], torch.zeros(len(EDGES[name]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            before = memory.clone()
            sent = gradwire.decode(encode_into(gradwire.codec(spec), tensor, residual=memory, decay=0.5))
            assert sent.isfinite().all() and memory.isfinite().all()
            if "largest" not in name:  # there g + γe is limited to the finite range
                check_contract_3(sent, memory, tensor, before, 0.5)


@for_each("count", [3, 100])
@for_each("spec", ["none", "fp16", "bf16", "co3", "gennorm"])
def test_half_precision_does_not_overflow(backend, spec, count):
    """g + γe beyond what fp16 or bf16 holds: what is sent is finite, and the rest is remembered."""
    for dtype in (torch.float16, torch.bfloat16):
        grad = torch.full((count,), torch.finfo(dtype).max, dtype=dtype)
        memory = torch.full((count,), 1000.0 if dtype is torch.float16 else 1e36)
        before = memory.clone()
        frame = encode_into(gradwire.codec(spec), grad, residual=memory, decay=1.0)
        sent = gradwire.decode(frame)
        assert plain_decode(frame).flags == 0
        assert sent.isfinite().all() and memory.isfinite().all()
        check_contract_3(sent, memory, grad.float(), before, 1.0)


def test_fp64_beyond_the_range_of_fp32_travels_as_it_is(backend):
    tensor = torch.tensor([1e300, -1e-300, 1.5, 0.0] * 10, dtype=torch.float64)
    for spec in SPECS:
        frame = gradwire.codec(spec).encode(tensor)
        check_same(gradwire.decode(frame), tensor)
        assert plain_decode(frame).flags == 0


# ── tensors that no codec takes ───────────────────────────────────────────────────────────────────


@for_each(
    "wrong, message",
    [
        (torch.eye(5).to_sparse(), r"layout torch\.sparse_coo: call \.to_dense\(\)"),
        (torch.zeros(5, dtype=torch.complex64), r"encode torch\.view_as_real\(tensor\); supported: torch\.float32"),
        (torch.zeros(5).to(torch.float8_e5m2), r"cannot encode torch\.float8_e5m2"),
        (torch.zeros(5, device="meta"), "meta device has no values"),
        (torch.zeros((1,) * 16), "at most 15 dimensions, not 16"),
        (np.zeros(5), r"expected a torch\.Tensor, got ndarray"),
        ([1.0, 2.0], r"expected a torch\.Tensor, got list"),
        (None, "got NoneType"),
    ],
    ids=["sparse", "complex", "float8", "meta", "rank", "numpy", "list", "None"],
)
@for_each("spec", ["none", "fp16", "co3"])
def test_tensors_that_no_codec_takes(spec, wrong, message):
    codec = gradwire.codec(spec)
    with pytest.raises(GradwireError, match=message):
        codec.encode(wrong)
    with pytest.raises(GradwireError, match=message):
        codec.encode_into(wrong, torch.empty(10_000, dtype=torch.uint8))


# ── wrong arguments ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "out",
    [
        torch.empty(10_000),
        torch.empty(10_000, dtype=torch.int8),
        torch.empty(100, 100, dtype=torch.uint8),
        torch.empty(20_000, dtype=torch.uint8)[::2],
        torch.empty(10_000, dtype=torch.uint8, device="meta"),
    ],
    ids=["fp32", "int8", "2-d", "strided", "meta"],
)
def test_out_of_the_wrong_kind(out):
    with pytest.raises(GradwireError, match="out must be a flat, contiguous uint8 tensor on the CPU"):
        gradwire.codec("co3").encode_into(gradient(100), out)


def test_out_that_is_too_small():
    codec, tensor = gradwire.codec("co3"), gradient(100)
    needed = codec.max_frame_bytes(tensor)
    assert codec.encode_into(tensor, torch.empty(needed, dtype=torch.uint8)) > 0
    with pytest.raises(GradwireError, match=f"out has {needed - 1} bytes; .* asks for {needed}"):
        codec.encode_into(tensor, torch.empty(needed - 1, dtype=torch.uint8))


@for_each(
    "memory",
    [
        torch.zeros(99),
        torch.zeros(101),
        torch.zeros(100, dtype=torch.float64),
        torch.zeros(100, dtype=torch.float16),
        torch.zeros(200)[::2],
        torch.zeros(100, device="meta"),
    ],
    ids=["short", "long", "fp64", "fp16", "strided", "meta"],
)
@for_each("argument", ["residual", "residual_out"])
def test_memory_of_the_wrong_kind(argument, memory):
    codec, tensor = gradwire.codec("co3"), gradient(100)
    options = {"residual": torch.zeros(100)} | {argument: memory}
    with pytest.raises(GradwireError, match="residual"):
        encode_into(codec, tensor, **options)


@for_each(
    "option",
    [
        {"segments": 5},
        {"segments": ("a",)},
        {"segments": (50.0, 50.0)},
        {"decay": "0.9"},
        {"decay": None},
        {"seed": "1"},
        {"seed": None},
        {"seed": 1.5},
    ],
    ids=str,
)
def test_options_of_the_wrong_kind(option):
    [name] = option
    for spec in ("co3", "qsgd"):
        with pytest.raises(GradwireError, match=f"^{name} must be "):
            gradwire.codec(spec).encode_into(gradient(100), torch.empty(10_000, dtype=torch.uint8), **option)


def test_a_refused_call_changes_nothing():
    codec, memory, out = gradwire.codec("co3"), gradient(100), torch.zeros(10_000, dtype=torch.uint8)
    with pytest.raises(GradwireError):
        codec.encode_into(gradient(100), out, residual=memory, residual_out=torch.zeros(99))
    with pytest.raises(GradwireError):
        codec.encode_into(gradient(100), out, residual=memory, segments=[1, 2])
    check_same(memory, gradient(100))
    assert not out.any()


# ── more than 2³¹ entries ─────────────────────────────────────────────────────────────────────────

HUGE = 2**31 + 100


def test_layout_of_huge_tensors():
    from gradwire import kernels
    from gradwire.compress import rans

    for count in (2**31 - 1, 2**31, HUGE, 2**32 + 1, 2**45 + 7):
        lane_bits, chunks = rans.layout(count, 3.0 * count)
        size = kernels.chunk_size(count, chunks)
        assert lane_bits == 6 and (chunks - 1) * size < count <= chunks * size


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.int8, torch.bool])
def test_huge_stored_tensors(dtype):
    """2³¹ + 100 entries, from a few that are repeated: about 9 GB, the frame and its copy included."""
    tensor = torch.tensor([1, 0, 1, 1], dtype=dtype).repeat(HUGE // 4)
    frame = gradwire.codec("none").encode(tensor)
    assert len(frame) == HUGE + 9 + 5 + 5
    decoded = gradwire.decode(frame)
    del frame
    assert torch.equal(decoded, tensor)


@pytest.mark.slow
@pytest.mark.skipif(not gradwire.kernels.instruction_sets(), reason="needs the native kernels")
def test_huge_quantized_tensors():
    """2³¹ + 100 fp32 entries, zero but for some around 2³¹ and at both ends: about 11 GB."""
    places = [0, 2**30, 2**31 - 1, 2**31, 2**31 + 1, HUGE - 1]
    tensor = torch.zeros(HUGE)
    tensor[places] = 0.25
    frame = gradwire.codec("co3").encode(tensor)
    tensor.fill_(7)
    gradwire.decode(frame, out=tensor)
    assert tensor[places].tolist() == [tensor[0].item()] * 6 and abs(tensor[0] - 0.25) < 0.05
    tensor[places] = 0
    assert not tensor.any()
    assert bits(tensor[:0]) == b""
