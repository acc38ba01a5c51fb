"""Codecs: tensors of all kinds to frames and back, error feedback through the bytes, stochastic rounding."""

from __future__ import annotations

import contextlib
import itertools
import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradwire
from gradwire import FrameError, GradwireError, codecs
from support.cases import for_each
from support.helpers import (
    BACKENDS,
    DTYPES,
    FLOATS,
    INTEGERS,
    SPECS,
    bits,
    check_contract_3,
    check_same,
    encode_into,
    gradient,
    heavy,
)
from support.plain_coders import plain_random
from support.plain_decoder import Plain, plain_decode

STOCHASTIC = "co3:rounding=stochastic"


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    count = math.prod(shape)
    if dtype.is_floating_point:
        return gradient(count, seed).to(dtype).reshape(shape)
    low, high = (0, 2) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    numbers = np.random.default_rng(seed).integers(low, high, count, endpoint=dtype is not torch.bool)
    return torch.from_numpy(numbers).to(dtype).reshape(shape)


def check_nearest(found: Plain, tensor: torch.Tensor) -> None:
    """No level is nearer to y = u/step than the one that was sent."""
    u = tensor.detach().resolve_neg().float().reshape(-1).numpy()
    with np.errstate(over="ignore"):
        y = (u * (np.float32(1) / np.float32(found.segments[0][1]))).astype(np.float64)
    y = np.clip(y, -1e30, 1e30)
    nearest = np.abs(y[:, None] - found.levels[None, :]).min(axis=1)
    assert np.array_equal(np.abs(y - found.levels[found.symbols]), nearest)


def check_round_trip(codec: gradwire.Codec, tensor: torch.Tensor) -> torch.Tensor:
    """Shape and dtype come back; the values are what the frame says and the nearest there are."""
    frame = codec.encode(tensor)
    decoded = gradwire.decode(frame)
    assert (decoded.shape, decoded.dtype, decoded.requires_grad) == (tensor.shape, tensor.dtype, False)
    assert decoded.is_contiguous()
    found = plain_decode(frame)
    check_same(decoded, found.tensor)
    if found.codec == 0:
        check_same(decoded, tensor.detach().contiguous())
    elif found.codec == 1 and "stochastic" not in str(codec):
        check_nearest(found, tensor)
    return decoded


SHAPES = [(), (0,), (3, 0, 2), (1,), (1, 1, 1), (9,), (33,), (5, 3), (2, 3, 4, 5), (1,) * 14 + (40,), (700,)]
VIEWS = ["transpose", "every second", "expand", "flip", "narrow"]


@for_each("spec", SPECS)
def test_every_dtype(backend, spec):
    codec = gradwire.codec(spec)
    for dtype in DTYPES:
        for shape in ((4, 31), (3,), (0,), ()):
            check_round_trip(codec, random_tensor(shape, dtype))


