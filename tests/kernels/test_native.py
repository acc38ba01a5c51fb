"""The native kernels against the reference, byte for byte, on every instruction set of this machine.

test_coders.py asks whether coders are right. Here are the corners in which vector code goes wrong: every number of
lanes, chunks and entries left over, tables at their limits, values on the edge between two symbols, entries that are
not finite, damaged chunks. Data stand in memory of exactly their size, so that scripts/sanitize.sh sees every byte
that is touched beside them.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from gradwire import FrameError
from gradwire.compress import huffman
from gradwire.errors import SpecError
from gradwire.kernels import reference
from gradwire.models.integer_frequencies import normalize
from gradwire.small_float_formats import PRESETS, Format, parse_format
from support.cases import for_each
from support.helpers import bits, gradient, native

pytestmark = pytest.mark.skipif(native is None, reason="no native module (test_coders says so, if that is wrong)")
SETS = native.instruction_sets() if native else []
MANY = settings(max_examples=8 * settings().max_examples)
LANES = [1, 2, 4, 8, 16, 32, 64]
FLOAT_MAX = reference.FLOAT_MAX


@pytest.fixture(autouse=True, scope="module")
def best_set_afterwards() -> Iterator[None]:
    yield
    native.use(SETS[-1])


def each_set() -> Iterator[str]:
    for name in SETS:
        native.use(name)
        yield name


def exact(data: bytes) -> memoryview:
    """A copy in memory of its own, with nothing before and behind it."""
    return memoryview(np.frombuffer(data, dtype=np.uint8).copy())


def verdict(decode: Callable, *args: object) -> object:
    """The decoded symbols, or FrameError."""
    try:
        return decode(*args).tobytes()
    except FrameError:
        return FrameError


# ── what goes in ──────────────────────────────────────────────────────────────────────────────────


def formats() -> st.SearchStrategy[Format]:
    def custom(sign: int, exponent: int, mantissa: int, bias: int, special: str) -> Format | None:
        try:
            return Format(sign, exponent, mantissa, bias, special)
        except SpecError:
            return None

    ranges = (st.integers(0, 1), st.integers(1, 6), st.integers(0, 6), st.integers(-32, 64))
    any_ = st.builds(custom, *ranges, st.sampled_from(["none", "exponent", "code"])).filter(bool)
    return st.one_of(st.just(PRESETS["fp4"]), st.sampled_from(list(PRESETS.values())), any_)


@st.composite
def streams(draw: st.DrawFn, longest: int = 2500) -> tuple[torch.Tensor, torch.Tensor, float, float, Format]:
    """(gradient, memory, decay, step, format): smooth values, exact ties, zeros of both signs, the ends of fp32."""
    fmt, count = draw(formats()), draw(st.integers(1, longest))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    step = float(np.float32(2.0 ** draw(st.one_of(st.integers(-126, 126), st.floats(-126, 126)))))
    levels = np.sort(np.abs(fmt.levels))
    ties = (levels[:-1] + levels[1:]) / 2
    with np.errstate(over="ignore", under="ignore"):
        sizes = np.select(
            [rng.random(count) < 0.6, rng.random(count) < 0.8],
            [rng.laplace(size=count) * rng.choice(levels, count), rng.choice(np.concatenate([levels, ties]), count)],
            rng.choice([0.0, 1e-45 / step, 1e-38 / step, 1e9, FLOAT_MAX / step], count),
        )
        values = np.clip(rng.choice([-1.0, 1.0], count) * sizes * step, -FLOAT_MAX, FLOAT_MAX).astype(np.float32)
        memory = (rng.standard_normal(count) * step * draw(st.sampled_from([0.0, 0.3, 10.0]))).clip(-1e38, 1e38)
    decay = draw(st.sampled_from([0.0, 0.7, 1.0]))
    return torch.from_numpy(values), torch.from_numpy(memory.astype(np.float32)), decay, step, fmt


def table_of(fmt: Format, step: float) -> torch.Tensor:
    with np.errstate(over="ignore"):
        values = fmt.levels.astype(np.float32) * np.float32(step)
    return torch.from_numpy(np.clip(values, -np.float32(FLOAT_MAX), np.float32(FLOAT_MAX)))


@st.composite
def tables(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    """(frequencies, precision) of 2 to 255 symbols: some without a frequency, one with nearly all of it, or all."""
    size = draw(st.one_of(st.integers(2, 17), st.integers(2, 255)))
    precision = draw(st.integers(8, 14))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    skew = draw(st.sampled_from([0.01, 0.2, 1.0, 50.0]))
    frequencies = rng.multinomial(2**precision, rng.dirichlet([skew] * size))
    if draw(st.booleans()):  # as uneven as can be
        few = rng.permutation(size)[: rng.integers(1, size + 1)]
        frequencies = np.zeros(size, dtype=np.int64)
        frequencies[few] = 1
        frequencies[few[0]] = 2**precision - len(few) + 1
    return frequencies, precision


def some_symbols(rng: np.random.Generator, frequencies: np.ndarray, count: int) -> np.ndarray:
    """Symbols as the table expects them, or all equally often: then the rare ones emit two bytes all the time."""
    weights = frequencies if rng.random() < 0.5 else frequencies > 0
    return rng.choice(len(frequencies), size=count, p=weights / weights.sum()).astype(np.uint8)


# ── conversion ────────────────────────────────────────────────────────────────────────────────────


@MANY
@given(
    stream=streams(), seed=st.one_of(st.none(), st.integers(0, 2**64 - 1)),
    memory_in=st.booleans(), memory_out=st.sampled_from(["none", "other", "same"]),
)  # fmt: skip
def test_quantize(stream, seed, memory_in, memory_out):
    grad, memory, decay, step, fmt = stream
    values = table_of(fmt, step)
    expected_memory = torch.empty_like(grad)
    expected = reference.quantize(grad, memory if memory_in else None, expected_memory, decay, step, fmt, values, seed)
    for name in each_set():
        source = memory.clone() if memory_in else None
        out = {"none": None, "other": torch.full_like(grad, 7.0), "same": source}[memory_out]
        symbols = native.quantize(grad, source, out, decay, step, fmt, values, seed)
        assert bits(symbols) == bits(expected), name
        assert out is None or bits(out) == bits(expected_memory), name


@given(stream=streams(longest=3000), steps=st.lists(st.floats(-3, 3), min_size=1, max_size=4))
def test_squared_errors(stream, steps):
    """Sums in fp32, of errors that are as exact as y = u/step is: not the reference's bits, but one result."""
    u, _, _, step, fmt = stream
    step = min(max(step, 1e-12), 1e12)
    steps = [float(np.float32(step * 2**s)) for s in steps]
    u = u.clamp(-1e3 * step, 1e3 * step)
    results = [native.squared_errors(u, steps, fmt) for _ in each_set()]
    assert all(r == results[0] for r in results)
    levels = torch.from_numpy(fmt.levels)
    for s, got, expected in zip(steps, results[0], reference.squared_errors(u, steps, fmt), strict=True):
        errors = (u.double() - reference.dequantize(reference.to_symbols(u, s, fmt), levels) * s).abs()
        slack = float((errors * u.abs() + 2.0**-23 * u.double().square()).sum()) * 2.0**-21 + len(u) * s**2 * 2.0**-120
        assert got == pytest.approx(expected, rel=1e-5, abs=slack)


