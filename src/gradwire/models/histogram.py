"""Counts to frequencies, and the plain histogram model: the frequencies travel themselves."""

from __future__ import annotations

import numpy as np

from ..errors import FrameError


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


def bits_per_symbol(frequencies: np.ndarray, precision: int) -> np.ndarray:
    """Ideal code length of each symbol; infinite where the frequency is 0."""
    with np.errstate(divide="ignore"):
        return precision - np.log2(frequencies)


def pack(frequencies: np.ndarray) -> bytes:
    """Elias-gamma codes of f+1, packed from the lowest bit upwards."""
    bits: list[int] = []
    for f in frequencies:
        value = int(f) + 1
        width = value.bit_length()
        bits += [0] * (width - 1) + [value >> i & 1 for i in range(width - 1, -1, -1)]
    return np.packbits(np.array(bits, dtype=np.uint8), bitorder="little").tobytes()


def unpack(data: memoryview, symbols: int, precision: int) -> tuple[np.ndarray, int]:
    """The frequencies at the front of `data`, and how many bytes they took."""
    # No table is longer: each code has at most 2·precision + 1 bits.
    limit = (symbols * (2 * precision + 1) + 7) // 8
    bits = np.unpackbits(np.frombuffer(data[:limit], dtype=np.uint8), bitorder="little").tolist()
    frequencies, position = [], 0
    for _ in range(symbols):
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
    if sum(frequencies) != 1 << precision or any(bits[position : -(-position // 8) * 8]):
        raise FrameError("damaged frequency table")
    return np.array(frequencies, dtype=np.int64), -(-position // 8)
