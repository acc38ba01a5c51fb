"""A decoder that follows docs/wire-format.md word for word, and slowly.

It shares no code with gradwire, and checks next to nothing: it is given valid frames, and says what they decode to.
"""

from __future__ import annotations

import math
import struct
import zlib
from dataclasses import dataclass, field
from decimal import Decimal, localcontext
from fractions import Fraction
from functools import lru_cache

import numpy as np
import torch

from support.plain_coders import Bytes, Coded, plain_random, read_symbols
from support.plain_homomorphic import plain_words, unpacked

DTYPES = (
    torch.float32, torch.float16, torch.bfloat16, torch.float64,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool,
)  # fmt: skip
FORMATS = [  # sign, exponent and mantissa bits, bias, special
    (1, 2, 1, 1, 1), (1, 5, 2, 15, 1), (1, 2, 1, 1, 0), (1, 4, 3, 7, 2), (1, 5, 2, 15, 1), (1, 4, 3, 10, 1)
]  # fmt: skip
STORED, MINIFLOAT, CAST, GRID, LEVELS, SPARSE, SKETCH, HOMOMORPHIC, STRUCTURED = range(9)
SEGMENTED = 2
BLOCKS, MATRIX, KERNELS = range(3)
PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459")


@dataclass
class Plain(Coded):
    """What a frame says, field by field; of a sparse one, symbols are the classes of its gaps."""

    codec: int = 0
    dtype: torch.dtype = torch.float32
    flags: int = 0
    shape: tuple[int, ...] = ()
    header_bytes: int = 0
    payload: bytes = b""
    levels: np.ndarray = field(default_factory=lambda: np.zeros(0))
    segments: list[tuple[int, float]] = field(default_factory=list)
    buckets: list[tuple[int, list[float]]] = field(default_factory=list)  # entries and levels of each
    table: int = 0  # levels: kind and precision; sketch: rows and precision
    kind: int | None = None  # sparse: of values and positions
    magnitudes: list[float] = field(default_factory=list)  # sparse: that symbols stand for
    positions: list[int] = field(default_factory=list)  # those that are sent, of a sparse frame; outliers of a grid
    view: int | None = None  # structured: blocks, matrix or kernels; also the fields below
    sizes: tuple[int, int, int] = (0, 0, 0)  # rows, columns and coefficients
    terms: list[tuple[float, list[int], list[int]]] = field(default_factory=list)
    classes: list[int] = field(default_factory=list)  # of all entries
    tensor: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def count(self) -> int:
        return math.prod(self.shape)


def plain_decode(frame: bytes) -> Plain:
    """Everything in a valid frame, the tensor last."""
    magic, version, kind, tensor, checksum = struct.unpack_from("<2sBBBI", frame)
    assert (magic, version, kind >> 6) == (b"GW", 1, 0)
    assert checksum == zlib.crc32(frame[:5] + frame[9:])
    at = Bytes(frame)
    at.take(9)
    length = at.varint()
    shape = tuple(at.varint() for _ in range(tensor >> 4))
    found = Plain(
        codec=kind & 15, dtype=DTYPES[tensor & 15], flags=kind >> 4, shape=shape, header_bytes=at.at,
        payload=frame[at.at :],
    )  # fmt: skip
    assert len(found.payload) == length
    _fill(found)
    return found


def _fill(found: Plain) -> None:
    at = Bytes(found.payload)
    read = {
        STORED: _stored, MINIFLOAT: _minifloat, CAST: _cast, GRID: _grid, LEVELS: _levels, SPARSE: _sparse,
        SKETCH: _sketch, HOMOMORPHIC: _homomorphic, STRUCTURED: _structured,
    }[found.codec]  # fmt: skip
    found.tensor = read(found, at).reshape(found.shape)
    assert at.at == len(at.data)


def elements(raw: bytes, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)


def limited(number: float, dtype: torch.dtype) -> torch.Tensor:
    """A number of fp32, limited to the largest finite value of the dtype and rounded to it."""
    limit = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    return torch.tensor(min(max(number, -limit), limit), dtype=dtype)


@lru_cache(maxsize=4096)
def plain_value(level: float, step: float, dtype: torch.dtype) -> torch.Tensor:
    with np.errstate(over="ignore", under="ignore"):
        return limited(float(np.float32(np.float32(level) * np.float32(step))), dtype)


# ── codecs 0 to 2 ─────────────────────────────────────────────────────────────────────────────────


def _stored(found: Plain, at: Bytes) -> torch.Tensor:
    return elements(at.rest(), found.dtype)


def _cast(found: Plain, at: Bytes) -> torch.Tensor:
    sent, limit = DTYPES[at.byte()], torch.finfo(found.dtype).max
    return elements(at.rest(), sent).double().clamp(-limit, limit).to(found.dtype)