@given(stream=streams(longest=500), cuts=st.lists(st.integers(1, 499), max_size=6))
def test_segments_are_what_each_is_alone(stream, cuts):
    grad, memory, decay, step, fmt = stream
    ends = sorted({cut for cut in cuts if cut < len(grad)} | {len(grad)})
    lengths = np.diff([0, *ends])
    steps = np.array([float(np.float32(step * 2.0**i)) for i in range(len(lengths))])
    values = torch.stack([torch.from_numpy(fmt.levels.astype(np.float32)) * float(s) for s in steps])
    left = torch.empty_like(grad)
    expected = reference.quantize_segments(grad, memory, left, decay, lengths, steps, fmt, values)
    for name in each_set():
        out = torch.empty_like(grad)
        assert bits(native.quantize_segments(grad, memory, out, decay, lengths, steps, fmt, values)) == bits(expected)
        assert bits(out) == bits(left), name
        sums = native.segment_moments(grad, lengths)
        assert [tuple(row) for row in sums] == [native.moments(part) for part in grad.split(lengths.tolist())]


def test_samples_of_segments_are_those_of_each():
    lengths = np.array([1, 65_536, 65_537, 700, 200_001])
    grad, memory = gradient(int(lengths.sum())), gradient(int(lengths.sum()), 1)
    parts = list(zip(grad.split(lengths.tolist()), memory.split(lengths.tolist()), strict=True))
    for beside in (memory, None):
        expected = [reference.sample(part, None if beside is None else old, 0.9) for part, old in parts]
        for name in ("reference", *each_set()):
            kernels = reference if name == "reference" else native
            samples, sizes = kernels.sample_segments(grad, beside, 0.9, lengths)
            assert sizes.tolist() == [1, 65_536, 65_536, 700, 65_536], name
            assert bits(samples) == bits(torch.cat(expected)), name


