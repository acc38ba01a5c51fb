"""The coders, on every backend: exact bytes, round trips, lengths, damage; and native == reference."""

from __future__ import annotations

import contextlib
import heapq
import math
from collections.abc import Callable
from functools import cache

import constriction
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire import FrameError, compress, kernels
from gradwire.compress import huffman, rans
from gradwire.frame.byte_fields import Reader
from gradwire.kernels import reference
from gradwire.models import gennorm_tables
from gradwire.models.gennorm import GenNorm
from gradwire.models.histogram import Histogram
from gradwire.models.integer_frequencies import bits_per_symbol, normalize
from gradwire.models.symbol_statistics import GenNormFit, SymbolStatistics
from gradwire.small_float_formats import parse_format
from support.cases import for_each
from support.helpers import NO_NATIVE, bits, gradient, native
from support.plain_coders import (
    plain_code_lengths,
    plain_huffman_decode,
    plain_random,
    plain_rans_decode,
    plain_rans_encode,
)

LANES = [1, 2, 4, 8, 16, 32, 64]


def test_native_module_is_here():
    assert native or NO_NATIVE, "build the native module (make test does), or set GRADWIRE_NO_NATIVE=1"


@st.composite
def coded(draw: st.DrawFn, shortest: int = 1, longest: int = 300) -> tuple[np.ndarray, np.ndarray, int]:
    """(symbols, frequencies, precision): an alphabet in which some symbols may have no frequency."""
    size, precision = draw(st.integers(1, 255)), draw(st.integers(8, 14))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    skew = draw(st.sampled_from([0.02, 0.3, 3.0]))
    counts = np.ceil(rng.dirichlet([skew] * size) * 1e6).astype(np.int64)
    if draw(st.booleans()):
        counts[rng.random(size) < draw(st.floats(0, 1))] = 0
    counts[rng.integers(size)] += 1
    frequencies = normalize(counts, precision)
    count = draw(st.integers(shortest, longest))
    symbols = rng.choice(size, size=count, p=frequencies / 2**precision).astype(np.uint8)
    return symbols, frequencies, precision