def plain_magnitudes(sign: int, exponent: int, mantissa: int, bias: int, special: int) -> list[float]:
    """The value of every code from 0 upwards: (1 + m/2^M)·2^(e−bias), and m/2^M·2^(1−bias) for e = 0."""
    codes = range((2**exponent - (special == 1)) * 2**mantissa - (special == 2))
    fractions = [Fraction(c % 2**mantissa, 2**mantissa) for c in codes]
    exponents = [c >> mantissa for c in codes]
    return [
        float((1 + m) * Fraction(2) ** (e - bias) if e else m * Fraction(2) ** (1 - bias))
        for e, m in zip(exponents, fractions, strict=True)
    ]


def _minifloat(found: Plain, at: Bytes) -> torch.Tensor:
    number = at.byte()
    if number == 255:
        kind, exponent, mantissa, bias = struct.unpack("<BBBb", at.take(4))
        fmt = (kind & 1, exponent, mantissa, bias, kind >> 1)
    else:
        fmt = FORMATS[number]
    m = plain_magnitudes(*fmt)
    found.levels = np.array([-x for x in m[:0:-1]] + m if fmt[0] else m)
    steps = _read_steps(found, at)
    read_symbols(found, at, found.count, len(found.levels), found.levels.tolist().index(0), number)
    pairs = zip(found.symbols, steps, strict=True)
    return torch.stack([plain_value(found.levels[s], step, found.dtype) for s, step in pairs])


def _read_steps(found: Plain, at: Bytes) -> list[float]:
    """The step of every entry."""
    if found.flags & SEGMENTED:
        found.segments = [(at.varint(), at.bfloat16()) for _ in range(at.varint())]
    else:
        found.segments = [(found.count, at.bfloat16())]
    return [step for length, step in found.segments for _ in range(length)]


# ── codec 3: grid ─────────────────────────────────────────────────────────────────────────────────


def _grid(found: Plain, at: Bytes) -> torch.Tensor:
    largest, number = at.byte(), at.byte()
    offsets = struct.unpack(f"<{number}b", at.take(number))
    found.levels = np.arange(-largest, largest + 1)
    steps = _read_steps(found, at)
    length = at.varint()
    coded = Bytes(at.take(len(at.data) - at.at - length))
    read_symbols(found, coded, found.count, 2 * largest + 1, largest)
    multiples = [s - largest for s in found.symbols]
    for index, multiple in _outliers(at, largest) if length else []:
        assert multiples[index] == 0
        multiples[index] = multiple
        found.positions.append(index)
    pairs = zip(multiples, steps, strict=True)
    return torch.stack([_grid_value(m, offsets, step, found.dtype) for m, step in pairs])


def _grid_value(m: int, offsets: tuple[int, ...], step: float, dtype: torch.dtype) -> torch.Tensor:
    d = offsets[min(abs(m), len(offsets)) - 1] / 256 if offsets and m else 0
    level = float(np.float32(abs(m) + d))
    return plain_value(-level if m < 0 else level, step, dtype)


def _outliers(at: Bytes, largest: int) -> list[tuple[int, int]]:
    count, a, b = at.varint(), at.byte(), at.byte()
    bits, index, found = at.bits(), -1, []
    for _ in range(count):
        index += 1 + bits.zeros() * 2**a + bits.number(a)
        negative = bits.number(1)
        size = bits.zeros()
        x = (2**size + bits.number(size) - 1) * 2**b + bits.number(b)
        found.append((index, -(largest + 1 + x) if negative else largest + 1 + x))
    bits.pad()
    return found


# ── codec 4: levels ───────────────────────────────────────────────────────────────────────────────


