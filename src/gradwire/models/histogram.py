"""Counts to frequencies, and the plain histogram model: the frequencies travel themselves."""

from __future__ import annotations

import numpy as np

from gradwire.errors import FrameError


def normalize(counts: np.ndarray, precision: int) -> np.ndarray:
    """Integer frequencies that add up to 2^precision, at least 1 where a count is not 0 (docs/wire-format.md)."""
    counts = np.asarray(counts, dtype=np.int64)
    target, total = 1 << precision, int(counts.sum())
    scaled = counts << precision
    floor = scaled // total
    frequencies = np.where(counts > 0, np.maximum(floor, 1), 0)
    missing = target - int(frequencies.sum())
    if missing > 0:
        remainder = np.where(floor > 0, scaled % total, -1)
        frequencies[np.argsort(-remainder, kind="stable")[:missing]] += 1
    for _ in range(-missing):
        frequencies[np.argmax(frequencies)] -= 1
    return frequencies


_LARGEST = 1 << 14  # frequencies go up to this
with np.errstate(divide="ignore"):
    _LOG2 = np.log2(np.arange(_LARGEST + 1))
_GAMMA_BITS = np.array([2 * (f + 1).bit_length() - 1 for f in range(_LARGEST + 1)])


def bits_per_symbol(frequencies: np.ndarray, precision: int) -> np.ndarray:
    """Ideal code length of each symbol; infinite where the frequency is 0."""
    return precision - _LOG2[frequencies]


def packed_length(frequencies: np.ndarray, implied: int) -> int:
    """Bytes that `pack` will take."""
    bits = _GAMMA_BITS[frequencies]
    return (int(bits.sum() - bits[implied]) + 7) // 8


def pack(frequencies: np.ndarray, implied: int) -> bytes:
    """Elias-gamma codes of f+1 of all symbols but one, whose frequency follows from the sum."""
    codes = [f"{f + 1:0{2 * (f + 1).bit_length() - 1}b}" for f in np.delete(frequencies, implied).tolist()]
    bits = np.frombuffer("".join(codes).encode(), dtype=np.uint8) & 1  # "0" and "1" differ in that bit
    return np.packbits(bits, bitorder="little").tobytes()


def unpack(data: memoryview, symbols: int, precision: int, implied: int) -> tuple[np.ndarray, int]:
    """The frequencies at the front of `data`, and how many bytes they took."""
    # No table is longer: each code has at most 2·precision + 1 bits.
    limit = ((symbols - 1) * (2 * precision + 1) + 7) // 8
    bits = np.unpackbits(np.frombuffer(data[:limit], dtype=np.uint8), bitorder="little").tolist()
    frequencies, position = [], 0
    for _ in range(symbols - 1):
        zeros = 0
        while position + zeros < len(bits) and not bits[position + zeros]:
            zeros += 1
        end = position + 2 * zeros + 1
        if zeros > precision or end > len(bits):
            raise FrameError("damaged frequency table")
        value = 0
        for bit in bits[position + zeros : end]:
            value = value << 1 | bit
        frequencies.append(value - 1)
        position = end
    rest = (1 << precision) - sum(frequencies)
    if rest < 0 or any(bits[position : -(-position // 8) * 8]):
        raise FrameError("damaged frequency table")
    frequencies.insert(implied, rest)
    return np.array(frequencies, dtype=np.int64), -(-position // 8)
