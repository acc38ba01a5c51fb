"""The kernels of grids: native code against the reference bit for bit, the codes of outliers, damaged payloads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradwire
from gradwire import FrameError, kernels
from gradwire.convert.grid_search import SHIFTS, Curve
from gradwire.convert.outliers import read_outliers, write_outliers
from gradwire.inspection.frames import describe
from gradwire.kernels import reference
from support.cases import for_each
from support.helpers import BACKENDS, bits, encode_into, gradient, heavy, repair, use_backend
from support.plain_decoder import plain_decode

FLOAT_MAX = reference.FLOAT_MAX


@st.composite
def streams(draw: st.DrawFn) -> dict:
    """Smooth values, exact edges of cells, zeros of both signs, numbers at the ends of fp32."""
    count, largest = draw(st.integers(1, 700)), draw(st.sampled_from([1, 3, 5, 7, 8, 127]))
    seed = draw(st.integers(0, 2**32))
    rng = np.random.default_rng(seed)
    step = draw(st.sampled_from([1.0, 2.0**-126, 2.0**126, 0.0123, 3e20]))
    shift = draw(st.sampled_from(SHIFTS))
    kinds = [
        rng.standard_normal(count) * step * 3,
        (rng.integers(-12, 13, count) - shift) * step,  # on the edges
        rng.choice([0.0, -0.0, 1e-45, FLOAT_MAX, -FLOAT_MAX, step * 2.0**23, step * 2.0**25], count),
    ]
    u = np.choose(rng.integers(0, 3, count), kinds)
    tensor = torch.from_numpy(np.clip(u, -FLOAT_MAX, FLOAT_MAX).astype(np.float32))
    memory = tensor.flip(0).clone() if draw(st.booleans()) else None
    values = torch.from_numpy(rng.standard_normal(2 * largest + 1).astype(np.float32))
    values[largest] = 0
    return {
        "gradient": tensor, "memory": memory, "decay": draw(st.sampled_from([0.9, 1.0, 0.3])), "step": step,
        "shift": shift, "values": values, "capacity": draw(st.sampled_from([0, 3, 60, 10_000])),
    }  # fmt: skip


@given(streams(), st.sampled_from([None, 0, 2**40 + 7]), st.booleans())
def test_every_backend_quantizes_alike(stream, seed, updates):
    found = []
    for name in BACKENDS:
        with use_backend(name):
            memory_out = torch.full((len(stream["gradient"]),), 7.0) if updates else None
            symbols, (positions, multiples) = kernels.grid_quantize(**stream, memory_out=memory_out, seed=seed)
            found.append(
                tuple(bits(t) for t in (symbols, positions, multiples)) + ((bits(memory_out),) if updates else ())
            )
    assert found.count(found[0]) == len(found)


@given(streams(), st.lists(st.integers(1, 699), max_size=5), st.booleans())
def test_every_backend_quantizes_segments_as_each_alone(stream, cuts, updates):
    del stream["capacity"]
    tensor, memory, values = stream["gradient"], stream["memory"], stream.pop("values")
    ends = sorted({cut for cut in cuts if cut < len(tensor)} | {len(tensor)})
    lengths, steps = np.diff([0, *ends]), np.float32(stream.pop("step")) / np.arange(1, len(ends) + 1)
    rows = torch.stack([values * (i + 1) for i in range(len(ends))])
    found = []
    for name in ("each alone", *BACKENDS):
        out = torch.full((len(tensor),), 7.0) if updates else None
        with use_backend("reference" if name == "each alone" else name):
            if name == "each alone":
                symbols, outliers = [], []
                for end, length, step, row in zip(ends, lengths.tolist(), steps.tolist(), rows, strict=True):
                    part = slice(end - length, end)
                    new, old = (None if whole is None else whole[part] for whole in (out, memory))
                    alone = {**stream, "gradient": tensor[part], "memory": old, "memory_out": new, "step": step}
                    coded, (places, multiples) = kernels.grid_quantize(**alone, values=row, capacity=length // 16)
                    symbols.append(coded)
                    outliers += list(zip((places + part.start).tolist(), multiples.tolist(), strict=True))
                written = torch.cat(symbols)
            else:
                written, apart = kernels.grid_quantize_segments(
                    **stream, memory_out=out, lengths=lengths, steps=steps, values=rows
                )
                outliers = list(zip(*(numbers.tolist() for numbers in apart), strict=True))
        found.append((bits(written), outliers, bits(out) if updates else None))
    assert found.count(found[0]) == len(found)


@for_each("count", [70, 1000, 70_000, 200_001])
@for_each("spec", ["ecq", "ecq:rate=4.5", "ecq:nmse=0.02", "ecq:rate=1.5,rounding=stochastic"])
@for_each("dtype", [torch.float32, torch.bfloat16])
def test_every_backend_writes_the_same_frames_and_memory(spec, count, dtype):
    tensor, before, found = heavy(count).to(dtype), heavy(count, 1) / 7, []
    for name in BACKENDS if count < 1e5 else BACKENDS[1:]:  # the reference takes its time
        with use_backend(name):
            memory = before.clone()
            frame = encode_into(gradwire.codec(spec), tensor, residual=memory, decay=0.9)
            decoded = torch.full((count,), 0.5, dtype=dtype)
            header, payload = gradwire.codecs.open_frame(np.frombuffer(frame, dtype=np.uint8))
            gradwire.codecs.decode_payload(header, payload, decoded, 0.25, True)
            found.append((frame, bits(memory), bits(decoded)))
    assert found.count(found[0]) == len(found)


def test_outliers_of_later_chunks_are_where_they_were():
    """Few symbols, heavy tails and several rANS chunks: positions of outliers count from the tensor's beginning."""
    tensor, codec = heavy(1_000_001), gradwire.codec("ecq:rate=1.5")
    frames = {}
    for name in BACKENDS[1:] or BACKENDS:
        with use_backend(name):
            frames[name] = encode_into(codec, tensor)
            error = gradwire.decode(frames[name]) - tensor
        assert float(error.square().sum() / tensor.square().sum()) < 0.5, name
    assert len(set(frames.values())) == 1, {name: len(frame) for name, frame in frames.items()}
    assert describe(next(iter(frames.values()))).chunks > 1


