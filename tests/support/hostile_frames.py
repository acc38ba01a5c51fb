"""Frames that ask for as much memory and time as their codec allows: what a hostile sender would write.

Each maker takes a number of elements, a dtype and a random generator, and returns a payload; all of them are as long as
the format demands and no longer. `make` puts the header before it.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable

import numpy as np
import torch

from gradwire import compress
from gradwire.compress import rans
from gradwire.frame import headers
from support.helpers import assemble
from support.plain_coders import plain_gammas, plain_varint

Maker = Callable[[int, torch.dtype, random.Random], bytes]
MAKERS: dict[str, tuple[int, int, Maker]] = {}  # by name: codec, flags, maker
SHAPES: dict[
    str, Callable[[int], tuple[int, ...]]
] = {}  # by name, of those that are not vectors: about so many elements
STEP = b"\x80\x3f"  # 1 as bf16
FP4, FP8 = b"\0", b"\1"
FP4_SYMBOLS, FP4_ZERO = 11, 5


def maker(codec: int, flags: int = 0) -> Callable[[Maker], Maker]:
    def add(function: Maker) -> Maker:
        MAKERS[function.__name__.replace("_", "-")] = codec, flags, function
        return function

    return add


def make(name: str, count: int, dtype: torch.dtype = torch.float32, rng: random.Random | None = None) -> bytes:
    codec, flags, function = MAKERS[name]
    shape = SHAPES[name](count) if name in SHAPES else (count,)
    return assemble(function(int(np.prod(shape)), dtype, rng or random.Random(0)), shape, codec, dtype, flags)


# ── coded symbols ─────────────────────────────────────────────────────────────────────────────────


def constant(symbol: int) -> bytes:
    return bytes([1, symbol])


def certain(symbols: int, implied: int, lane_bits: int = 0) -> bytes:
    """rANS with a table in which the implied symbol has all of the mass: no symbol costs a bit, and there is no end."""
    states = b"\0\x40\0" * (1 << lane_bits)  # 2¹⁴
    return bytes([3 | 2 << 2 | 14 << 4]) + plain_gammas([0] * (symbols - 1)) + bytes([lane_bits]) + states


def coded(count: int, symbols: int, implied: int, rng: random.Random, coder: str = "rans") -> bytes:
    """Symbols of a skewed distribution, by our own encoder."""
    p = np.full(symbols, 0.02 / max(1, symbols - 1))
    p[implied] = 0.98
    drawn = np.random.default_rng(rng.randrange(2**32)).choice(symbols, size=count, p=p / p.sum()).astype(np.uint8)
    alphabet = compress.Alphabet(symbols, implied)
    counts = np.maximum(np.bincount(drawn, minlength=symbols), 1)
    coding = compress.choose(compress.SymbolStatistics(alphabet, counts, count), compress.CODERS[coder])
    return compress.encode(drawn, alphabet, coding)


def many_chunks(count: int, symbols: int, lane_bits: int) -> bytes:
    """As many rANS chunks as there can be, all of symbols that are certain."""
    chunks = max(1, -(-count // 64))
    while chunks > 1 and -(-count // (chunks * 64)) * 64 * (chunks - 1) >= count:
        chunks -= 1
    states = b"\0\x40\0" * (1 << lane_bits)
    head = bytes([3 | 2 << 2 | 14 << 4]) + plain_gammas([0] * (symbols - 1))
    if chunks == 1:
        return head + bytes([lane_bits]) + states
    return head + rans.head(lane_bits, [len(states)] * chunks) + states * chunks


# ── stored, cast, minifloat ───────────────────────────────────────────────────────────────────────


@maker(headers.STORED)
def stored(count: int, dtype: torch.dtype, rng: random.Random) -> bytes:
    return bytes(count * dtype.itemsize)


@maker(headers.CAST)
def cast(count: int, dtype: torch.dtype, rng: random.Random) -> bytes:
    return bytes([rng.choice((1, 2))]) + bytes(2 * count)


@maker(headers.MINIFLOAT)
def minifloat_constant(count: int, dtype: torch.dtype, rng: random.Random) -> bytes:
    return FP4 + STEP + constant(rng.randrange(FP4_SYMBOLS))


@maker(headers.MINIFLOAT)
def minifloat_certain(count: int, dtype: torch.dtype, rng: random.Random) -> bytes:
    return FP4 + STEP + certain(FP4_SYMBOLS, FP4_ZERO, rng.randrange(7))


@maker(headers.MINIFLOAT)
def minifloat_chunks(count: int, dtype: torch.dtype, rng: random.Random) -> bytes:
    return FP4 + STEP + many_chunks(count, FP4_SYMBOLS, rng.choice((0, 1, 4)))


@maker(headers.MINIFLOAT)
def minifloat_coded(count: int, dtype: torch.dtype, rng: random.Random) -> bytes:
    return FP4 + STEP + coded(count, FP4_SYMBOLS, FP4_ZERO, rng, rng.choice(("rans", "huffman", "raw")))


@maker(headers.MINIFLOAT, headers.SEGMENTED)
def minifloat_segments(count: int, dtype: torch.dtype, rng: random.Random) -> bytes:
    return FP4 + segments(count, rng.choice((1, 2, 100, 4095))) + constant(rng.randrange(FP4_SYMBOLS))


@maker(headers.MINIFLOAT, headers.SEGMENTED)
def minifloat_two_segments(count: int, dtype: torch.dtype, rng: random.Random) -> bytes:
    return FP4 + segments(count, max(1, count // 2)) + certain(FP4_SYMBOLS, FP4_ZERO, rng.randrange(7))


def segments(count: int, length: int) -> bytes:
    whole, rest = divmod(count, length)
    parts = (plain_varint(length) + STEP) * whole + (plain_varint(rest) + STEP if rest else b"")
    return plain_varint(whole + bool(rest)) + parts


# ── grid ──────────────────────────────────────────────────────────────────────────────────────────


def grid_of(side: bytes, symbols: bytes, outliers: bytes = b"") -> bytes:
    return bytes([3, 2, 5, 250]) + side + plain_varint(len(outliers)) + symbols + outliers


def outliers(count: int) -> bytes:
    """Every second entry is an outlier, up to this number of them, of three bits each."""
    codes = np.zeros(3 * count, dtype=np.uint8)
    codes[::3] = codes[2::3] = 1
    return plain_varint(count) + b"\0\0" + np.packbits(codes, bitorder="little").tobytes() if count else b""


@maker(headers.GRID)
def grid_constant(count: int, dtype: torch.dtype, rng: random.Random) -> bytes:
    return grid_of(STEP, constant(rng.randrange(7)))


@maker(headers.GRID)
def grid_outliers(count: int, dtype: torch.dtype, rng: random.Random) -> bytes:
    return grid_of(STEP, certain(7, 3, rng.randrange(7)), outliers(count // 16))


@maker(headers.GRID)
def grid_nothing_but_outliers(count: int, dtype: torch.dtype, rng: random.Random) -> bytes:
    return grid_of(STEP, certain(7, 3), outliers(count))


@maker(headers.GRID, headers.SEGMENTED)
def grid_segments(count: int, dtype: torch.dtype, rng: random.Random) -> bytes:
    side = segments(count, rng.choice((1, 2, 100, 4095, max(1, count // 2))))
    return grid_of(side, certain(7, 3, rng.randrange(7)), outliers(count // 16))


@maker(headers.GRID)
def grid_coded(count: int, dtype: torch.dtype, rng: random.Random) -> bytes:
    return grid_of(STEP, coded(count, 7, 3, rng, rng.choice(("rans", "huffman", "raw"))), outliers(count // 16))


# ── levels ────────────────────────────────────────────────────────────────────────────────────────


def level_numbers(sizes: np.ndarray, levels: int, kind: int, precision: int) -> bytes:
    """Ones, as many as the buckets need."""
    used = np.minimum(np.maximum(sizes, 2), levels if kind == 0 else 3 - kind).sum()
    return {0: b"\0\0\x80\x3f", 1: b"\0\x3c", 2: STEP}[precision] * int(used)


def bucket_sizes(count: int, lengths: list[int], bucket: int) -> np.ndarray:
    sizes: list[int] = []
    for length in lengths:
        whole, rest = divmod(length, bucket or length)
        sizes += [bucket or length] * whole + [rest] * bool(rest)
    return np.array(sizes)


def levels_of(count: int, levels: int, bucket: int, length: int, rng: random.Random) -> bytes:
    """Buckets of one size; segments of one length, the last takes the rest, if `length` is not 0."""
    lengths = [count]
    if length and count >= 2 * length:
        lengths = [length] * (count // length - 1) + [length + count % length]
    bucket = bucket if bucket < max(lengths) else 0
    kind, precision = rng.choice((0, 1, 2)), rng.choice((0, 1, 2))
    side = plain_varint(bucket) + bytes([levels, kind | precision << 2])
    if length:
        side += plain_varint(len(lengths)) + b"".join(map(plain_varint, lengths))
    numbers = level_numbers(bucket_sizes(count, lengths, bucket), levels, kind, precision)
    symbols = rng.choice((constant(rng.randrange(levels)), certain(levels, levels // 2, rng.randrange(7))))
    return side + numbers + symbols


@maker(headers.LEVELS)
def levels_of_small_buckets(count: int, dtype: torch.dtype, rng: random.Random) -> bytes:
    return levels_of(count, 2, 4, 0, rng)


@maker(headers.LEVELS)
def levels_of_large_tables(count: int, dtype: torch.dtype, rng: random.Random) -> bytes:
    return levels_of(count, 255, 510, 0, rng)


@maker(headers.LEVELS)
def levels_of_one_bucket(count: int, dtype: torch.dtype, rng: random.Random) -> bytes:
    return levels_of(count, rng.randrange(2, 256), 0, 0, rng)


@maker(headers.LEVELS, headers.SEGMENTED)
def levels_segments(count: int, dtype: torch.dtype, rng: random.Random) -> bytes:
    levels = rng.choice((2, 9, 255))
    return levels_of(count, levels, rng.choice((0, 2 * levels)), rng.choice((2 * levels, 2 * levels + 1, 1000)), rng)


# ── sparse ────────────────────────────────────────────────────────────────────────────────────────


def gaps_of_zero(count: int, sent: int, rng: random.Random) -> tuple[int, bytes]:
    """The number of a code of positions, and the first `sent` positions in it: a bit each, or none at all."""
    if rng.random() < 0.3:
        return 0, b"\0" + np.packbits(np.ones(sent, dtype=np.uint8), bitorder="little").tobytes()
    spare = count - sent
    m = rng.randrange(3)
    classes, implied = class_of(spare, m) + 1, class_of(spare // sent, m)
    symbols = constant(0)
    if classes > 1 and implied == 0 and rng.random() < 0.7:
        symbols = certain(classes, 0, rng.randrange(7))
    return 1, bytes([m]) + plain_varint(len(symbols)) + symbols


def class_of(gap: int, m: int) -> int:
    octave = gap.bit_length() - 1
    return gap if gap < 1 << m else (octave - m << m) + (gap >> octave - m)


def sparse_of(count: int, values: int, body: Callable[[int], bytes], rng: random.Random) -> bytes:
    sent = max(1, rng.choice((count, count, count - 1, count // 2 + 1, count // 20)))
    way, positions = gaps_of_zero(count, sent, rng)
    return plain_varint(sent) + bytes([values | way << 4]) + positions + body(sent)


ONE = struct.pack("<f", 1.0)


@maker(headers.SPARSE)
def sparse_everything_in_27_bytes(count: int, dtype: torch.dtype, rng: random.Random) -> bytes:
    return plain_varint(count) + bytes([0 | 1 << 4, 0]) + plain_varint(2) + constant(0) + ONE


@maker(headers.SPARSE)
def sparse_one_value(count: int, dtype: torch.dtype, rng: random.Random) -> bytes:
    return sparse_of(count, 0, lambda sent: ONE, rng)


@maker(headers.SPARSE)
def sparse_signs(count: int, dtype: torch.dtype, rng: random.Random) -> bytes:
    return sparse_of(count, 1, lambda sent: ONE + bytes(-(-sent // 8)), rng)


@maker(headers.SPARSE)
def sparse_casts(count: int, dtype: torch.dtype, rng: random.Random) -> bytes:
    kind = rng.choice((2, 3, 4))
    return sparse_of(count, kind, lambda sent: bytes(sent * (4 if kind == 2 else 2)), rng)


@maker(headers.SPARSE)
def sparse_minifloat(count: int, dtype: torch.dtype, rng: random.Random) -> bytes:
    symbols = rng.choice((constant(7), certain(FP4_SYMBOLS, FP4_ZERO, rng.randrange(7))))
    return sparse_of(count, 5, lambda sent: FP4 + STEP + symbols, rng)


@maker(headers.SPARSE)
def sparse_classes_and_symbols(count: int, dtype: torch.dtype, rng: random.Random) -> bytes:
    """Both positions and values are symbols of a byte each while they are decoded."""
    sent = count - 1
    positions = certain(2, 0, rng.randrange(7))
    payload = plain_varint(sent) + bytes([5 | 1 << 4, 0]) + plain_varint(len(positions)) + positions
    return payload + FP4 + STEP + certain(FP4_SYMBOLS, FP4_ZERO, rng.randrange(7))


@maker(headers.SPARSE)
def sparse_magnitudes(count: int, dtype: torch.dtype, rng: random.Random) -> bytes:
    number = rng.choice((1, 3, 127))
    symbols = rng.choice((constant(2 * number - 1), certain(2 * number, number, rng.randrange(7))))
    return sparse_of(count, 6, lambda sent: bytes([number]) + STEP * number + symbols, rng)


# ── count-sketch and homomorphic ──────────────────────────────────────────────────────────────────


def sketch_of(count: int, rows: int, columns: int, kept: int, half: int, rng: random.Random) -> bytes:
    side = bytes([rows | half << 4]) + plain_varint(columns) + plain_varint(kept) + struct.pack("<f", 0.5)
    cells = (b"\0\x3c" if half else ONE) * (rows * columns)
    return side + rng.randrange(2**64).to_bytes(8, "little") + cells


@maker(headers.SKETCH)
def sketch_tiny(count: int, dtype: torch.dtype, rng: random.Random) -> bytes:
    """The smallest table that a tensor of this size may have: 60 bytes up to fifteen million elements."""
    columns = max(1, -(-count // (7 << 20)) - 1)
    return sketch_of(count, 7, columns, rng.choice((1, count // 2 + 1, count)), 0, rng)


@maker(headers.SKETCH)
def sketch_too_small(count: int, dtype: torch.dtype, rng: random.Random) -> bytes:
    return sketch_of(count, rng.choice((1, 3, 5, 7)), 1, count, 0, rng)


@maker(headers.SKETCH)
def sketch_large(count: int, dtype: torch.dtype, rng: random.Random) -> bytes:
    rows = rng.choice((1, 3, 7))
    columns = min(1 << 23, max(1, count // (rows * rng.choice((1, 2, 10)))))
    return sketch_of(count, rows, columns, rng.choice((1, count // 100 + 1, count)), rng.randrange(2), rng)


@maker(headers.SKETCH)
def sketch_larger_than_its_tensor(count: int, dtype: torch.dtype, rng: random.Random) -> bytes:
    return sketch_of(count, 7, min(count, 1 << 23), count, 0, rng)


def homomorphic_side(index: int, lanes: int, bits: int) -> bytes:
    return bytes([index | lanes << 2 | bits << 4]) + ONE


@maker(headers.HOMOMORPHIC)
def homomorphic_dense(count: int, dtype: torch.dtype, rng: random.Random) -> bytes:
    bits = rng.randrange(4)
    words = -(-count * (32 >> bits) // 32)
    return homomorphic_side(0, 0, bits) + b"\1\0\0\0" * words


@maker(headers.HOMOMORPHIC)
def homomorphic_bitmap(count: int, dtype: torch.dtype, rng: random.Random) -> bytes:
    """An empty index, or one that marks as many blocks as there are cells, over a small sketch."""
    lanes = rng.randrange(3)
    words = -(-count // (1, 4, 16)[lanes])
    index = bytearray(4 * -(-words // 32))
    if rng.random() < 0.5:
        index[: min(len(index), 8)] = b"\xff" * min(len(index), 8)
    cells = bytes(4 * (16 << 4) * (1, 4, 16)[lanes])
    return homomorphic_side(1, lanes, 0) + bytes(4) + plain_varint(16) + b"\4" + bytes(index) + cells


@maker(headers.HOMOMORPHIC)
def homomorphic_bloom(count: int, dtype: torch.dtype, rng: random.Random) -> bytes:
    """A Bloom filter of one word, which all 24 probes of every block ask for."""
    word = rng.choice((b"\0\0\0\0", b"\xff\xff\xff\xff", b"\1\0\0\0"))
    side = homomorphic_side(2, rng.randrange(3), 0)
    lanes = (1, 4, 16)[side[0] >> 2 & 3]
    return side + bytes(4) + plain_varint(4) + b"\0" + plain_varint(1) + bytes([24]) + word + bytes(16 * lanes)


@maker(headers.HOMOMORPHIC)
def homomorphic_sketch_larger_than_its_tensor(count: int, dtype: torch.dtype, rng: random.Random) -> bytes:
    index = bytes(4 * -(-count // 32))
    return homomorphic_side(1, 0, 0) + bytes(4) + plain_varint(count + 4) + b"\0" + index + bytes(4 * (count + 4))


# ── structured ────────────────────────────────────────────────────────────────────────────────────


def shaped(shape: Callable[[int], tuple[int, ...]]) -> Callable[[Maker], Maker]:
    def add(function: Maker) -> Maker:
        SHAPES[function.__name__.replace("_", "-")] = shape
        return function

    return add


def field(data: bytes) -> bytes:
    return plain_varint(len(data)) + data


def terms(rows: int, width: int, most: int = 32) -> bytes:
    """As many as there may be, all of factors that are 1."""
    rank = min(most, rows * width // 8 // (rows + width))
    return bytes([rank]) + (STEP + bytes([1]) + field(constant(2))) * rank


def scales(sizes: tuple[int, ...]) -> bytes:
    """Neighbours have different scales, in all of 32 classes."""
    parts = [b"\0"]  # the base
    for size in sizes:
        if size > 1:
            bits = (np.arange(size)[:, None] >> np.arange(5) & 1).astype(np.uint8).ravel()  # 0 … 31, and again
            parts.append(bytes([31]) + field(b"\0" + np.packbits(bits, bitorder="little").tobytes()))
    return b"".join(parts)


def remainder(count: int, side: bytes, streams: bytes, listed: int) -> bytes:
    apart = outliers(listed)
    return bytes([3, 2, 5, 250]) + STEP + side + plain_varint(len(apart)) + streams + apart


def one_class(rng: random.Random) -> bytes:
    return b"\3" + field(certain(7, 3, rng.randrange(7)))


@maker(headers.STRUCTURED)
@shaped(lambda count: (max(1, count // 1024), min(count, 1024)))
def structured_most_terms(count: int, dtype: torch.dtype, rng: random.Random) -> bytes:
    width = min(count, 1024)
    return b"\1" + terms(count // width, width) + remainder(count, b"\1", one_class(rng), count // 128)


@maker(headers.STRUCTURED)
@shaped(lambda count: (max(1, count // 16), min(count, 16)))
def structured_narrow_rows(count: int, dtype: torch.dtype, rng: random.Random) -> bytes:
    width = min(count, 16)
    rows = count // width
    side = b"\x20" + scales((rows, width))
    return b"\1" + terms(rows, width) + remainder(count, side, b"\0" * 32, 0)


@maker(headers.STRUCTURED)
@shaped(lambda count: (64 if count >= 1 << 12 else 1, count // 64 if count >= 1 << 12 else count))
def structured_wide_rows(count: int, dtype: torch.dtype, rng: random.Random) -> bytes:
    rows = 64 if count >= 1 << 12 else 1
    return b"\1" + terms(rows, count // rows) + remainder(count, b"\1", one_class(rng), count // 128)


@maker(headers.STRUCTURED)
def structured_small_blocks(count: int, dtype: torch.dtype, rng: random.Random) -> bytes:
    return bytes([0, 4, 0]) + remainder(count, b"\1", one_class(rng), count // 128)


@maker(headers.STRUCTURED)
@shaped(lambda count: (max(1, count // 256), 1, *((16, 16) if count >= 256 else (2, max(1, min(16, count // 2))))))
def structured_large_kernels(count: int, dtype: torch.dtype, rng: random.Random) -> bytes:
    return b"\2\0" + remainder(count, b"\1", one_class(rng), count // 128)


@maker(headers.STRUCTURED)
def structured_nothing(count: int, dtype: torch.dtype, rng: random.Random) -> bytes:
    return bytes([0, 12, 0, 0])