def huffman_code(frequencies: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    lengths = huffman.code_lengths(frequencies)
    return lengths, huffman.canonical_codes(lengths)


def outcome(function: Callable, *args: object) -> object:
    """What a call gives, in a form that can be compared: its bytes, or that it was a FrameError."""
    try:
        result = function(*args)
    except FrameError:
        return FrameError
    if isinstance(result, torch.Tensor):
        return bits(result)
    return result.tobytes() if isinstance(result, np.ndarray) else result


# ── exact bytes, worked out by hand from docs/wire-format.md ──────────────────────────────────────


def test_raw_bytes(backend):
    assert kernels.pack_bits(np.array([1, 10, 5], dtype=np.uint8), 4) == bytes([0xA1, 0x05])
    # 3 bits each: 101 011 110, from the lowest bit upwards: 1|10 011 101, then the rest.
    assert kernels.pack_bits(np.array([5, 3, 6], dtype=np.uint8), 3) == bytes([0b10011101, 0b1])


def test_huffman_bytes(backend):
    lengths, codes = huffman_code(np.array([2048, 1024, 0, 512, 512]))
    assert lengths.tolist() == [1, 2, 0, 3, 3]
    assert [f"{c:0{n}b}" for c, n in zip(codes, lengths, strict=True) if n] == ["0", "10", "110", "111"]
    symbols = np.array([0, 1, 3, 4], dtype=np.uint8)  # 0 10 110 11|1 0000000
    assert kernels.huffman_encode(symbols, lengths, codes) == bytes([0b01011011, 0b10000000])


def test_rans_bytes_of_one_lane(backend):
    f = np.array([128, 128])
    # Each symbol doubles the state, 16384 at the start: 32768; then 32768/128·256 + 0 + 128 = 0x010080.
    assert kernels.rans_encode_chunk(np.array([0, 1], dtype=np.uint8), f, 8, 1) == bytes([0x80, 0x00, 0x01])
    # Seven times symbol 1: 32896, 65920, 131968, 264064, 528256, 1056640, 2113408 = 0x203f80, that is ≥ 2²¹:
    # the eighth emits 0x80 first, and from 0x203f = 64·128 + 63 makes 64·256 + 63 + 128 = 0x40bf.
    ones = np.ones(8, dtype=np.uint8)
    assert kernels.rans_encode_chunk(ones, f, 8, 1) == bytes([0xBF, 0x40, 0x00, 0x80])


def test_rans_bytes_that_are_emitted_twice(backend):
    # f = 1, c = 4095, k = 12: states ≥ 2¹⁰ emit. 0x4000 → emits 00 → 64·4096 + 4095 = 0x040fff.
    # That emits ff → 0x040f, still ≥ 2¹⁰: emits 0f → 4 → 4·4096 + 4095 = 0x4fff.
    chunk = kernels.rans_encode_chunk(np.array([1, 1], dtype=np.uint8), np.array([4095, 1]), 12, 1)
    assert chunk == bytes([0xFF, 0x4F, 0x00, 0x00, 0xFF, 0x0F])
    # Two lanes of the same: first both emit once, in ascending order, then both once more.
    chunk = kernels.rans_encode_chunk(np.array([1, 0, 1, 1], dtype=np.uint8), np.array([4095, 1]), 12, 2)
    # Lane 0 as above. Lane 1: 16384 = 4·4095 + 4 → 4·4096 + 4 = 0x4004; then emits 04 → 0x40 → 0x40fff.
    assert chunk == bytes([0xFF, 0x4F, 0x00, 0xFF, 0x0F, 0x04, 0x00, 0xFF, 0x04, 0x0F])


def test_rans_layout_bytes():
    assert rans.head(3, [7]) == bytes([3])
    assert rans.head(6, [0x1234, 5, 6]) == bytes([6 | 128, 3, 0x34, 0x12, 0, 0, 5, 0, 0, 0])


def test_head_bytes():
    # Bits 0–1 coder, 2–3 model, 4–7 precision.
    coding = compress.Coding
    assert coding(compress.CONSTANT, parameters=b"\x05").head == bytes([0b0000_00_01, 5])
    assert coding(compress.RANS, GenNorm(), 8, b"\x40\x10").head == bytes([0b1000_01_11, 0x40, 0x10])
    assert coding(compress.HUFFMAN, Histogram(), 12, b"?").head == bytes([0b1100_10_10, ord("?")])


# ── round trips ───────────────────────────────────────────────────────────────────────────────────


@given(symbols=st.lists(st.integers(0, 254), max_size=200), width=st.integers(1, 8))
def test_raw_round_trip(backend, symbols, width):
    symbols = np.array([x % 2**width for x in symbols], dtype=np.uint8)
    packed = kernels.pack_bits(symbols, width)
    assert len(packed) == math.ceil(len(symbols) * width / 8)
    assert kernels.unpack_bits(memoryview(packed), len(symbols), width, 2**width).tolist() == symbols.tolist()


@pytest.mark.parametrize("longest", [3, 12, 15])
def test_long_huffman_data(backend, longest):
    """Codes in and beyond the windows of the decoder; damaged data is refused or decodes to as many symbols."""
    if backend == "reference":
        pytest.skip("slow, and not what is tested")
    frequencies = np.array([2**i for i in range(longest)] + [1])
    lengths, codes = huffman_code(frequencies)
    assert lengths.max() == longest
    rng = np.random.default_rng(longest)
    symbols = rng.choice(len(frequencies), 40_003, p=frequencies[::1] / frequencies.sum()).astype(np.uint8)
    symbols[1000:1050] = int(lengths.argmax())
    data = bytes(kernels.huffman_encode(symbols, lengths, codes))
    assert (kernels.huffman_decode(memoryview(data), len(symbols), lengths, codes) == symbols).all()
    for wrong in (data[:-1], data + b"\0", data[:-1] + bytes([data[-1] ^ 1 << 7])):
        with contextlib.suppress(FrameError):
            assert len(kernels.huffman_decode(memoryview(wrong), len(symbols), lengths, codes)) == len(symbols)
            assert wrong not in (data[:-1], data + b"\0")


@given(coded(shortest=0))
def test_huffman_round_trip(backend, case):
    symbols, frequencies, _ = case
    if np.count_nonzero(frequencies) < 2:
        return
    lengths, codes = huffman_code(frequencies)
    data = kernels.huffman_encode(symbols, lengths, codes)
    assert len(data) == math.ceil(lengths[symbols].sum() / 8)
    decoded = kernels.huffman_decode(memoryview(data), len(symbols), lengths, codes)
    assert decoded.tolist() == symbols.tolist()
    assert plain_huffman_decode(data, len(symbols), frequencies.tolist()) == symbols.tolist()


@given(case=coded(), lanes=st.sampled_from(LANES))
def test_rans_round_trip(backend, case, lanes):
    symbols, frequencies, precision = case
    chunk = kernels.rans_encode_chunk(symbols, frequencies, precision, lanes)
    assert chunk == plain_rans_encode(symbols.tolist(), frequencies.tolist(), precision, lanes)
    decoded = kernels.rans_decode_chunk(memoryview(chunk), len(symbols), frequencies, precision, lanes)
    assert decoded.tolist() == symbols.tolist()
    assert plain_rans_decode(chunk, len(symbols), frequencies.tolist(), precision, lanes) == symbols.tolist()


@given(case=coded(longest=700), lanes=st.sampled_from(LANES), size=st.sampled_from([64, 128, 192, 640, 704]))
def test_rans_round_trip_of_several_chunks(backend, case, lanes, size):
    symbols, frequencies, precision = case
    parts = [symbols[i : i + size] for i in range(0, len(symbols), size)]
    expected = [reference.rans_encode_chunk(part, frequencies, precision, lanes) for part in parts]
    out = np.full(rans.room(len(symbols), len(parts)), 0xA5, dtype=np.uint8)
    lengths = kernels.rans_encode(symbols, size, frequencies, precision, lanes, out)
    body = bytes(out[: sum(lengths)])
    assert (lengths, body) == ([len(chunk) for chunk in expected], b"".join(expected))
    decoded = np.zeros_like(symbols)
    kernels.rans_decode(memoryview(body), lengths, size, frequencies, precision, lanes, decoded)
    assert decoded.tolist() == symbols.tolist()
    # One chunk damaged among several, which may be decoded side by side: an error, whichever it is.
    for i in range(len(lengths)):
        damaged_body, middle = bytearray(body), sum(lengths[:i])
        damaged_body[middle + 2] = 0xFF  # a state beyond 2²²
        with pytest.raises(FrameError):
            kernels.rans_decode(memoryview(damaged_body), lengths, size, frequencies, precision, lanes, decoded)


@for_each("precision", range(8, 15))
@for_each("lanes", LANES)
def test_rans_lengths_around_whole_rows(backend, lanes, precision):
    rng = np.random.default_rng(precision)
    for size in (3, 11, 16, 17, 200):
        frequencies = normalize(rng.integers(0, 1000, size) ** 2 + (np.arange(size) < 2), precision)
        probability = frequencies / 2**precision
        around = {lanes - 1, lanes, lanes + 1, 2 * lanes - 1, 2 * lanes, 3 * lanes + 1}
        for count in around - {0} | {1, 2, 127, 128, 129}:
            symbols = rng.choice(size, size=count, p=probability).astype(np.uint8)
            chunk = kernels.rans_encode_chunk(symbols, frequencies, precision, lanes)
            assert chunk == reference.rans_encode_chunk(symbols, frequencies, precision, lanes)
            decoded = kernels.rans_decode_chunk(memoryview(chunk), count, frequencies, precision, lanes)
            assert decoded.tolist() == symbols.tolist()


def check_layout(count: int, expected_bits: float) -> tuple[int, int]:
    lane_bits, chunks = rans.layout(count, expected_bits)
    size = kernels.chunk_size(count, chunks)
    assert size % 64 == 0 and size == math.ceil(math.ceil(count / chunks) / 64) * 64
    assert (chunks - 1) * size < count <= chunks * size, "the last chunk is not empty"
    lanes = 1 << lane_bits
    assert lanes in LANES
    most = 2 ** math.floor(math.log2(max(1, min(64, expected_bits / chunks / 2**13))))
    assert lanes == (most if most >= 16 else max(1, most // 2))
    return lane_bits, chunks


@given(count=st.integers(1, 2**46), bits_per_entry=st.floats(0.001, 12))
def test_rans_layout_of_any_size(count, bits_per_entry):
    check_layout(count, bits_per_entry * count)


@for_each("count", [1, 63, 64, 65, 2**16, 2**18, 2**18 + 1, 2**18 + 63, 2**19, 2**19 + 1])
def test_rans_lengths_around_whole_chunks(backend, count):
    f = normalize(np.array([1, 5, 20, 60, 100, 60, 20, 5, 1]), 8)
    symbols = np.random.default_rng(0).choice(9, size=count, p=f / 256).astype(np.uint8)
    expected_bits = 2.5 * count
    lane_bits, chunks = check_layout(count, expected_bits)
    data = bytes(rans.encode(symbols, f, 8, expected_bits))
    assert data[:2] == bytes([lane_bits | 128, chunks]) if chunks > 1 else data[0] == lane_bits
    assert np.array_equal(rans.decode(memoryview(data), count, f, 8), symbols)


@given(
    case=coded(longest=400), coder=st.sampled_from(["raw", "huffman", "rans"]),
    name=st.sampled_from(["fp4", "e2m1", "fp8", "e3m1b2", "ue3m1b2"]),
)  # fmt: skip
def test_any_coder_with_any_symbols(backend, case, coder, name):
    fmt = parse_format(name)
    symbols = (case[0] % fmt.symbols).astype(np.uint8)
    counts = np.bincount(symbols, minlength=fmt.symbols)
    coding = compress.choose(
        SymbolStatistics(fmt, counts, len(symbols), GenNormFit(beta_index=60, zero_mass=3)), compress.CODERS[coder]
    )
    data = compress.encode(symbols, fmt, coding)
    reader = Reader(memoryview(data))
    found = compress.read_head(reader, fmt)
    assert (found.coder, found.model, found.precision) == (coding.coder, coding.model, coding.precision)
    assert compress.decode(reader, fmt, len(symbols), found).tolist() == symbols.tolist()


# ── how long ──────────────────────────────────────────────────────────────────────────────────────


def huffman_cost(frequencies: list[int]) -> tuple[int, int]:
    """(Σ f·length, longest code) of an unlimited Huffman code: merge the two lightest trees."""
    trees = [(f, i, 0) for i, f in enumerate(frequencies) if f]
    heapq.heapify(trees)
    total = 0
    while len(trees) > 1:
        (a, i, depth_a), (b, _, depth_b) = heapq.heappop(trees), heapq.heappop(trees)
        total += a + b
        heapq.heappush(trees, (a + b, i, 1 + max(depth_a, depth_b)))
    return total, trees[0][2]


def limited_cost(frequencies: list[int], limit: int) -> int:
    """The least Σ f·length with no code above the limit: by trying how many codes end at each length."""
    f = sorted((x for x in frequencies if x), reverse=True)
    rest = [sum(f[i:]) for i in range(len(f) + 1)]

    @cache
    def best(placed: int, nodes: int, depth: int) -> float:
        if placed == len(f):
            return 0
        if depth == limit or nodes == 0:
            return math.inf
        below = 2 * nodes
        ends = range(min(below, len(f) - placed) + 1)
        return rest[placed] + min(best(placed + k, min(below - k, len(f)), depth + 1) for k in ends)

    return int(best(0, 1, 0))


def check_huffman(frequencies: np.ndarray) -> None:
    lengths = huffman.code_lengths(frequencies)
    assert lengths.tolist() == plain_code_lengths(frequencies.tolist())
    assert lengths.max() <= huffman.LIMIT
    assert [n > 0 for n in lengths] == [f > 0 for f in frequencies]
    assert sum(2.0 ** -int(n) for n in lengths if n) == 1, "Kraft"
    cost, longest = huffman_cost(frequencies.tolist())
    if longest <= huffman.LIMIT:
        assert int((frequencies * lengths).sum()) == cost


@given(coded())
def test_huffman_is_optimal(case):
    if np.count_nonzero(case[1]) > 1:
        check_huffman(case[1])


@pytest.mark.parametrize("name", ["fp4", "e2m1", "fp8", "e4m3"])
def test_huffman_is_optimal_for_gennorm(name):
    for index in (0, 20, 64, 100, 127):
        check_huffman(normalize(gennorm_tables.counts(parse_format(name), index, index // 2), 14))


def test_huffman_is_optimal_where_the_limit_binds():
    fibonacci = [1, 1]
    while sum(fibonacci) + fibonacci[-1] + fibonacci[-2] < 2**14:
        fibonacci.append(fibonacci[-1] + fibonacci[-2])
    fibonacci.append(2**14 - sum(fibonacci))
    frequencies = np.array(fibonacci)
    assert huffman_cost(fibonacci)[1] > huffman.LIMIT
    check_huffman(frequencies)
    cost = int((frequencies * huffman.code_lengths(frequencies)).sum())
    assert cost == limited_cost(fibonacci, huffman.LIMIT) > huffman_cost(fibonacci)[0]


def check_close_to_ideal(backend: str, size: int, skew: float, precision: int, loss: float) -> None:
    rng = np.random.default_rng(size)
    count = 2**14 if backend == "reference" else 2**17  # all write the same bytes, and this one takes its time
    frequencies = normalize(np.ceil(rng.dirichlet([skew] * size) * 1e6), precision)
    symbols = rng.choice(size, size=count, p=frequencies / 2**precision).astype(np.uint8)
    ideal = bits_per_symbol(frequencies, precision)[symbols].sum() / 8
    for lanes in (16, 64):
        length = len(kernels.rans_encode_chunk(symbols, frequencies, precision, lanes))
        assert ideal - 1 <= length <= (1 + loss) * ideal + 3 * lanes


@for_each("precision", range(8, 14))
@for_each("size, skew", [(2, 0.2), (11, 0.1), (11, 1), (11, 10), (200, 1)])
def test_rans_is_within_a_thousandth_of_the_ideal(backend, size, skew, precision):
    check_close_to_ideal(backend, size, skew, precision, 0.001)


@pytest.mark.parametrize("size, skew", [(200, 1), (247, 0.3), (253, 10)])
def test_rans_with_fourteen_bits_loses_a_little_more(backend, size, skew):
    """States start at 2¹⁴, so that ⌊x/f⌋ has few bits for the most frequent symbols."""
    check_close_to_ideal(backend, size, skew, 14, 0.002)


def test_rans_is_as_short_as_constrictions(backend):
    frequencies = normalize(gennorm_tables.counts(parse_format("fp4"), 70, 0), 12)
    symbols = np.random.default_rng(0).choice(11, size=2**16, p=frequencies / 4096)
    model = constriction.stream.model.Categorical(frequencies / 4096, perfect=False)
    coder = constriction.stream.stack.AnsCoder()
    coder.encode_reverse(symbols.astype(np.int32), model)
    theirs = coder.num_valid_bits() / 8
    ours = len(kernels.rans_encode_chunk(symbols.astype(np.uint8), frequencies, 12, 1))
    assert ours <= 1.001 * theirs + 3


# ── damage ────────────────────────────────────────────────────────────────────────────────────────


def damaged(data: bytes, rng: np.random.Generator) -> bytes:
    """Cut, grown, or with a few bytes changed."""
    kind, at = rng.integers(4), int(rng.integers(len(data) + 1))
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + rng.bytes(int(rng.integers(1, 4))) + data[at:]
    changed = bytearray(data)
    for _ in range(int(rng.integers(1, 4)) if changed else 0):
        changed[rng.integers(len(changed))] ^= 1 << int(rng.integers(8))
    return bytes(changed)


@given(case=coded(), lanes=st.sampled_from(LANES), seed=st.integers(0, 2**32))
def test_damage_is_an_error_or_other_symbols(backend, case, lanes, seed):
    symbols, frequencies, precision = case
    count, rng = len(symbols), np.random.default_rng(seed)
    chunk = damaged(kernels.rans_encode_chunk(symbols, frequencies, precision, lanes), rng)
    args = memoryview(chunk), count, frequencies, precision, lanes
    got = outcome(kernels.rans_decode_chunk, *args)
    assert got == outcome(reference.rans_decode_chunk, *args)
    if got is not FrameError:
        again = plain_rans_encode(list(got), frequencies.tolist(), precision, lanes)
        assert again == chunk, "two chunks for the same symbols"

    width = int(rng.integers(1, 9))
    packed = damaged(kernels.pack_bits(symbols & 2**width - 1, width), rng)
    limit = int(rng.integers(1, 2**width + 1))
    args = memoryview(packed), count, width, limit
    assert outcome(kernels.unpack_bits, *args) == outcome(reference.unpack_bits, *args)

    if np.count_nonzero(frequencies) > 1:
        lengths, codes = huffman_code(frequencies)
        data = damaged(bytes(kernels.huffman_encode(symbols, lengths, codes)), rng)
        args = memoryview(data), count, lengths, codes
        assert outcome(kernels.huffman_decode, *args) == outcome(reference.huffman_decode, *args)


def test_damage_with_a_name(backend):
    f, symbols = np.array([128, 128]), np.zeros(64, dtype=np.uint8)
    chunk = kernels.rans_encode_chunk(symbols, f, 8, 4)
    low = (2**14 - 1).to_bytes(3, "little") + chunk[3:]
    high = (2**22).to_bytes(3, "little") + chunk[3:]
    for data in (b"", chunk[:11], chunk[:-1], chunk + b"\0", low, high):
        with pytest.raises(FrameError):
            kernels.rans_decode_chunk(memoryview(data), 64, f, 8, 4)
    for data, limit in ((b"\xff\x0f\x00", 16), (b"\xff", 16), (b"\xff\xf1", 16), (b"\xff\x0f", 15)):
        with pytest.raises(FrameError):
            kernels.unpack_bits(memoryview(data), 3, 4, limit)
    lengths, codes = huffman_code(np.array([2048, 2048]))
    for data in (b"", b"\0\0", b"\x01"):
        with pytest.raises(FrameError):
            kernels.huffman_decode(memoryview(data), 3, lengths, codes)


# ── native == reference, function by function ─────────────────────────────────────────────────────


@given(st.binary(max_size=400), st.integers(0, 2**32 - 1))
def test_crc32_is_zlibs(backend, data, value):
    for piece in (data, data * 7, data[1:]):
        assert kernels.crc32(memoryview(piece), value) == reference.crc32(piece, value)


def test_crc32_of_every_length(backend):
    data = np.random.default_rng(0).bytes(700)
    for length in range(700):
        assert kernels.crc32(memoryview(data)[:length]) == reference.crc32(data[:length])


@for_each("count", [0, 1, 7, 8, 9, 1000, 65_536])
def test_moments_and_absmax(backend, count):
    """The sums may be taken in any order, in fp64: each addition errs by at most 2⁻⁵³ of the sum."""
    for x in (gradient(count), gradient(count) * 1e30, gradient(count) * 1e-38, gradient(count).relu()):
        nonzero, total, square = kernels.moments(x)
        assert nonzero == int((x != 0).sum())
        assert total == pytest.approx(float(x.double().abs().sum()), rel=count * 2.0**-53 + 1e-15)
        assert square == pytest.approx(float(x.double().square().sum()), rel=count * 2.0**-53 + 1e-15)
        assert kernels.absmax(x) == reference.absmax(x)


@for_each("count", [1, 1000, 65_536, 65_537, 65_600, 300_001])
def test_sample_is_the_references(backend, count):
    grad, memory = gradient(count), gradient(count, 1)
    for arguments in ((grad, None, 0.0), (grad, memory, 0.9), (grad * 1e38, memory * 1e38, 1.0)):
        assert bits(kernels.sample(*arguments)) == bits(reference.sample(*arguments))


@for_each("name", ["fp4", "e2m1", "fp8", "e4m3", "e3m0b2", "ue3m2b4"])
def test_squared_errors(backend, name):
    """Of the values that would be sent, in fp64, up to the order of the sum."""
    fmt, x = parse_format(name), gradient(5000)
    steps = [float(np.float32(s)) for s in (1e-6, 3e-4, 1e-3, 0.1)]
    for step, found in zip(steps, kernels.squared_errors(x, steps, fmt), strict=True):
        sent = fmt.levels[kernels.to_symbols(x, step, fmt).numpy()] * step
        assert found == pytest.approx(((x.double().numpy() - sent) ** 2).sum(), rel=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_absmax_sees_what_is_not_finite(backend, bad):
    for position in (0, 3, 40, 98, 99):
        x = torch.ones(100)
        x[position] = bad
        assert not math.isfinite(kernels.absmax(x))


@st.composite
def quantizations(draw: st.DrawFn) -> dict[str, object]:
    """The arguments of `quantize`, without memory_out."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    names = ["fp4", "fp4", "e2m1", "fp8", "e4m3", "e4m3b10", "e3m0b2", "ue3m2b4", "e1m6b0f", "e6m1b31"]
    fmt, count = parse_format(draw(st.sampled_from(names))), draw(st.integers(0, 700))
    step = float(np.float32(2.0 ** draw(st.floats(-126, 126))))
    sizes = step * rng.choice([0.1, 1.0, draw(st.sampled_from([1.0, 30.0, 1e4, 1e-20]))], count)
    values = np.clip(fmt.levels * step, -3.4e38, 3.4e38).astype(np.float32)

    def noise() -> torch.Tensor:
        x = np.clip(rng.standard_normal(count) * sizes, -3.4e38, 3.4e38)
        return torch.from_numpy(x.astype(np.float32))

    return {
        "gradient": noise(),
        "memory": noise() if draw(st.booleans()) else None,
        "decay": draw(st.sampled_from([0.0, 0.5, 0.9, 1.0])),
        "step": step,
        "fmt": fmt,
        "values": torch.from_numpy(values),
    }


@given(case=quantizations(), seed=st.one_of(st.none(), st.integers(0, 2**64 - 1)), has_out=st.booleans())
def test_quantize_is_the_references(backend, case, seed, has_out):
    results = []
    for kernel in (kernels.quantize, reference.quantize):
        out = torch.full_like(case["gradient"], 9.0) if has_out else None
        symbols = kernel(**case, memory_out=out, seed=seed)
        results.append((bits(symbols), bits(out) if has_out else b""))
    assert results[0] == results[1]
    in_place = None if case["memory"] is None else case["memory"].clone()
    symbols = kernels.quantize(**(case | {"memory": in_place}), memory_out=in_place, seed=seed)
    assert bits(symbols) == results[0][0]
    assert in_place is None or not has_out or bits(in_place) == results[0][1]


@given(
    case=quantizations(), lane_bits=st.integers(0, 6), chunks=st.integers(1, 4), precision=st.integers(8, 14),
    accumulate=st.booleans(),
)  # fmt: skip
def test_fused_kernels_do_what_their_parts_do(backend, case, *, lane_bits, chunks, precision, accumulate):
    grad, fmt, values = case["gradient"], case["fmt"], case["values"]
    count = len(grad)
    if not count:
        return
    size = kernels.chunk_size(count, chunks)
    expected_memory = torch.empty(count)
    symbols = reference.quantize(**case, memory_out=expected_memory)
    counts = np.bincount(symbols.numpy(), minlength=fmt.symbols)
    frequencies = normalize(20 * counts + 1, precision)
    pieces = [
        reference.rans_encode_chunk(symbols.numpy()[i : i + size], frequencies, precision, 1 << lane_bits)
        for i in range(0, count, size)
    ]
    out, memory_out = torch.zeros(4 * count + 1000, dtype=torch.uint8), torch.empty(count)
    coded_ = kernels.quantize_rans(
        grad, case["memory"], memory_out, case["decay"], case["step"], fmt, values, frequencies, precision,
        lane_bits, len(pieces), out,
    )  # fmt: skip
    if backend == "reference":
        assert coded_ is None
    elif (grad + case["decay"] * (0 if case["memory"] is None else case["memory"])).isfinite().all():
        assert coded_ == ([len(p) for p in pieces], count)
        assert bits(out[: sum(coded_[0])]) == b"".join(pieces)
        assert bits(memory_out) == bits(expected_memory)
    decoded, body = torch.full((count,), 2.0), memoryview(b"".join(pieces))
    done = kernels.rans_dequantize(
        body, [len(p) for p in pieces], size, frequencies, precision, lane_bits, values, decoded, accumulate
    )
    assert done == (backend != "reference")
    if done:
        assert bits(decoded) == bits(values[symbols.long()] + (2.0 if accumulate else 0.0))


def test_generator_is_the_documented_one():
    for seed in (0, 1, 2**31, 2**32 - 1, 2**32, 2**63 + 12345, 2**64 - 1):
        for start in (0, 1000, 2**31 - 2, 2**32 - 3, 2**40):
            expected = [plain_random(i, seed) / 2**24 for i in range(start, start + 6)]
            assert reference.uniform(6, seed, start).tolist() == expected


def test_kernels_leave_their_arguments_alone(backend):
    fmt, grad, memory = parse_format("fp4"), gradient(5000), gradient(5000, 1)
    kept = bits(grad), bits(memory)
    values = torch.from_numpy(fmt.levels.astype(np.float32))
    kernels.quantize(grad, memory, torch.empty(5000), 0.9, 1e-3, fmt, values)
    kernels.to_symbols(grad, 1e-3, fmt, 7)
    kernels.moments(grad), kernels.absmax(grad), kernels.sample(grad, memory, 0.9)
    assert kept == (bits(grad), bits(memory))