@pytest.mark.parametrize("spec", ["none", "bf16", "co3", "gennorm"])
def test_every_shape(backend, spec):
    for shape in SHAPES:
        check_round_trip(gradwire.codec(spec), random_tensor(shape, torch.float32))


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any dtype and up to four dimensions, seen through a few of the views there are."""
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=4)))
    tensor = random_tensor(shape, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 1000)))
    if tensor.is_floating_point():
        tensor = tensor * draw(st.sampled_from([1.0, 1e-30, 1e30, 0.0]))
        tensor = tensor.nan_to_num(0, 1, -1)  # fp16 does not reach 1e30
        tensor.requires_grad_(draw(st.booleans()))
    for view in draw(st.lists(st.sampled_from(VIEWS), max_size=3)):
        if view == "transpose":
            tensor = tensor.permute(tuple(reversed(range(tensor.dim()))))
        elif view == "every second" and tensor.dim():
            tensor = tensor[::2]
        elif view == "expand":
            tensor = tensor.expand(3, *tensor.shape)
        elif view == "flip" and tensor.dim():
            tensor = tensor.flip(0)
        elif view == "narrow" and tensor.dim() and tensor.shape[-1]:
            tensor = tensor[..., 1:]
    return tensor


@given(tensor=tensors(), spec=st.sampled_from(SPECS))
def test_round_trip_of_any_tensor(backend, tensor, spec):
    before = bits(tensor)
    check_round_trip(gradwire.codec(spec), tensor)
    assert bits(tensor) == before


@pytest.mark.parametrize("spec", ["none", "fp16", "co3", "gennorm"])
def test_views_are_encoded_as_what_they_show(backend, spec):
    codec, base = gradwire.codec(spec), random_tensor((40, 60), torch.float32)
    views = [
        base.T, base[::3], base[:, ::2], base[:, 7], base[:1].expand(40, 60), base[0, :1].expand(300),
        base.flip(0), base.reshape(4, 10, 6, 10).to(memory_format=torch.channels_last),
        torch.nn.Parameter(base), torch.complex(base, base).conj().imag,
    ]  # fmt: skip
    for view in views:
        assert codec.encode(view) == codec.encode(view.detach().clone(memory_format=torch.contiguous_format))
        check_round_trip(codec, view)


# ── what a codec is ───────────────────────────────────────────────────────────────────────────────


@for_each("spec", SPECS)
def test_its_text_rebuilds_a_codec(spec):
    codec = gradwire.codec(spec)
    again = gradwire.codec(str(codec))
    assert (again, str(again), hash(again)) == (codec, str(codec), hash(codec))
    assert eval(repr(codec)) == codec
    assert again.encode(gradient(500)) == codec.encode(gradient(500))
    assert codec != gradwire.codec("co3:format=e3m3b3") and codec != str(codec)


@for_each("spec", SPECS)
def test_frames_stay_below_what_was_announced(backend, spec):
    codec = gradwire.codec(spec)
    wide = gradient(3000, beta=0.2) * 1e20
    for tensor in (torch.zeros(3000), gradient(3000), wide, gradient(9), random_tensor((5,), torch.int8)):
        assert len(codec.encode(tensor)) <= codec.max_frame_bytes(tensor)


@for_each("coder", ["huffman", "rans"])
@for_each("name", ["fp4", "fp8", "e2m1"])
def test_coding_is_never_longer_than_raw(coder, name):
    codec, raw = (gradwire.codec(f"co3:format={name},coder={c}") for c in (coder, "raw"))
    for count in [*range(9, 130), 300, 3000]:
        assert len(codec.encode(gradient(count))) <= len(raw.encode(gradient(count))), f"{count} entries"


def test_small_tensors_are_stored():
    for count, dtype in [(8, torch.float32), (16, torch.float16), (16, torch.bfloat16), (4, torch.float64)]:
        tensor = random_tensor((count,), dtype)
        check_same(gradwire.decode(gradwire.codec("co3").encode(tensor)), tensor)
        assert plain_decode(gradwire.codec("co3").encode(random_tensor((count + 1,), dtype))).codec == 1


@for_each("spec", ["co3", "co3:format=fp8", "co3:format=e2m1"])
@for_each("beta", [0.3, 0.5, 1.0, 2.0])
def test_frames_take_what_their_symbols_are_worth(backend, spec, beta):
    """Within half a percent of the entropy of the symbols and a byte for the frequency of each of them."""
    count = 2**16
    frame = gradwire.codec(spec).encode(gradient(count, beta=beta))
    _, counts = torch.unique(gradwire.decode(frame), return_counts=True)
    entropy = float(-(counts * (counts / count).log2()).sum())
    assert entropy <= 8 * len(frame) <= 1.005 * entropy + 8 * (60 + len(counts))


# ── encode_into ───────────────────────────────────────────────────────────────────────────────────


@for_each("spec", SPECS)
@for_each("count", [0, 5, 500, 70_000])
def test_encode_into_writes_what_encode_returns(backend, spec, count):
    if backend != BACKENDS[-1]:
        count = min(count, 3000)
    codec, tensor = gradwire.codec(spec), gradient(count)
    assert encode_into(codec, tensor, seed=3) == codec.encode(tensor, seed=3)
    assert encode_into(codec, tensor, seed=3, residual=torch.zeros(count)) == codec.encode(tensor, seed=3)


@for_each("spec", SPECS)
def test_memory_in_place_or_elsewhere(backend, spec):
    codec = gradwire.codec(spec)
    for count, dtype in itertools.product((0, 3, 500), FLOATS):
        tensor, memory = random_tensor((count,), dtype), gradient(count, 1)
        kept, elsewhere, in_place = memory.clone(), torch.full((count,), 7.0), memory.clone()
        frame = encode_into(codec, tensor, residual=memory, residual_out=elsewhere, decay=0.9)
        assert encode_into(codec, tensor, residual=in_place, decay=0.9) == frame
        check_same(in_place, elsewhere)
        check_same(memory, kept)


@pytest.mark.parametrize("spec", ["none", "fp16", "co3"])
def test_memory_is_unchanged_by_integers(spec):
    memory, in_place, elsewhere = gradient(50), gradient(50), torch.full((50,), 7.0)
    encode_into(gradwire.codec(spec), torch.arange(50), residual=in_place, decay=0.9)
    encode_into(gradwire.codec(spec), torch.arange(50), residual=memory, residual_out=elsewhere, decay=0.9)
    for after in (in_place, elsewhere, memory):
        check_same(after, gradient(50))


def test_memory_keeps_its_shape(backend):
    codec, tensor, memory = gradwire.codec("co3"), gradient(600).reshape(20, 30), torch.zeros(20, 30)
    encode_into(codec, tensor, residual=memory)
    assert memory.shape == (20, 30) and memory.count_nonzero() > 0


def test_writes_nothing_behind_what_was_announced(backend):
    for spec in SPECS:
        codec = gradwire.codec(spec)
        for count in (9, 100, 5000):
            tensor = gradient(count)
            room = codec.max_frame_bytes(tensor)
            out = torch.full((room + 4096,), 0xA5, dtype=torch.uint8)
            codec.encode_into(tensor, out[:room], residual=torch.zeros(count))
            assert bool((out[room:] == 0xA5).all())


# ── contract 3: nothing is lost ───────────────────────────────────────────────────────────────────


@for_each("dtype", FLOATS)
@for_each("spec", [*SPECS, "co3:format=ue3m2b3"])
def test_what_is_not_sent_is_remembered(backend, spec, dtype):
    """ĝ + e′ = g + γe each step, and over up to 50 steps Σĝ + e_T + (1−γ)Σe = Σg; ĝ is decoded from the bytes."""
    codec, count, decay = gradwire.codec(spec), 90, 1.0 if "fp8" in spec else 0.9
    memory = torch.zeros(count)
    left, right, bound = (torch.zeros(count, dtype=torch.float64) for _ in range(3))
    # All instruction sets write the same frames and memory (test_native and others): one of them goes all the way.
    thorough = backend == BACKENDS[-1] or spec in ("none", "bf16", "co3")
    for t in range((50 if dtype == torch.float32 else 15) if thorough else 5):
        grad, before = (gradient(count, t) * 2.0 ** (t % 7)).to(dtype), memory.clone()
        frame = encode_into(codec, grad, residual=memory, decay=decay, seed=t)
        sent = gradwire.decode(frame)
        assert (sent.dtype, memory.dtype) == (dtype, torch.float32)
        bound += check_contract_3(sent, memory, grad.float(), before, decay)
        left += sent.double() + (1 - float(np.float32(decay))) * before.double()
        right += grad.double()
    assert bool(((left + memory.double() - right).abs() <= bound * 1.001).all())


@pytest.mark.parametrize("count", [300, 70_000, 400_000])
def test_what_is_not_sent_is_remembered_whatever_the_size(backend, count):
    """Sampled fits, several lanes and several chunks."""
    if backend == "reference" and count > 100_000:
        count = 100_000
    codec, memory = gradwire.codec("co3"), gradient(count, 5)
    for t in range(2):
        grad, before = gradient(count, t), memory.clone()
        sent = gradwire.decode(encode_into(codec, grad, residual=memory, decay=0.9))
        check_contract_3(sent, memory, grad, before, 0.9)


def test_a_sample_that_misleads(backend):
    """Almost all zeros, but for a block that the sample sees little of: still right, and not much too long."""
    count = 150_000 if backend != "reference" else 70_000
    codec, tensor, memory = gradwire.codec("co3"), torch.zeros(count), torch.zeros(count)
    tensor[60_000:60_400] = gradient(400)
    frame = encode_into(codec, tensor, residual=memory, decay=1.0)
    sent = gradwire.decode(frame)
    check_contract_3(sent, memory, tensor, torch.zeros(count), 1.0)
    assert sent.count_nonzero() > 200
    assert len(frame) < 1500


# ── segments ──────────────────────────────────────────────────────────────────────────────────────


@for_each("spec", ["co3", "gennorm", "co3:coder=raw", "co3:format=e3m0b2", "none", "fp16"])
@for_each("dtype", FLOATS)
def test_segments_have_steps_of_their_own(backend, spec, dtype):
    codec = gradwire.codec(spec)
    scales = {40: 1, 100: 1e3, 33: 0, 50: 1e-2, 1000: 1}
    parts = [(gradient(n, n) * scale).to(dtype) for n, scale in scales.items()]
    sizes = [len(p) for p in parts]
    frame = encode_into(codec, torch.cat(parts), segments=sizes)
    alone = torch.cat([gradwire.decode(codec.encode(p)) for p in parts])
    check_same(gradwire.decode(frame), alone)
    check_same(plain_decode(frame).tensor, alone)
    assert len(frame) < sum(len(codec.encode(p)) for p in parts)


@pytest.mark.parametrize("sizes", [[500], [1, 499], [0, 250, 0, 250, 0], [1] * 500, [0] * 2000 + [500]])
def test_segments_of_any_size(backend, sizes):
    codec, grad, memory = gradwire.codec("co3"), gradient(500), gradient(500, 1)
    before = memory.clone()
    sent = gradwire.decode(encode_into(codec, grad, residual=memory, decay=0.9, segments=sizes))
    check_contract_3(sent, memory, grad, before, 0.9)


def test_segments_must_add_up():
    with pytest.raises(GradwireError, match="add up to"):
        encode_into(gradwire.codec("co3"), gradient(100), segments=[50, 49])


# ── stochastic rounding ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["fp4", "fp8", "e3m0b2"])
def test_stochastic_rounding_is_unbiased(backend, name):
    """Every entry's mean error over 400 seeds, over its standard deviation, is close to a normal number.

    The sum of the squares of n such numbers exceeds n + 5·√(2n) by chance with a probability below 1e-5, and
    their sum exceeds 5·√n with one of 6e-7. The same must hold for the larger half of the entries alone.
    """
    codec = gradwire.codec(f"co3:format={name},coder=raw,rounding=stochastic")
    grad, seeds = gradient(400, beta=1.5), 400
    total = torch.zeros(400, dtype=torch.float64)
    for seed in range(seeds):
        total += gradwire.decode(codec.encode(grad, seed=seed)).double()
    found = plain_decode(codec.encode(grad))
    levels = torch.from_numpy(found.levels * found.segments[0][1])
    x = grad.double()
    above = torch.searchsorted(levels, x.clamp(max=float(levels[-1]))).clamp(min=1)
    lower, upper = levels[above - 1], levels[above]
    sigma = ((upper - x) * (x - lower)).clamp(min=0).sqrt()
    exact = sigma < 1e-6 * (upper - lower)
    assert bool(((total / seeds - x).abs()[exact] <= 1e-6 * x.abs()[exact]).all()) and exact.sum() < 20
    z = ((total / seeds - x) / sigma * math.sqrt(seeds))[~exact]
    for part in (z, z[x[~exact].abs() > x.abs().median()]):
        n = len(part)
        assert float(part.square().sum()) <= n + 5 * math.sqrt(2 * n)
        assert abs(float(part.sum())) <= 5 * math.sqrt(n)


def test_stochastic_rounding_depends_on_the_seed_alone(backend):
    codec, grad = gradwire.codec(STOCHASTIC), gradient(1000)
    for seed in (0, 1, 2**40, 2**64 - 1):
        assert codec.encode(grad, seed=seed) == codec.encode(grad, seed=seed)
    assert len({codec.encode(grad, seed=seed) for seed in (0, 1, 2**32, 2**63)}) == 4
    assert gradwire.codec("co3").encode(grad, seed=0) == gradwire.codec("co3").encode(grad, seed=1)


def test_stochastic_rounding_is_the_documented_one(backend):
    """Entry i goes up if r/2²⁴ < (|y|−lower)/(upper−lower)."""
    grad, seed = gradient(300), 0x123456789ABC
    found = plain_decode(gradwire.codec("co3:coder=raw,rounding=stochastic").encode(grad, seed=seed))
    y = (grad.numpy() * (np.float32(1) / np.float32(found.segments[0][1]))).astype(np.float64)
    m = found.levels[found.levels >= 0]
    for i, value in enumerate(y):
        upper = int(np.clip(np.searchsorted(m, abs(value)), 1, len(m) - 1))
        share = (min(abs(value), m[-1]) - m[upper - 1]) / (m[upper] - m[upper - 1])
        expected = m[upper] if plain_random(i, seed) / 2**24 < share else m[upper - 1]
        assert abs(found.levels[found.symbols[i]]) == expected
        assert expected == 0 or np.sign(found.levels[found.symbols[i]]) == np.sign(value)


def test_stochastic_rounding_never_saturates(backend):
    codec = gradwire.codec("co3:rounding=stochastic,coder=raw")
    for seed in range(20):
        grad = gradient(200, seed, beta=0.3)
        found = plain_decode(codec.encode(grad, seed=seed))
        assert found.levels[-1] * found.segments[0][1] >= float(grad.abs().max()) * (1 - 2**-22)


# ── decode ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("spec", ["none", "bf16", "co3", "gennorm"])
def test_frames_come_as_any_kind_of_bytes(backend, spec):
    frame = gradwire.codec(spec).encode(gradient(100))
    expected = gradwire.decode(frame)
    array = np.frombuffer(frame, dtype=np.uint8)
    padded = np.concatenate([[1], array, [2]]).astype(np.uint8)
    strided = torch.stack([torch.from_numpy(array.copy())] * 2, dim=1)[:, 0]
    as_tensor = torch.from_numpy(array.copy())
    for same in (bytearray(frame), memoryview(frame), as_tensor, array, padded[1:-1], strided):
        check_same(gradwire.decode(same), expected)


@for_each("wrong", [torch.zeros(30), torch.zeros(30).char(), "GW", None, 5, [71, 87]])
def test_what_is_no_frame(wrong):
    with pytest.raises(FrameError):
        gradwire.decode(wrong)


def test_strided_buffers_are_frames_or_frame_errors():
    frame = gradwire.codec("co3").encode(gradient(100))
    every_second = np.stack([np.frombuffer(frame, dtype=np.uint8)] * 2, axis=1)[:, 0]
    for same in (every_second, memoryview(every_second)):
        with contextlib.suppress(FrameError):
            check_same(gradwire.decode(same), gradwire.decode(frame))


@pytest.mark.parametrize("spec", ["none", "fp16", "co3", "gennorm"])
def test_decode_into(backend, spec):
    frame = gradwire.codec(spec).encode(gradient(600).reshape(20, 30))
    expected = gradwire.decode(frame)
    outs = [torch.full((20, 30), 9.0), torch.full((30, 20), 9.0).T, torch.full((20, 60), 9.0)[:, ::2]]
    for out in outs:
        assert gradwire.decode(frame, out=out) is out
        assert torch.equal(out, expected)
    parameter = torch.nn.Parameter(torch.zeros(20, 30))
    gradwire.decode(frame, out=parameter)
    assert torch.equal(parameter.detach(), expected) and parameter.requires_grad


def test_decode_into_leaves_the_neighbours_alone(backend):
    whole = torch.full((20, 60), 9.0)
    gradwire.decode(gradwire.codec("co3").encode(gradient(600).reshape(20, 30)), out=whole[:, ::2])
    assert bool((whole[:, 1::2] == 9).all())


@pytest.mark.parametrize("out", [torch.zeros(599), torch.zeros(600, 1), torch.zeros(600).half()])
def test_decode_into_what_does_not_fit(out):
    with pytest.raises(FrameError, match=r"out is torch\.float.* of shape .*, the frame torch\.float32 of"):
        gradwire.decode(gradwire.codec("co3").encode(gradient(600)), out=out)


def test_decode_to_a_device():
    decoded = gradwire.decode(gradwire.codec("co3").encode(gradient(600)), device="cpu")
    assert decoded.device == torch.device("cpu")


@pytest.mark.parametrize("spec", ["none", "bf16", "co3", "gennorm"])
def test_limit_on_elements(backend, spec):
    frame = gradwire.codec(spec).encode(gradient(600))
    assert len(gradwire.decode(frame, max_elements=600)) == 600
    with pytest.raises(FrameError, match="declares 600 elements; the limit is max_elements=599"):
        gradwire.decode(frame, max_elements=599)
    with pytest.raises(FrameError):
        gradwire.decode(frame, max_elements=0)
    for wrong in ("10", -1, float("nan"), [600]):
        with pytest.raises(GradwireError, match="max_elements is a number of elements, such as"):
            gradwire.decode(frame, max_elements=wrong)
    assert len(gradwire.decode(frame, max_elements=np.int64(600))) == 600  # as products of numpy's shapes are
    assert len(gradwire.decode(frame, max_elements=10**400)) == 600  # no float is as large


@pytest.mark.parametrize("device", ["nonsense", "meta", -5, [], "cuda:99"])
def test_devices_that_cannot_be_used_are_named(device):
    """Not as a damaged frame, or one that there is no memory for."""
    with pytest.raises(GradwireError, match=r"device=.* cannot be used: ") as raised:
        gradwire.decode(gradwire.codec("co3").encode(gradient(600)), device=device)
    assert not isinstance(raised.value, FrameError)


def test_integers_survive_exactly(backend):
    for dtype in INTEGERS:
        tensor = random_tensor((100,), dtype)
        for spec in SPECS:
            check_same(gradwire.decode(gradwire.codec(spec).encode(tensor)), tensor)


@for_each("dtype", DTYPES)
def test_none_loses_nothing(backend, dtype):
    tensor = random_tensor((100,), dtype)
    if dtype is torch.float64:
        tensor = torch.from_numpy(np.random.default_rng(0).standard_normal(100))
    check_same(gradwire.decode(gradwire.codec("none").encode(tensor)), tensor)


@pytest.mark.parametrize(("spec", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_halves_of_many_blocks(spec: str, dtype: torch.dtype) -> None:
    """Entries are rounded block by block; those beyond fp16 become its largest number."""
    count = 3 * 2**16 + 5
    u = torch.randn(count, dtype=torch.float32) * 10.0 ** torch.linspace(-9, 9, count, dtype=torch.float32)
    memory = torch.randn_like(u)
    limit = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    for residual in (None, memory.clone()):
        exact = u if residual is None else u + memory
        expected = exact.clamp(-limit, limit).to(dtype)
        codec = gradwire.codec(spec)
        out = torch.empty(codec.max_frame_bytes(u), dtype=torch.uint8)
        length = codec.encode_into(u, out, residual=residual)
        assert torch.equal(gradwire.decode(out[:length]), expected.float())
        assert out[length - 2 * len(u) : length].numpy().tobytes() == expected.view(torch.uint8).numpy().tobytes()
        if residual is not None:
            assert torch.equal(residual, exact - expected.float())
        bad = u.clone()
        bad[-1] = torch.inf
        before = None if residual is None else residual.clone()
        length = codec.encode_into(bad, out, residual=residual)
        assert torch.equal(gradwire.decode(out[:length]), bad)
        assert before is None or torch.equal(residual, before)


def test_codecs_can_be_pickled():
    codec = gradwire.codec("co3:format=fp8")
    assert pickle.loads(pickle.dumps(codec)) == codec


@for_each("spec", ["co3", "co3:coder=huffman", "co3:format=fp8", "ecq", "stc", "none", "fp16", "qsgd"])
@for_each("count", [5, 1000, 70_001])
def test_decoding_onto_another_tensor(backend, spec, count):
    random = torch.Generator().manual_seed(count)
    tensor, onto = (torch.randn(count, generator=random) for _ in range(2))
    frame = gradwire.codec(spec).encode(tensor)
    header, payload = codecs.open_frame(codecs.as_bytes(frame))
    wanted, out, before = onto.clone(), torch.full((count,), 7.0), onto.clone()
    codecs.decode_payload(header, payload, wanted, accumulate=True)
    assert torch.equal(codecs.decode_onto(header, payload, out, onto), wanted) and torch.equal(onto, before)


@for_each("spec", ["co3", "co3:format=fp8", "gennorm"])
def test_a_part_of_a_tensor_is_fitted_to_its_share_of_the_sample(spec):
    """Shards of a tensor, each with a part of the sample, are as good as others, but for the chance in any sample."""
    codec, count = gradwire.codec(spec), 200_003
    whole = heavy(8 * count)
    for shard in whole.split(count)[:2]:
        memory, found = heavy(count, seed=1) / 4, {}
        for part_of in (0, len(whole)):
            out, after = torch.empty(codec.max_frame_bytes(shard), dtype=torch.uint8), torch.empty_like(shard)
            length = codec.encode_into(shard, out, residual=memory, residual_out=after, decay=0.5, part_of=part_of)
            u, decoded = shard + memory * 0.5, gradwire.decode(out[:length])
            assert torch.equal(after, u - decoded)
            found[part_of] = length, float(after.square().sum() / u.square().sum())
        lengths, errors = zip(*found.values(), strict=True)
        assert max(lengths) < 1.05 * min(lengths) and max(errors) < 1.05 * min(errors), found