@given(st.integers(0, 2**32), st.sampled_from([1, 2, 500, 3000]), st.integers(0, 10**7), st.sampled_from(SHIFTS))
def test_every_backend_measures_alike(seed, count, zeros, shift):
    curve = Curve(heavy(count, seed).numpy(), zeros)
    for step in (0.01, 0.3, 2.0, 50.0):
        found = []
        for name in BACKENDS:
            with use_backend(name):
                found.append(curve.measure(step, shift))
        assert found.count(found[0]) == len(found)


def test_the_measure_is_what_encoding_gives():
    """Symbols, outliers and squared error of the search are those of the quantizer."""
    x = heavy(20_000)
    curve = Curve(x.numpy())
    for step, shift in ((3.0, 0.25), (0.7, 0.5), (20.0, 0.125)):
        grid = curve.measure(step, shift)
        points = gradwire.convert.ecq.Points(step, grid.offsets, torch.float32)
        values = gradwire.convert.ecq.table(points, grid.largest)
        symbols, (positions, multiples) = kernels.grid_quantize(x, None, None, 0.0, step, shift, values, len(x))
        assert (kernels.histogram(symbols, len(values)) == curve.counts(grid)).all()
        decoded = values[symbols.int()]
        decoded[positions] = points.of(multiples)
        assert float((x - decoded).double().square().sum()) == pytest.approx(grid.error, rel=0.01)
        p = curve.counts(grid) / len(x)
        entropy = -float((p[p > 0] * np.log2(p[p > 0])).sum()) * len(x)
        apart = 8 * len(write_outliers((positions.numpy(), multiples.numpy()), grid.largest))
        assert entropy == pytest.approx(grid.bits - grid.outlier_bits, rel=1e-6)
        assert apart == pytest.approx(grid.outlier_bits, rel=0.15, abs=40)