@pytest.mark.parametrize("count", [65_537, 65_600, 100_003, 300_000])
def test_sample(count):
    grad, memory = gradient(count), gradient(count, 1)
    for name in each_set():
        assert bits(native.sample(grad, None, 0.9)) == bits(reference.sample(grad, None, 0.9)), name
        assert bits(native.sample(grad, memory, 0.9)) == bits(reference.sample(grad, memory, 0.9)), name


@given(count=st.integers(0, 200), seed=st.integers(0, 2**32), bad=st.sampled_from([None, math.nan, -math.inf]))
def test_absmax_and_moments(count, seed, bad):
    x = torch.from_numpy(np.random.default_rng(seed).standard_normal(count + 1).astype(np.float32))[1:]  # not aligned
    x[::5] = -0.0
    if bad is not None and count:
        x[seed % count] = bad
    moments = reference.moments(x)
    for name in each_set():
        got = native.absmax(x)
        assert not math.isfinite(got) if bad and count else got == reference.absmax(x), name
        assert native.moments(x) == pytest.approx(moments, rel=1e-14, nan_ok=True), name


@for_each("length", [0, 1, 63, 64, 127, 1 << 20])
def test_crc32_from_any_address_in_pieces(length):
    data = np.frombuffer(np.random.default_rng(0).bytes(length + 70), dtype=np.uint8)
    for offset in range(0, 66, 5):
        piece = exact(data[offset : offset + length])
        cut = min(length, 17 * offset)
        whole = native.crc32(piece[cut:], native.crc32(piece[:cut]))
        assert whole == native.crc32(data[offset : offset + length]) == zlib.crc32(piece)


# ── coders ────────────────────────────────────────────────────────────────────────────────────────


@MANY
@given(
    table=tables(), lanes=st.sampled_from(LANES), rows=st.integers(0, 24), more=st.integers(-1, 64),
    seed=st.integers(0, 2**32),
)  # fmt: skip
def test_rans(table, lanes, rows, more, seed):
    frequencies, precision = table
    count = max(1, rows * lanes + min(more, lanes))
    symbols = some_symbols(np.random.default_rng(seed), frequencies, count)
    chunk = reference.rans_encode_chunk(symbols, frequencies, precision, lanes)
    for name in each_set():
        assert native.rans_encode_chunk(symbols, frequencies, precision, lanes) == chunk, name
        decoded = native.rans_decode_chunk(exact(chunk), count, frequencies, precision, lanes)
        assert decoded.tobytes() == symbols.tobytes(), name


@for_each("precision", range(8, 15))
@for_each("size", [2, 11, 15, 16, 255])
def test_rans_of_many_rows(size, precision):
    rng = np.random.default_rng(size)
    frequencies = normalize(np.ceil(1000 * rng.dirichlet([0.5] * size)), precision)
    symbols = some_symbols(rng, frequencies, 20_003)
    for lanes in (8, 16, 32, 64):
        chunk = reference.rans_encode_chunk(symbols, frequencies, precision, lanes)
        for name in each_set():
            assert native.rans_encode_chunk(symbols, frequencies, precision, lanes) == chunk, name
            decoded = native.rans_decode_chunk(exact(chunk), len(symbols), frequencies, precision, lanes)
            assert decoded.tobytes() == symbols.tobytes(), name


