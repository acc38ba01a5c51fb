"""Shared by the tests: backends, checks, and a decoder that follows docs/wire-format.md word for word.

The plain decoder shares no code with gradwire (only the shipped GenNorm tables, which are data) and checks
nothing: it is given valid frames, and says what they must decode to.
"""

from __future__ import annotations

import math
import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from importlib import resources
from types import ModuleType

import numpy as np
import torch

import gradwire
from gradwire import kernels
from gradwire.kernels import reference

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)
DTYPES = FLOATS + INTEGERS  # in the order of their numbers on the wire
SPECS = (
    "none", "fp16", "bf16", "co3", "gennorm", "co3:coder=huffman", "co3:coder=raw", "co3:model=histogram",
    "co3:format=fp8", "co3:format=e2m1", "co3:format=e4m3", "co3:format=e4m3b10", "co3:format=e3m0b2",
    "co3:format=e2m3b0f,coder=huffman", "gennorm:model=gennorm", "co3:rounding=stochastic",
    "ecq", "ecq:rate=0.4", "ecq:nmse=0.0004", "ecq:rate=3,rounding=stochastic",
)  # fmt: skip
LEVEL_SPECS = (
    "bingrad", "bingrad:form=pb,precision=fp16", "orq:levels=9,bucket=100", "signsgd",
    "qsgd:levels=33,norm=l2,bucket=70,coder=huffman", "linear:levels=2,bucket=4,precision=fp32",
)  # fmt: skip
SPECS += (*LEVEL_SPECS, "countsketch:ratio=2,rows=5,p=0.5,precision=fp16")

# ── backends ──────────────────────────────────────────────────────────────────────────────────────

NO_NATIVE = bool(os.environ.get("GRADWIRE_NO_NATIVE"))
native: ModuleType | None = None
if not NO_NATIVE:
    with suppress(ImportError):  # test_coders.test_native_module_is_here then fails
        from gradwire.kernels import cpu as native
BACKENDS = ["reference"] + (native.instruction_sets() if native else [])
KERNELS = [
    name for name, value in vars(reference).items()
    if callable(value) and getattr(value, "__module__", "").startswith(reference.__name__)
]  # fmt: skip


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Let all of gradwire run on the reference kernels, or on the native ones of an instruction set."""
    before = {kernel: getattr(kernels, kernel) for kernel in KERNELS}
    if name != "reference":
        native.use(name)
    chosen = reference if name == "reference" else native
    try:
        for kernel in KERNELS:
            setattr(kernels, kernel, getattr(chosen, kernel, getattr(reference, kernel)))
        yield
    finally:
        for kernel, function in before.items():
            setattr(kernels, kernel, function)
        if native:
            native.use(native.instruction_sets()[-1])


# ── tensors and frames ────────────────────────────────────────────────────────────────────────────


def bits(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor's elements: equal for NaNs with equal bits, different for 0 and −0."""
    flat = tensor.detach().reshape(-1).clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).numpy().tobytes() if len(flat) else b""


def check_same(a: torch.Tensor, b: torch.Tensor) -> None:
    """Same shape, dtype and bits."""
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    assert bits(a) == bits(b)


def gradient(count: int, seed: int = 0, beta: float = 0.8, scale: float = 1e-3) -> torch.Tensor:
    """GenNorm samples, of the kind that gradients are."""
    rng = np.random.default_rng(seed)
    magnitude = scale * rng.gamma(1 / beta, size=count) ** (1 / beta)
    return torch.from_numpy((magnitude * rng.choice([-1, 1], size=count)).astype(np.float32))


def encode_into(codec: gradwire.Codec, tensor: torch.Tensor, **options: object) -> bytes:
    room = codec.max_frame_bytes(tensor) + 12 * len(options.get("segments", ()))
    out = torch.full((room,), 0xA5, dtype=torch.uint8)
    return bytes(out[: codec.encode_into(tensor, out, **options)].tolist())


def repair(frame: bytes) -> bytes:
    """The frame with a right checksum."""
    return frame[:5] + struct.pack("<I", zlib.crc32(frame[:5] + frame[9:])) + frame[9:]


def assemble(
    payload: bytes, shape: tuple[int, ...], codec: int, dtype: torch.dtype = torch.float32, flags: int = 0
) -> bytes:
    """A frame with any payload."""
    head = struct.pack("<2sBBBI", b"GW", 1, codec | flags << 4, DTYPES.index(dtype) | len(shape) << 4, 0)
    return repair(head + plain_varint(len(payload)) + b"".join(map(plain_varint, shape)) + payload)