@given(
    st.lists(st.tuples(st.integers(0, 5000), st.integers(8, 2**24), st.booleans()), min_size=1, max_size=60),
    st.sampled_from([1, 7]),
)
def test_outliers_come_back(entries, largest):
    positions = np.cumsum([gap + 1 for gap, _, _ in entries]) - 1
    multiples = np.array([-m if negative else m for _, m, negative in entries], dtype=np.int32)
    found = set()
    for name in BACKENDS:
        with use_backend(name):
            data = write_outliers((positions, multiples), largest)
            again = read_outliers(memoryview(data), int(positions[-1]) + 1, largest)
            assert (again[0] == positions).all() and (again[1] == multiples).all()
            with pytest.raises(FrameError):
                read_outliers(memoryview(data), int(positions[-1]), largest)
            found.add(data)
    assert len(found) == 1


@given(st.integers(0, 2**32))
def test_damaged_outliers_are_refused_alike(seed):
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 20))
    positions = np.sort(rng.choice(2000, count, replace=False)).astype(np.int64)
    data = bytearray(write_outliers((positions, rng.integers(8, 4000, count).astype(np.int32)), 7))
    for _ in range(rng.integers(1, 4)):
        data[rng.integers(len(data))] ^= 1 << rng.integers(8)
    data = data[: rng.integers(1, len(data) + 1)] + rng.bytes(int(rng.integers(0, 3)))
    verdicts = []
    for name in BACKENDS:
        with use_backend(name):
            try:
                verdicts.append(tuple(a.tobytes() for a in read_outliers(memoryview(bytes(data)), 2000, 7)))
            except FrameError:
                verdicts.append(None)
    assert verdicts.count(verdicts[0]) == len(verdicts)


def test_damaged_frames_raise_frame_errors_only(backend):
    rng = np.random.default_rng(0)
    codec = gradwire.codec("ecq:rate=1.5")
    frames = [codec.encode(heavy(n)) for n in (20, 300, 3000)]
    frames.append(encode_into(codec, heavy(900), segments=[300, 1, 599]))
    decoded = 0
    for i in range(600 if backend != "reference" else 100):
        frame = bytearray(frames[i % len(frames)])
        at = int(rng.integers(9, min(len(frame), 80) if i % 2 else len(frame)))
        frame[at] = int(rng.integers(256))
        try:
            gradwire.decode(repair(bytes(frame)), max_elements=10_000)
            decoded += 1
        except FrameError:
            pass
    assert decoded < i / 2  # most damage shows


def test_plain_decoder_agrees_on_outliers(backend):
    """docs/wire-format.md word for word, where many entries lie beyond the symbols' range."""
    for spec in ("ecq:rate=2.4", "ecq:rate=0.3", "ecq:nmse=0.001"):
        for dtype in (torch.float32, torch.float16):
            frame = gradwire.codec(spec).encode(heavy(3000, beta=0.25).to(dtype) / 1e3)
            found = plain_decode(frame)
            assert bits(found.tensor) == bits(gradwire.decode(frame))


def test_non_finite_entries_in_the_fused_pass_leave_the_memory(backend):
    """Beyond the sample's reach, with memory updated in place, over more than one chunk."""
    count = 300_000 if backend != "reference" else 70_000
    for at in (0, 63, 64, 65_537):
        tensor, memory = heavy(count), gradient(count, 3)
        tensor[at] = float("nan")
        before = memory.clone()
        frame = encode_into(gradwire.codec("ecq"), tensor, residual=memory, decay=0.9)
        assert bits(memory) == bits(before) and frame[3] == 1 << 4


@pytest.mark.parametrize("name", BACKENDS[1:])
def test_a_late_non_finite_entry_in_a_large_tensor_is_taken_back(name):
    """Larger tensors are not looked through first: their memory comes back to rounding."""
    count = (1 << 22) + 100
    torch.manual_seed(0)
    tensor, memory = torch.randn(count) ** 5, torch.randn(count)
    tensor[count - 1] = float("inf")
    before = memory.clone()
    with use_backend(name):
        frame = encode_into(gradwire.codec("ecq"), tensor, residual=memory, decay=0.9)
    assert frame[3] == 1 << 4
    scale = tensor.abs().clamp(max=1e30) + before.abs()
    assert bool(((memory - before).abs() <= 1e-6 * scale).all())