@given(
    symbols=st.lists(st.integers(0, 254), max_size=300), width=st.integers(1, 8), table=tables(),
    seed=st.integers(0, 2**32),
)  # fmt: skip
def test_bits_and_huffman(symbols, width, table, seed):
    plain = (np.array(symbols, dtype=np.int64) & 2**width - 1).astype(np.uint8)
    packed = reference.pack_bits(plain, width)
    assert native.pack_bits(plain, width) == packed
    assert native.unpack_bits(exact(packed), len(plain), width, 2**width).tobytes() == plain.tobytes()
    if np.count_nonzero(table[0]) < 2:
        return
    lengths = native.huffman_lengths(table[0])
    assert lengths.tobytes() == reference.huffman_lengths(table[0]).tobytes()
    codes = huffman.canonical_codes(lengths)
    plain = some_symbols(np.random.default_rng(seed), table[0], len(symbols))
    coded = reference.huffman_encode(plain, lengths, codes)
    assert native.huffman_encode(plain, lengths, codes) == coded
    assert native.huffman_decode(exact(coded), len(plain), lengths, codes).tobytes() == plain.tobytes()


def large_codes() -> Iterator[tuple[str, np.ndarray]]:
    """Frequencies: of codes that decoders soon find from anywhere in the data, and of codes that they do not."""
    yield "bell", normalize(np.ceil(1e6 * np.exp(-(np.abs(np.arange(255) - 127) ** 0.7) / 4)), 14)
    yield "one length", np.full(64, 256)  # whoever begins within a code stays within codes
    yield "two", np.array([1 << 13, 1 << 13])
    yield "long codes", normalize(np.array([1 << 30, *np.ones(40, dtype=np.int64), 1 << 29]), 14)
    yield "even", np.array([0, *[68] * 240, 64])  # 7 and 8 bits