def _levels(found: Plain, at: Bytes) -> torch.Tensor:
    bucket, s, found.table = at.varint(), at.byte(), at.byte()
    segments = [at.varint() for _ in range(at.varint())] if found.flags & SEGMENTED else [found.count]
    sizes = [min(bucket or n, n - start) for n in segments for start in range(0, n, bucket or n)]
    rows = [[limited(x, found.dtype) for x in _levels_of(found.table, s, n, at)] for n in sizes]
    found.buckets = [(n, [float(x) for x in row]) for row, n in zip(rows, sizes, strict=True)]
    found.levels = np.arange(s)
    read_symbols(found, at, found.count, s, s // 2)
    of_bucket = [row for row, n in zip(rows, sizes, strict=True) for _ in range(n)]
    return torch.stack([row[symbol] for row, symbol in zip(of_bucket, found.symbols, strict=True)])


def _levels_of(table: int, s: int, n: int, at: Bytes) -> list[float]:
    """Those of a bucket of n entries."""
    kind, dtype = table & 3, DTYPES[table >> 2]  # fp32, fp16, bf16 have the same numbers there and here
    many = {0: min(s, max(2, n)), 1: 2, 2: 1}[kind]
    numbers = elements(at.take(many * dtype.itemsize), dtype).double().tolist()
    if kind == 0:
        return numbers + numbers[-1:] * (s - len(numbers))
    low, high = numbers if kind == 1 else (-numbers[0], numbers[0])
    return [float(np.float32((low * (s - 1 - k) + high * k) / (s - 1))) for k in range(s)]


# ── codec 5: sparse ───────────────────────────────────────────────────────────────────────────────


def _sparse(found: Plain, at: Bytes) -> torch.Tensor:
    out = torch.zeros(found.count, dtype=found.dtype)
    k = at.varint()
    if k:
        found.kind = at.byte()
        place = -1
        for gap in _classes(found, at, k) if found.kind >> 4 else _golomb(at, k):
            place += 1 + gap
            found.positions.append(place)
        out[found.positions] = _sparse_values(found, at, k)
    return out


def _golomb(at: Bytes, k: int) -> list[int]:
    b = at.byte()
    bits = at.bits()
    gaps = [bits.zeros() * 2**b + bits.number(b) for _ in range(k)]
    bits.pad()
    return gaps


def plain_class(gap: int, m: int) -> int:
    if gap < 2**m:
        return gap
    o = gap.bit_length() - 1
    return (o - m) * 2**m + gap // 2 ** (o - m)


def _classes(found: Plain, at: Bytes, k: int) -> list[int]:
    m, length = at.byte(), at.varint()
    spare = found.count - k
    read_symbols(found, Bytes(at.take(length)), k, plain_class(spare, m) + 1, plain_class(spare // k, m))
    bits, gaps = at.bits(), []
    for c in found.symbols:
        left_open = max(0, c // 2**m - 1)
        top = c if c < 2**m else c % 2**m + 2**m
        gaps.append(top * 2**left_open + bits.number(left_open))
    bits.pad()
    return gaps


def _sparse_values(found: Plain, at: Bytes, k: int) -> torch.Tensor:
    kind = (found.kind or 0) & 15
    if kind == 5:
        inner = Plain(codec=MINIFLOAT, dtype=found.dtype, shape=(k,), payload=at.rest())
        _fill(inner)
        return inner.tensor
    if kind == 6:
        magnitudes = [at.bfloat16() for _ in range(at.byte())]
        inner = Plain()
        read_symbols(inner, at, k, 2 * len(magnitudes), len(magnitudes))
        found.magnitudes = magnitudes
        both = [-m for m in magnitudes[::-1]] + magnitudes
        return torch.stack([limited(both[s], found.dtype) + 0 for s in inner.symbols])
    if kind >= 2:
        return torch.stack([limited(x, found.dtype) for x in elements(at.rest(), DTYPES[kind - 2]).tolist()])
    (value,) = struct.unpack("<f", at.take(4))
    if kind == 0:
        return limited(value, found.dtype).expand(k)
    bits = at.bits()
    values = [limited(-value if bits.number(1) else value, found.dtype) for _ in range(k)]
    bits.pad()
    return torch.stack(values)


# ── codec 6: count-sketch ─────────────────────────────────────────────────────────────────────────


def _sketch(found: Plain, at: Bytes) -> torch.Tensor:
    found.table, columns, kept = at.byte(), at.varint(), at.varint()
    scale, seed = struct.unpack("<fQ", at.take(12))
    rows = found.table & 15
    cells = elements(at.rest(), DTYPES[found.table >> 4]).float().reshape(rows, columns)
    estimates = []
    for i in range(found.count):
        of_rows = []
        for row in range(rows):
            h = plain_random(i, (seed + row) % 2**64)
            of_rows.append((-1 if h & 1 else 1) * float(cells[row, (h >> 1) * columns // 2**23]))
        estimates.append(sorted(of_rows)[rows // 2])
    values = [torch.zeros((), dtype=found.dtype)] * found.count
    for i in sorted(range(found.count), key=lambda i: (-abs(estimates[i]), i))[:kept]:
        values[i] = plain_value(estimates[i], scale, found.dtype) + 0
    return torch.stack(values)


# ── codec 7: homomorphic ──────────────────────────────────────────────────────────────────────────


def _homomorphic(found: Plain, at: Bytes) -> torch.Tensor:
    kind = at.byte()
    bits = 32 >> (kind >> 4)
    (step,) = struct.unpack("<f", at.take(4))
    words = plain_words(at, kind & 3, (1, 4, 16)[kind >> 2 & 3], -(-found.count * bits // 32))
    codes = [q for word in words for q in unpacked(word, bits)][: found.count]
    return torch.stack([limited(float(np.float32(q * step)), found.dtype) for q in codes])


# ── codec 8: structured ───────────────────────────────────────────────────────────────────────────


def _structured(found: Plain, at: Bytes) -> torch.Tensor:
    found.view = at.byte()
    rows, columns, coefficients = found.sizes = _sizes(found, at)
    width = columns * coefficients
    found.terms = [_term(at, rows, width) for _ in range(at.byte())]
    largest = at.byte()
    x = _remainder(found, at, largest) if largest else np.zeros(found.count, dtype=np.float32)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        if found.terms:
            x += _prediction(found.terms, rows, width).ravel()
        if found.view == KERNELS:
            x = _transformed_back(x, found.shape)
    x[np.isnan(x)] = 0
    values = torch.stack([limited(float(value), found.dtype) for value in x])
    return torch.where(values == 0, torch.zeros_like(values), values)


def _sizes(found: Plain, at: Bytes) -> tuple[int, int, int]:
    if found.view == BLOCKS:
        block = 2 ** at.byte()
        return -(-found.count // block), block, 1
    if found.view == MATRIX:
        return found.shape[0], math.prod(found.shape[1:]), 1
    return found.shape[0], found.shape[1], math.prod(found.shape[2:])


def _coded_numbers(at: Bytes, count: int, alphabet: int, zero: int) -> list[int]:
    inner = Coded()
    read_symbols(inner, Bytes(at.take(at.varint())), count, alphabet, zero)
    return inner.symbols


def _term(at: Bytes, rows: int, width: int) -> tuple[float, list[int], list[int]]:
    s, m = at.bfloat16(), at.byte()
    numbers = [symbol - m for symbol in _coded_numbers(at, rows + width, 2 * m + 1, m)]
    return s, numbers[:rows], numbers[rows:]


def _prediction(terms: list[tuple[float, list[int], list[int]]], rows: int, width: int) -> np.ndarray:
    p = np.zeros((rows, width), dtype=np.float32)
    for s, a, b in terms:
        left = np.float32(s) * np.array(a, dtype=np.float32)
        p += left[:, None] * np.array(b, dtype=np.float32)[None, :]
    return p


def _remainder(found: Plain, at: Bytes, largest: int) -> np.ndarray:
    number = at.byte()
    offsets = struct.unpack(f"<{number}b", at.take(number))
    step = at.bfloat16()
    classes = at.byte()
    found.classes = _classes_of(found, at, classes) if classes > 1 else [0] * found.count
    length = at.varint()
    multiples = [0] * found.count
    for t in range(classes):
        members = [i for i, c in enumerate(found.classes) if c == t]
        top = at.byte() if members else 0
        symbols = _coded_numbers(at, len(members), 2 * top + 1, top) if top else [0] * len(members)
        for i, symbol in zip(members, symbols, strict=True):
            multiples[i] = symbol - top
    found.levels, found.symbols = np.arange(-largest, largest + 1), [m + largest for m in multiples]
    for index, multiple in _outliers(at, largest) if length else []:
        assert multiples[index] == 0
        multiples[index] = multiple
        found.positions.append(index)
    return np.array([float(_grid_value(m, offsets, step, torch.float32)) for m in multiples], dtype=np.float32)


def _classes_of(found: Plain, at: Bytes, classes: int) -> list[int]:
    base, scales = at.byte(), []
    for size in found.sizes:
        top = at.byte() if size > 1 else 0
        scales.append(_coded_numbers(at, size, top + 1, (top + 1) // 2) if top else [0] * size)
    rho, kappa, lamda = scales
    sums = [r + k + x - base for r in rho for k in kappa for x in lamda]
    return [min(classes - 1, max(0, total)) for total in sums[: found.count]]


@lru_cache(maxsize=4096)
def plain_cosine(n: int, k: int, m: int) -> Decimal:
    """D(k, m) to some forty digits, by the series of the cosine."""
    with localcontext() as context:
        context.prec = 60
        x = PI * ((2 * m + 1) * k % (4 * n)) / (2 * n)
        term = total = Decimal(1)
        for i in range(1, 60):
            term *= -x * x / ((2 * i - 1) * (2 * i))
            total += term
        return total * (Decimal(2 if k else 1) / n).sqrt()


def _transformed_back(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    y = x.reshape(shape)
    for axis in range(2, len(shape)):
        n = shape[axis]
        before, y = np.moveaxis(y, axis, -1), np.zeros_like(y)
        for m in range(n):
            total = np.float32(plain_cosine(n, 0, m)) * before[..., 0]
            for k in range(1, n):
                total = total + np.float32(plain_cosine(n, k, m)) * before[..., k]
            np.moveaxis(y, axis, -1)[..., m] = total
    return y.reshape(-1)