def check_contract_3(
    sent: torch.Tensor, after: torch.Tensor, grad: torch.Tensor, before: torch.Tensor, decay: float
) -> torch.Tensor:
    """ĝ + e′ = g + γe to fp32 rounding: of γe, of the sum and of the difference. Returns the bound."""
    decay = float(np.float32(decay))
    scaled = decay * before.double()
    u = grad.double() + scaled
    bound = 2.0**-24 * (scaled.abs() + u.abs() + after.double().abs()) + 3 * 2.0**-150
    gap = (sent.double() + after.double() - u).abs()
    assert bool((gap <= bound * 1.0001).all()), f"lost {float((gap - bound).max())}"
    return bound


# ── docs/wire-format.md, word for word ────────────────────────────────────────────────────────────

FORMAT_NAMES = ["fp4", "fp8", "e2m1", "e4m3", "e5m2", "e4m3b10"]
FORMATS = [  # sign, exponent and mantissa bits, bias, special
    (1, 2, 1, 1, 1), (1, 5, 2, 15, 1), (1, 2, 1, 1, 0), (1, 4, 3, 7, 2), (1, 5, 2, 15, 1), (1, 4, 3, 10, 1)
]  # fmt: skip


@dataclass
class Plain:
    """What a frame says, field by field."""

    codec: int
    dtype: torch.dtype
    flags: int
    shape: tuple[int, ...]
    header_bytes: int
    payload: bytes
    levels: np.ndarray = field(default_factory=lambda: np.zeros(0))
    segments: list[tuple[int, float]] = field(default_factory=list)
    buckets: list[tuple[int, list[float]]] = field(default_factory=list)  # entries and levels of each
    coder: int = 0
    model: int = 0
    precision: int = 0
    frequencies: list[int] = field(default_factory=list)
    lanes: int = 0
    chunks: int = 0
    symbols: list[int] = field(default_factory=list)
    tensor: torch.Tensor = field(default_factory=lambda: torch.empty(0))


class _Bytes:
    def __init__(self, data: bytes):
        self.data, self.at = data, 0

    def take(self, n: int) -> bytes:
        self.at += n
        assert self.at <= len(self.data)
        return self.data[self.at - n : self.at]

    def rest(self) -> bytes:
        return self.take(len(self.data) - self.at)

    def byte(self) -> int:
        return self.take(1)[0]

    def bfloat16(self) -> float:
        return struct.unpack("<f", b"\0\0" + self.take(2))[0]

    def varint(self) -> int:
        value = shift = 0
        while True:
            byte = self.byte()
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value


def plain_varint(value: int) -> bytes:
    groups = [value >> shift & 127 for shift in range(0, max(1, value.bit_length()), 7)]
    return bytes([g | 128 for g in groups[:-1]] + groups[-1:])


def plain_decode(frame: bytes) -> Plain:
    """Everything in a valid frame, the tensor last."""
    magic, version, kind, tensor, checksum = struct.unpack_from("<2sBBBI", frame)
    assert (magic, version, kind >> 6) == (b"GW", 1, 0)
    assert checksum == zlib.crc32(frame[:5] + frame[9:])
    at = _Bytes(frame)
    at.take(9)
    length = at.varint()
    shape = tuple(at.varint() for _ in range(tensor >> 4))
    found = Plain(kind & 15, DTYPES[tensor & 15], kind >> 4, shape, at.at, frame[at.at :])
    assert len(found.payload) == length
    if found.codec == 0:
        found.tensor = _elements(found.payload, found.dtype, shape)
    elif found.codec == 1:
        _plain_minifloat(found)
    elif found.codec == 4:
        _plain_levels(found)
    elif found.codec == 6:
        _plain_sketch(found)
    elif found.codec == 3:
        _plain_grid(found)
    else:
        sent = _elements(found.payload[1:], DTYPES[found.payload[0]], shape)
        limit = torch.finfo(found.dtype).max
        found.tensor = sent.double().clamp(-limit, limit).to(found.dtype)
    return found