def test_huffman_of_many_symbols():
    """So many that they are decoded at several places at once."""
    rng = np.random.default_rng(5)
    for name, frequencies in large_codes():
        lengths = native.huffman_lengths(frequencies)
        assert lengths.tobytes() == reference.huffman_lengths(frequencies).tobytes(), name
        codes = huffman.canonical_codes(lengths)
        count = int(3e6 / (frequencies @ lengths / frequencies.sum()))  # of 3 million bits
        symbols = some_symbols(rng, frequencies, count)
        symbols[:9] = np.argmax(lengths)
        coded = bytes(native.huffman_encode(symbols, lengths, codes))
        assert coded == reference.huffman_encode(symbols, lengths, codes), name
        assert native.huffman_decode(exact(coded), count, lengths, codes).tobytes() == symbols.tobytes(), name
        for damaged in (coded[:-1], coded + b"\0", coded[: len(coded) // 2]):
            with pytest.raises(FrameError):
                native.huffman_decode(exact(damaged), count, lengths, codes)
        for wrong in (count - 9, count // 2, count + 9):
            with pytest.raises(FrameError):
                native.huffman_decode(exact(coded), wrong, lengths, codes)


def test_damaged_huffman_data_of_many_symbols():
    """A bit that is wrong leads both decoders to the same symbols, or to an error in both."""
    frequencies = dict(large_codes())["bell"]
    lengths = native.huffman_lengths(frequencies)
    codes = huffman.canonical_codes(lengths)
    rng = np.random.default_rng(6)
    symbols = some_symbols(rng, frequencies, 180_000)
    coded = bytearray(native.huffman_encode(symbols, lengths, codes))
    for at in rng.integers(8 * len(coded), size=3).tolist():
        coded[at // 8] ^= 1 << at % 8
        found = []
        for kernels in (reference, native):
            try:
                found.append(kernels.huffman_decode(exact(bytes(coded)), len(symbols), lengths, codes).tobytes())
            except FrameError:
                found.append(b"")
        assert found[0] == found[1], at


@given(count=st.integers(1, 500), many=st.integers(0, 60), one=st.booleans(), seed=st.integers(0, 2**32))
def test_replace(count, many, one, seed):
    rng = np.random.default_rng(seed)
    places = torch.from_numpy(np.unique(rng.integers(0, count, size=many)))
    values = gradient(1 if one else len(places), 3)
    expected = gradient(count)
    expected[places] = values.expand(len(places))
    for kernels in (reference, native):
        out = gradient(count)
        kernels.replace(out, places, values)
        assert bits(out) == bits(expected)


@given(
    count=st.sampled_from([1, 30, 700, 5000, 40_000]), rows=st.sampled_from([1, 3, 5, 7]), half=st.booleans(),
    share=st.sampled_from([0.001, 0.01, 0.3, 1.0]), spread=st.integers(1, 40), ties=st.booleans(),
    seed=st.integers(0, 2**64 - 1),
)  # fmt: skip
def test_sketches(count, rows, half, share, spread, ties, seed):
    u = gradient(count, count)
    u = (u * 50).round() if ties else u
    columns, kept = max(1, count // spread), max(1, int(share * count))
    plain = reference.sketch_cells(u, rows, columns, seed)
    cells = (plain.half() if half else plain.float()).numpy()
    positions, estimates = reference.sketch_largest(cells, count, kept, seed)
    for name in each_set():
        assert bits(native.sketch_cells(u, rows, columns, seed)) == bits(plain), name
        found = native.sketch_largest(cells, count, kept, seed)
        assert (bits(found[0]), bits(found[1])) == (bits(positions), bits(estimates)), name


def test_cells_of_large_tensors(monkeypatch):
    """Sums of each part are made by themselves and then added up; rows are shared by threads."""
    u = gradient(2_200_000, 8)
    plain = reference.sketch_cells(u, 3, 1001, 9)
    for threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda many=threads: many)
        for name in each_set():
            assert bits(native.sketch_cells(u, 3, 1001, 9)) == bits(plain), name
            cells = plain.float().numpy()
            found, expected = (of.sketch_largest(cells, len(u), 9000, 9) for of in (native, reference))
            assert all(bits(a) == bits(b) for a, b in zip(found, expected, strict=True)), name


# ── conversion and coding in one pass ─────────────────────────────────────────────────────────────


class Fused:
    """What the fused kernels must do, composed of the reference's parts."""

    def __init__(self, stream: tuple, memory_in: bool, lane_bits: int, chunks: int, precision: int):
        self.gradient, memory, self.decay, self.step, self.format = stream
        self.count, self.lane_bits, self.precision = len(self.gradient), lane_bits, precision
        self.memory = memory if memory_in else None
        self.size = reference.chunk_size(self.count, chunks)
        self.chunks = -(-self.count // self.size)
        self.values = table_of(self.format, self.step)
        self.memory_out = torch.empty(self.count)
        finite = self.gradient.nan_to_num(), memory.nan_to_num() if memory_in else None
        self.symbols = reference.quantize(
            *finite, self.memory_out, self.decay, self.step, self.format, self.values
        ).numpy()
        counts = np.bincount(self.symbols, minlength=self.format.symbols)
        self.frequencies = normalize(20 * counts + 1, precision)

    def expected(self, count: int) -> list[bytes]:
        """The chunks of the first entries."""
        return [
            reference.rans_encode_chunk(
                self.symbols[i : min(i + self.size, count)], self.frequencies, self.precision, 1 << self.lane_bits
            )
            for i in range(0, count, self.size)
        ]

    def encode(self, memory: torch.Tensor | None, memory_out: torch.Tensor | None) -> tuple[list[int], int, bytes]:
        room = 2 * self.count + (3 << self.lane_bits) * self.chunks + 64
        out = torch.zeros(room, dtype=torch.uint8)
        lengths, done = native.quantize_rans(
            self.gradient, memory, memory_out, self.decay, self.step, self.format, self.values, self.frequencies,
            self.precision, self.lane_bits, self.chunks, out,
        )  # fmt: skip
        return lengths, done, bits(out[: sum(lengths)])

    def decode(self, body: bytes, lengths: list[int], out: torch.Tensor, accumulate: bool) -> torch.Tensor:
        table = self.frequencies, self.precision, self.lane_bits
        native.rans_dequantize(exact(body), lengths, self.size, *table, self.values, out, accumulate)
        return out

    def first_bad(self) -> int:
        """Where u is not finite for the first time; at the end if it is everywhere."""
        u = self.gradient if self.memory is None else self.gradient + self.memory * torch.tensor(self.decay)
        return int(torch.cat([u.isfinite(), torch.tensor([False])]).int().argmin())


fused_arguments = {
    "memory_in": st.booleans(),
    "lane_bits": st.integers(0, 6),
    "chunks": st.integers(1, 5),
    "precision": st.integers(8, 14),
}


@MANY
@given(stream=streams(longest=1500), memory_out=st.sampled_from(["none", "other", "same"]), **fused_arguments)
def test_quantize_rans(stream, memory_out, **arguments):
    fused = Fused(stream, **arguments)
    assume(fused.first_bad() == fused.count)
    pieces = fused.expected(fused.count)
    for name in each_set():
        source = None if fused.memory is None else fused.memory.clone()
        out = {"none": None, "other": torch.full_like(fused.gradient, 7.0), "same": source}[memory_out]
        lengths, done, body = fused.encode(source, out)
        assert (lengths, done, body) == ([len(p) for p in pieces], fused.count, b"".join(pieces)), name
        assert out is None or bits(out) == bits(fused.memory_out), name


@given(stream=streams(longest=1500), **fused_arguments)
def test_rans_dequantize(stream, **arguments):
    fused = Fused(stream, **arguments)
    pieces = fused.expected(fused.count)
    body, lengths = b"".join(pieces), [len(p) for p in pieces]
    values = fused.values[torch.from_numpy(fused.symbols).long()]
    before = gradient(fused.count, scale=min(fused.step, 1e30))
    for name in each_set():
        assert bits(fused.decode(body, lengths, torch.full((fused.count,), 7.0), False)) == bits(values), name
        assert bits(fused.decode(body, lengths, before.clone(), True)) == bits(before + values), name


@MANY
@given(
    stream=streams(longest=1500), where=st.integers(0, 1500), bad=st.sampled_from([math.nan, math.inf, -math.inf]),
    in_memory=st.booleans(), in_place=st.booleans(), **fused_arguments,
)  # fmt: skip
def test_what_is_not_finite_stops_the_pass(stream, where, bad, in_memory, in_place, **arguments):
    """It ends before the entry, with chunks of what is before, and memory that belongs to them and no further."""
    grad, memory, decay, *rest = stream
    position = where % len(grad)
    if in_memory and arguments["memory_in"] and decay:
        memory[position] = bad
    else:
        grad[position] = bad
    fused = Fused((grad, memory, decay, *rest), **arguments)
    for name in each_set():
        source = None if fused.memory is None else fused.memory.clone()
        out = source if in_place and source is not None else torch.full_like(grad, 7.0)
        before = out.clone()
        lengths, done, body = fused.encode(source, out)
        pieces = fused.expected(done)
        assert done <= fused.first_bad() <= position, name
        assert (lengths, body) == ([len(p) for p in pieces], b"".join(pieces)), name
        assert bits(out) == bits(torch.cat([fused.memory_out[:done], before[done:]])), name
        if done:
            values = fused.values[torch.from_numpy(fused.symbols[:done]).long()]
            assert bits(fused.decode(body, lengths, torch.empty(done), False)) == bits(values), name


# ── damage ────────────────────────────────────────────────────────────────────────────────────────


def damaged(chunk: bytes, rng: np.random.Generator, lanes: int) -> bytes:
    """Flipped bits, a cut, more bytes, other states, or random bytes behind states that are valid."""
    kind, changed = rng.integers(5), bytearray(chunk)
    if kind == 0:
        for at in rng.integers(len(changed), size=rng.integers(1, 4)):
            changed[at] ^= 1 << int(rng.integers(8))
    elif kind == 1:
        del changed[int(rng.integers(len(changed))) :]
    elif kind == 2:
        at = int(rng.integers(3 * lanes, len(changed) + 1))
        changed[at:at] = rng.bytes(int(rng.integers(1, 80)))
    elif kind == 3:
        del changed[3 * lanes : 3 * lanes + int(rng.integers(1, 80))]
    else:
        states = rng.integers(2**14, 2**22, size=lanes)
        changed[: 3 * lanes] = b"".join(int(x).to_bytes(3, "little") for x in states)
        changed[3 * lanes :] = rng.bytes(int(rng.integers(0, 2 * len(changed))))
    return bytes(changed)


@MANY
@given(table=tables(), lanes=st.sampled_from(LANES), count=st.integers(1, 700), seed=st.integers(0, 2**32))
def test_damaged_chunks(table, lanes, count, seed):
    frequencies, precision = table
    rng = np.random.default_rng(seed)
    chunk = reference.rans_encode_chunk(some_symbols(rng, frequencies, count), frequencies, precision, lanes)
    data = damaged(chunk, rng, lanes)
    expected = verdict(reference.rans_decode_chunk, memoryview(data), count, frequencies, precision, lanes)
    for name in each_set():
        got = verdict(native.rans_decode_chunk, exact(data), count, frequencies, precision, lanes)
        assert got == expected, name


@given(
    stream=streams(longest=1500), memory_in=st.just(False), lane_bits=st.integers(3, 6), chunks=st.integers(2, 9),
    precision=st.integers(8, 14), seed=st.integers(0, 2**32), accumulate=st.booleans(),
)  # fmt: skip
def test_one_damaged_chunk_of_several(stream, seed, accumulate, **arguments):
    fused, rng = Fused(stream, **arguments), np.random.default_rng(seed)
    pieces = fused.expected(fused.count)
    at = int(rng.integers(len(pieces)))
    pieces[at] = damaged(pieces[at], rng, 1 << fused.lane_bits)
    entries = min(fused.size, fused.count - at * fused.size)
    args = memoryview(pieces[at]), entries, fused.frequencies, fused.precision, 1 << fused.lane_bits
    is_bad = verdict(reference.rans_decode_chunk, *args) is FrameError
    body, lengths = b"".join(pieces), [len(p) for p in pieces]
    for name in each_set():
        try:
            fused.decode(body, lengths, torch.zeros(fused.count), accumulate)
            assert not is_bad, name
        except FrameError:
            assert is_bad, name


@for_each("bytes_left", [0, 1, 7, 8, 63, 64, 127])
@for_each("lanes", LANES)
def test_every_lane_wants_two_bytes(lanes, bytes_left):
    """The most that a row can ask for: symbols of frequency 1 of 2¹⁴ in states that drop below 2⁶."""
    frequencies = np.array([1, 1, 2**14 - 2])
    data = (2**14).to_bytes(3, "little") * lanes + bytes(bytes_left)
    args = frequencies, 14, lanes
    for count in (lanes, 2 * lanes, 5 * lanes + 1):
        expected = verdict(reference.rans_decode_chunk, memoryview(data), count, *args)
        for name in each_set():
            assert verdict(native.rans_decode_chunk, exact(data), count, *args) == expected, name


@example(fmt=parse_format("fp4"), lanes=64, precision=8, symbol=5)
@given(fmt=formats(), lanes=st.sampled_from(LANES), precision=st.integers(8, 14), symbol=st.integers(0, 254))
def test_one_symbol_with_all_the_frequency(fmt, lanes, precision, symbol):
    """No byte is emitted, and 2ᵏ does not fit into k bits."""
    frequencies = np.zeros(fmt.symbols, dtype=np.int64)
    frequencies[symbol % fmt.symbols] = 2**precision
    symbols = np.full(300, symbol % fmt.symbols, dtype=np.uint8)
    chunk = (2**14).to_bytes(3, "little") * lanes
    for name in each_set():
        assert native.rans_encode_chunk(symbols, frequencies, precision, lanes) == chunk, name
        decoded = native.rans_decode_chunk(exact(chunk), 300, frequencies, precision, lanes)
        assert decoded.tobytes() == symbols.tobytes(), name


# ── arguments that no caller gives ────────────────────────────────────────────────────────────────


def test_arguments_out_of_range_are_an_error() -> None:
    from gradwire import _native

    x, symbols, eleven = np.ones(64, dtype=np.float32), np.zeros(64, dtype=np.uint8), np.zeros(11, dtype=np.float32)
    even, fp4 = np.array([246] + [1] * 10, dtype=np.int64), (0, 1, 5, 5, True, 6.0)
    for fmt in ((), fp4[:5], (0, 1, -5, 15, False, 6.0), (0, 99, 5, 5, True, 6.0), (0, 1, 3, 7, True, 6.0)):
        with pytest.raises(ValueError, match="format"):
            _native.quantize(x, None, None, 1.0, 1.0, fmt, eleven, None, symbols)
    short = np.empty(2 * 64 + 64, dtype=np.uint8)  # no room for the states of 64 lanes
    for chunk in (64, 2**63, 2**64 - 1):  # a number of chunks that wraps around
        with pytest.raises(ValueError, match="out is too small"):
            _native.rans_encode(symbols, even, 8, 64, chunk, short)
        with pytest.raises(ValueError, match="out is too small"):
            _native.quantize_rans(x, None, None, 1.0, 1.0, fp4, eleven, even, 8, 64, chunk, short)
    lists = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int32)
    with pytest.raises(ValueError, match="out is too small"):
        _native.grid_rans(x, None, None, 1.0, 1.0, 0.5, eleven, None, even, 8, 64, 2**64 - 1, short, *lists)
    gaps = np.full(2**16 + 1, 2**48 - 1)  # the bits that they take wrap around
    with pytest.raises(ValueError, match="gaps"):
        _native.golomb_encode(gaps, 0, np.empty(2**20, dtype=np.uint8))
    with pytest.raises(ValueError, match="gaps"):
        _native.pack_outliers(gaps, np.zeros(len(gaps), dtype=np.uint8), gaps * 0, 0, 0, np.empty(2**20, np.uint8))
    with pytest.raises(ValueError, match="too large"):
        _native.sample(x, None, 1.0, 2**40, 0, np.empty(0, dtype=np.float32))


ARGUMENT = re.compile(r": (?:ndarray\[dtype=(\w+)[^\]]*?(, writable=False)?\]|([\w.]+))")
OTHER_ARGUMENTS = {"float": 1.0, "int": 1, "bool": True, "tuple": (), "collections.abc.Sequence": []}


def unwritable(like: np.ndarray) -> Iterator[np.ndarray]:
    """Arrays of which nanobind would make a copy: of another type, with gaps, of another byte order."""
    yield like.astype(np.float32 if like.dtype == np.float64 else np.float64)
    yield np.zeros(2 * len(like), dtype=like.dtype)[::2]
    yield like[::-1]
    if like.dtype.itemsize > 1:
        yield like.astype(like.dtype.newbyteorder())
    read_only = like.copy()
    read_only.setflags(write=False)
    yield read_only


def written_arguments() -> Iterator[tuple[str, Callable, list[Any], int]]:
    """Each array that a function of the native module writes to: (name, function, arguments, place of the array)."""
    from gradwire import _native

    for name, function in vars(_native).items():
        for signature, *_ in getattr(function, "__nb_signature__", ()):
            declared = list(ARGUMENT.finditer(signature.rpartition(" -> ")[0]))
            arguments = [np.zeros(4, a[1]) if a[1] else OTHER_ARGUMENTS.get(a[3]) for a in declared]
            for place, argument in enumerate(declared):
                if argument[1] and not argument[2]:
                    yield name, function, arguments, place
    if hasattr(_native, "AggregatorClient"):  # where the system has what it needs
        words, client = [np.zeros(4, np.int32) for _ in range(4)], _native.AggregatorClient("127.0.0.1", 9, bytes(16))
        for place in (2, 3):
            yield "run", client.run, [*words, 0.0, 0.0], place


def test_nothing_is_written_to_a_copy() -> None:
    """An array to write to that does not fit as it is, is an error: results in a copy of it would be lost."""
    found = list(written_arguments())
    families = {
        "rans_decode",
        "sample",
        "grid_rans",
        "add_at",
        "put_words",
        "assign_levels",
        "select",
        "golomb_positions",
    }
    assert families <= {name for name, *_ in found} and len(found) > 40
    for name, function, arguments, place in found:
        if name != "run":  # which would send something
            with suppress(ValueError):  # of sizes that do not fit
                function(*arguments)
        for wrong in unwritable(arguments[place]):
            with pytest.raises(TypeError, match="incompatible function arguments"):
                function(*arguments[:place], wrong, *arguments[place + 1 :])


@pytest.mark.parametrize("levels", [5, 17, 20, 129])
def test_infinities_have_a_level_too(levels: int) -> None:
    """No caller lets them through: but nothing outside the table may be touched."""
    values = torch.arange(levels, dtype=torch.float32).reshape(1, levels)
    for _ in each_set():
        for seed in (None, 1):
            symbols, counts = native.assign_levels(
                torch.full((100,), math.inf), None, None, 1.0, values, np.array([0, 100]), seed
            )
            assert int(symbols.max()) < levels and int(counts.sum()) == 100


@pytest.mark.parametrize(("value", "shift"), [(math.nan, 0.5), (0.0, 1.0)])
def test_a_sample_whose_cells_overlap_has_no_grid(value: float, shift: float) -> None:
    x = np.full(1000, value, dtype=np.float32)
    assert native.grid_measure(x, np.zeros(1001), np.zeros(1001), 0, 1.0, shift) is None
