"""The coders and models of docs/wire-format.md ("How symbols are coded", "The rANS coder"), to the letter and slowly.

Shares no code with gradwire (only the shipped GenNorm tables, which are data), and checks next to nothing.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import resources

import numpy as np

FORMAT_NAMES = ["fp4", "fp8", "e2m1", "e4m3", "e5m2", "e4m3b10"]


class Bytes:
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

    def bits(self) -> Bits:
        """Of all that is left, from the lowest of each byte upwards."""
        return Bits("".join(f"{byte:08b}"[::-1] for byte in self.data[self.at :]), self)

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


class Bits:
    """Bit codes at the front of what a `Bytes` has left."""

    def __init__(self, string: str, of: Bytes):
        self.string, self.of, self.at = string, of, 0

    def zeros(self) -> int:
        """How many stand before the next one; both are taken."""
        start, self.at = self.at, self.string.index("1", self.at) + 1
        return self.at - 1 - start

    def number(self, width: int) -> int:
        """Lowest bit first."""
        self.at += width
        assert self.at <= len(self.string)
        return int(self.string[self.at - width : self.at][::-1] or "0", 2)

    def pad(self) -> None:
        """The rest of the last byte is zeros; what follows belongs to `of` again."""
        used = -(-self.at // 8)
        assert "1" not in self.string[self.at : 8 * used]
        self.of.take(used)


def plain_varint(value: int) -> bytes:
    groups = [value >> shift & 127 for shift in range(0, max(1, value.bit_length()), 7)]
    return bytes([g | 128 for g in groups[:-1]] + groups[-1:])


@dataclass
class Coded:
    """Symbols, and how they are coded."""

    coder: int = 0
    model: int = 0
    precision: int = 0
    frequencies: list[int] = field(default_factory=list)
    lanes: int = 0
    chunks: int = 0
    symbols: list[int] = field(default_factory=list)


def read_symbols(found: Coded, at: Bytes, count: int, alphabet: int, zero: int, number: int = -1) -> None:
    """All that is left; `zero` is the symbol whose frequency is not sent, `number` that of the float format."""
    head = at.byte()
    found.coder, found.model, found.precision = head & 3, head >> 2 & 3, head >> 4
    if found.model == 1:
        index, zero_mass = at.byte(), at.byte()
        found.frequencies = plain_normalize(_gennorm_counts(number, index, zero_mass), found.precision)
    elif found.model == 2:
        others = _gammas(at, alphabet - 1)
        found.frequencies = [*others[:zero], 2**found.precision - sum(others), *others[zero:]]
    if found.coder == 0:
        width = max(1, (alphabet - 1).bit_length())
        packed = int.from_bytes(at.rest(), "little")
        found.symbols = [packed >> width * i & (1 << width) - 1 for i in range(count)]
    elif found.coder == 1:
        found.symbols = [at.byte()] * count
    elif found.coder == 2:
        found.symbols = plain_huffman_decode(at.rest(), count, found.frequencies)
    else:
        _read_rans(found, at, count)
    assert at.at == len(at.data)


def _read_rans(found: Coded, at: Bytes, count: int) -> None:
    byte = at.byte()
    found.lanes, found.chunks = 1 << (byte & 127), at.varint() if byte & 128 else 1
    lengths = list(struct.unpack(f"<{found.chunks - 1}I", at.take(4 * (found.chunks - 1))))
    body = at.rest()
    lengths.append(len(body) - sum(lengths))
    size = math.ceil(math.ceil(count / found.chunks) / 64) * 64
    found.symbols, position = [], 0
    for i, length in enumerate(lengths):
        entries = min(size, count - i * size)
        chunk = body[position : position + length]
        found.symbols += plain_rans_decode(chunk, entries, found.frequencies, found.precision, found.lanes)
        position += length


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


def _gammas(at: Bytes, count: int) -> list[int]:
    bits, found = at.bits(), []
    for _ in range(count):
        value = 1
        for _ in range(bits.zeros()):
            value = 2 * value + bits.number(1)  # highest first
        found.append(value - 1)
    bits.pad()
    return found


def plain_gammas(frequencies: list[int]) -> bytes:
    """Elias-gamma codes of f+1."""
    codes = [f"{f + 1:b}" for f in frequencies]
    string = "".join("0" * (len(code) - 1) + code for code in codes)
    return bytes(int(string[i : i + 8][::-1], 2) for i in range(0, len(string), 8))


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