def _elements(raw: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    flat = torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    return flat.reshape(shape)


def plain_magnitudes(sign: int, exponent: int, mantissa: int, bias: int, special: int) -> list[float]:
    """The value of every code from 0 upwards: (1 + m/2^M)·2^(e−bias), and m/2^M·2^(1−bias) for e = 0."""
    codes = range((2**exponent - (special == 1)) * 2**mantissa - (special == 2))
    fractions = [Fraction(c % 2**mantissa, 2**mantissa) for c in codes]
    exponents = [c >> mantissa for c in codes]
    return [
        float((1 + m) * Fraction(2) ** (e - bias) if e else m * Fraction(2) ** (1 - bias))
        for e, m in zip(exponents, fractions, strict=True)
    ]


def _plain_minifloat(found: Plain) -> None:
    at, count = _Bytes(found.payload), math.prod(found.shape)
    number = at.byte()
    if number == 255:
        kind, exponent, mantissa, bias = struct.unpack("<BBBb", at.take(4))
        fmt = (kind & 1, exponent, mantissa, bias, kind >> 1)
    else:
        fmt = FORMATS[number]
    m = plain_magnitudes(*fmt)
    found.levels = np.array([-x for x in m[:0:-1]] + m if fmt[0] else m)
    if found.flags & 2:
        found.segments = [(at.varint(), at.bfloat16()) for _ in range(at.varint())]
    else:
        found.segments = [(count, at.bfloat16())]
    _plain_head(found, at, number, found.levels.tolist().index(0))
    found.symbols = _plain_symbols(found, at, count)
    values, position = [], 0
    for length, step in found.segments:
        part = found.symbols[position : position + length]
        values += [plain_value(found.levels[s], step, found.dtype) for s in part]
        position += length
    found.tensor = torch.stack(values).reshape(found.shape)


def _plain_head(found: Plain, at: _Bytes, number: int, zero: int) -> None:
    """How the symbols are coded; `zero` is the symbol whose frequency is not sent."""
    head = at.byte()
    found.coder, found.model, found.precision = head & 3, head >> 2 & 3, head >> 4
    if found.model == 1:
        index, zero_mass = at.byte(), at.byte()
        found.frequencies = plain_normalize(_gennorm_counts(number, index, zero_mass), found.precision)
    elif found.model == 2:
        others = _gammas(at, len(found.levels) - 1)
        found.frequencies = [*others[:zero], 2**found.precision - sum(others), *others[zero:]]


def _plain_levels(found: Plain) -> None:
    at, count = _Bytes(found.payload), math.prod(found.shape)
    bucket, s, table = at.varint(), at.byte(), at.byte()
    kind, dtype = table & 3, DTYPES[table >> 2]  # fp32, fp16, bf16 have the same numbers there and here
    segments = [at.varint() for _ in range(at.varint())] if found.flags & 2 else [count]
    sizes = [min(bucket or n, n - start) for n in segments for start in range(0, n, bucket or n)]
    rows = []
    for n in sizes:
        many = {0: min(s, max(2, n)), 1: 2, 2: 1}[kind]
        numbers = _elements(at.take(many * dtype.itemsize), dtype, (many,)).double().tolist()
        if kind:
            low, high = numbers if kind == 1 else (-numbers[0], numbers[0])
            numbers = [float(np.float32((low * (s - 1 - k) + high * k) / (s - 1))) for k in range(s)]
        rows.append([plain_value(x, 1.0, found.dtype) for x in numbers + numbers[-1:] * (s - len(numbers))])
    found.buckets = [(n, [float(x) for x in row]) for row, n in zip(rows, sizes, strict=True)]
    found.levels = np.arange(s)
    _plain_head(found, at, -1, s // 2)
    found.symbols = _plain_symbols(found, at, count)
    of_bucket = [row for row, n in zip(rows, sizes, strict=True) for _ in range(n)]
    values = [row[symbol] for row, symbol in zip(of_bucket, found.symbols, strict=True)]
    found.tensor = torch.stack(values).reshape(found.shape)


def _plain_sketch(found: Plain) -> None:
    at, count = _Bytes(found.payload), math.prod(found.shape)
    table, columns, kept = at.byte(), at.varint(), at.varint()
    scale, seed = struct.unpack("<fQ", at.take(12))
    rows, dtype = table & 15, DTYPES[table >> 4]
    cells = _elements(at.rest(), dtype, (rows, columns)).float()
    estimates = []
    for i in range(count):
        of_rows = []
        for row in range(rows):
            h = plain_random(i, (seed + row) % 2**64)
            of_rows.append((-1 if h & 1 else 1) * float(cells[row, (h >> 1) * columns // 2**23]))
        estimates.append(sorted(of_rows)[rows // 2])
    order = sorted(range(count), key=lambda i: (-abs(estimates[i]), i))[:kept]
    values = [torch.zeros((), dtype=found.dtype)] * count
    for i in order:
        values[i] = plain_value(estimates[i], scale, found.dtype) + 0
    found.tensor = torch.stack(values).reshape(found.shape)


def _plain_grid(found: Plain) -> None:
    at, count = _Bytes(found.payload), math.prod(found.shape)
    largest, number = at.byte(), at.byte()
    offsets = struct.unpack(f"<{number}b", at.take(number))
    found.levels = np.arange(-largest, largest + 1)
    if found.flags & 2:
        found.segments = [(at.varint(), at.bfloat16()) for _ in range(at.varint())]
    else:
        found.segments = [(count, at.bfloat16())]
    length = at.varint()
    apart = at.data[len(at.data) - length :]
    at.data = at.data[: len(at.data) - length]
    head = at.byte()
    found.coder, found.model, found.precision = head & 3, head >> 2 & 3, head >> 4
    if found.model == 2:
        others = _gammas(at, 2 * largest)
        found.frequencies = [*others[:largest], 2**found.precision - sum(others), *others[largest:]]
    found.symbols = _plain_symbols(found, at, count)
    multiples = [s - largest for s in found.symbols]
    for index, multiple in _plain_outliers(apart, largest):
        assert multiples[index] == 0
        multiples[index] = multiple
    steps = [step for length, step in found.segments for _ in range(length)]
    values = []
    for m, step in zip(multiples, steps, strict=True):
        d = offsets[min(abs(m), number) - 1] / 256 if number and m else 0
        level = float(np.float32(abs(m) + d))
        values.append(plain_value(-level if m < 0 else level, step, found.dtype))
    found.tensor = torch.stack(values).reshape(found.shape)


def _plain_outliers(data: bytes, largest: int) -> list[tuple[int, int]]:
    if not data:
        return []
    at = _Bytes(data)
    count, a, b = at.varint(), at.byte(), at.byte()
    string, place, index, found = "".join(f"{byte:08b}"[::-1] for byte in at.rest()), 0, -1, []

    def unary() -> int:
        nonlocal place
        start, place = place, string.index("1", place) + 1
        return place - 1 - start

    def number(width: int) -> int:
        nonlocal place
        place += width
        return int("0" + string[place - width : place][::-1], 2)

    for _ in range(count):
        index += 1 + unary() * 2**a + number(a)
        negative = number(1)
        size = unary()
        x = (2**size + number(size) - 1) * 2**b + number(b)
        found.append((index, -(largest + 1 + x) if negative else largest + 1 + x))
    assert "1" not in string[place:] and len(string) - place < 8
    return found


@lru_cache(maxsize=4096)
def plain_value(level: float, step: float, dtype: torch.dtype) -> torch.Tensor:
    with np.errstate(over="ignore", under="ignore"):
        product = float(np.float32(np.float32(level) * np.float32(step)))
    limit = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    return torch.tensor(min(max(product, -limit), limit), dtype=dtype)


def _plain_symbols(found: Plain, at: _Bytes, count: int) -> list[int]:
    if found.coder == 1:
        return [at.byte()] * count
    if found.coder == 0:
        width = (len(found.levels) - 1).bit_length()
        number = int.from_bytes(at.rest(), "little")
        return [number >> width * i & (1 << width) - 1 for i in range(count)]
    if found.coder == 2:
        return plain_huffman_decode(at.rest(), count, found.frequencies)
    byte = at.byte()
    found.lanes, found.chunks = 1 << (byte & 127), at.varint() if byte & 128 else 1
    lengths = list(struct.unpack(f"<{found.chunks - 1}I", at.take(4 * (found.chunks - 1))))
    body = at.rest()
    lengths.append(len(body) - sum(lengths))
    size = math.ceil(math.ceil(count / found.chunks) / 64) * 64
    symbols, position = [], 0
    for i, length in enumerate(lengths):
        entries = min(size, count - i * size)
        chunk = body[position : position + length]
        symbols += plain_rans_decode(chunk, entries, found.frequencies, found.precision, found.lanes)
        position += length
    return symbols


@lru_cache
def _tables() -> dict[str, np.ndarray]:
    path = resources.files("gradwire.models").joinpath("gennorm_tables.npz")
    with path.open("rb") as file, np.load(file) as tables:
        return {name: tables[name] for name in tables.files}


def _gennorm_counts(number: int, index: int, zero_mass: int) -> list[int]:
    name = "fp8" if FORMAT_NAMES[number] == "e5m2" else FORMAT_NAMES[number]
    w = [int(x) * (256 - zero_mass) for x in _tables()[f"{name}_masses"][index]]
    return [*w[:0:-1], w[0] + zero_mass * 2**16, *w[1:]]


def plain_normalize(counts: list[int], precision: int) -> list[int]:
    total, target = sum(counts), 2**precision
    f = [0 if c == 0 else max(1, c * target // total) for c in counts]
    while sum(f) < target:  # the largest remainder that has not had its turn, the first of equals
        open_ = [i for i, c in enumerate(counts) if c * target // total >= 1 and f[i] == c * target // total]
        f[max(open_, key=lambda i: (counts[i] * target % total, -i))] += 1
    while sum(f) > target:
        f[f.index(max(f))] -= 1
    return f


def _gammas(at: _Bytes, count: int) -> list[int]:
    string = "".join(f"{byte:08b}"[::-1] for byte in at.data[at.at :])
    found, position = [], 0
    for _ in range(count):
        zeros = string.index("1", position) - position
        found.append(int(string[position + zeros : position + 2 * zeros + 1], 2) - 1)
        position += 2 * zeros + 1
    at.take(-(-position // 8))
    return found


def plain_code_lengths(frequencies: list[int], limit: int = 15) -> list[int]:
    """Package-merge; among equal weights leaves come before packages, and lower symbols first."""
    leaves = sorted((f, [s]) for s, f in enumerate(frequencies) if f)
    row = list(leaves)
    for _ in range(limit - 1):
        packages = [(row[i][0] + row[i + 1][0], row[i][1] + row[i + 1][1]) for i in range(0, len(row) - 1, 2)]
        row = sorted(leaves + packages, key=lambda item: item[0])
    lengths = [0] * len(frequencies)
    for _, members in row[: 2 * len(leaves) - 2]:
        for s in members:
            lengths[s] += 1
    return lengths


def plain_huffman_decode(data: bytes, count: int, frequencies: list[int]) -> list[int]:
    lengths = plain_code_lengths(frequencies)
    table, code, previous = {}, 0, 0
    for length, symbol in sorted((n, s) for s, n in enumerate(lengths) if n):
        code <<= length - previous
        table[f"{code:0{length}b}"] = symbol
        code, previous = code + 1, length
    string, found, word = iter("".join(f"{byte:08b}" for byte in data)), [], ""
    while len(found) < count:
        word += next(string)
        if word in table:
            found.append(table[word])
            word = ""
    return found


def plain_gammas(frequencies: list[int]) -> bytes:
    """Elias-gamma codes of f+1."""
    codes = [f"{f + 1:b}" for f in frequencies]
    string = "".join("0" * (len(code) - 1) + code for code in codes)
    return bytes(int(string[i : i + 8][::-1], 2) for i in range(0, len(string), 8))


def plain_rans_encode(symbols: list[int], f: list[int], k: int, lanes: int) -> bytes:
    """One chunk."""
    c = [sum(f[:s]) for s in range(len(f))]
    x, emitted = [2**14] * lanes, []
    for row in range(0, len(symbols), lanes):
        s = symbols[row : row + lanes]
        for _ in (1, 2):
            for lane in range(len(s)):
                if x[lane] >= f[s[lane]] * 2 ** (22 - k):
                    emitted.append(x[lane] & 255)
                    x[lane] >>= 8
        for lane in range(len(s)):
            x[lane] = x[lane] // f[s[lane]] * 2**k + x[lane] % f[s[lane]] + c[s[lane]]
    return b"".join(state.to_bytes(3, "little") for state in x) + bytes(emitted)


def plain_rans_decode(data: bytes, count: int, f: list[int], k: int, lanes: int) -> list[int]:
    """One chunk, backwards."""
    c = [sum(f[:s]) for s in range(len(f))]
    of_slot = [s for s in range(len(f)) for _ in range(f[s])]
    x = [int.from_bytes(data[3 * lane : 3 * lane + 3], "little") for lane in range(lanes)]
    stack, symbols = list(data[3 * lanes :]), [0] * count
    for row in range((count - 1) // lanes * lanes, -1, -lanes):
        width = min(lanes, count - row)
        for lane in range(width):
            slot = x[lane] % 2**k
            s = symbols[row + lane] = of_slot[slot]
            x[lane] = f[s] * (x[lane] >> k) + slot - c[s]
        for threshold in (2**6, 2**14):
            for lane in reversed(range(width)):
                if x[lane] < threshold:
                    x[lane] = 256 * x[lane] + stack.pop()
    assert x == [2**14] * lanes and not stack
    return symbols


def plain_random(index: int, seed: int) -> int:
    """24 random bits for an entry."""

    def mix(x: int) -> int:
        x = (x ^ x >> 16) * 0x21F0AAAD & 0xFFFFFFFF
        x = (x ^ x >> 15) * 0x735A2D97 & 0xFFFFFFFF
        return x ^ x >> 15

    k1 = mix(seed & 0xFFFFFFFF ^ 0x9E3779B9 ^ mix(index >> 32))
    k2 = mix(k1 ^ seed >> 32 & 0xFFFFFFFF)
    return mix(mix(index & 0xFFFFFFFF ^ k1) + k2 & 0xFFFFFFFF) >> 8
