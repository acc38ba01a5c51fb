"""Codes of ascending positions (docs/wire-format.md): Golomb–Rice, and classes of gaps with their low bits.

Positions and gaps are int64 arrays of numpy in the host's memory, wherever the tensor is that they point into.
"""

from __future__ import annotations

import numpy as np

from gradwire.errors import FrameError

__all__ = [
    "class_positions", "gap_classes", "gap_counts", "golomb_bits", "golomb_encode", "golomb_positions", "split_gaps",
]  # fmt: skip

WINDOW = 4096  # bytes that are searched at a time for the next bit that is set


def split_gaps(positions: np.ndarray) -> np.ndarray:
    """Return what lies between ascending positions: the first, then each less the one before less 1."""
    return np.diff(positions, prepend=-1) - 1


def golomb_bits(gaps: np.ndarray, b: int) -> int:
    """Return how many bits these gaps take in the Golomb–Rice code with parameter b."""
    return len(gaps) * (b + 1) + int((gaps >> b).sum())


def golomb_encode(gaps: np.ndarray, b: int) -> bytes:
    """Encode gaps: ⌊gap/2ᵇ⌋ zeros, a one, then the b low bits; from the lowest bit of each byte upwards."""
    quotients = gaps >> b
    ends = np.cumsum(quotients + 1 + b)
    bits = np.zeros(int(ends[-1]) if len(gaps) else 0, dtype=np.uint8)
    bits[ends - b - 1] = 1
    for i in range(b):
        bits[ends - b + i] = gaps >> i & 1
    return np.packbits(bits, bitorder="little").tobytes()


def golomb_positions(data: memoryview, at: int, count: int, b: int, limit: int, before: int) -> tuple[np.ndarray, int]:
    """Return the next `count` positions from bit `at` on, all below `limit`, and the bit behind them.

    `before` is the position before the first of them, or −1. Positions are read in parts so that memory for all of them
    is not needed at once.
    """
    positions = np.empty(count, dtype=np.int64)
    for i in range(count):
        one = _next_one(data, at)
        if one + 1 + b > 8 * len(data):
            raise FrameError("coded positions are cut short")
        before += 1 + (one - at << b) + _number(data, one + 1, b)
        if before >= limit:
            raise FrameError("a position in the frame is beyond its tensor")
        positions[i] = before
        at = one + 1 + b
    return positions, at


def _next_one(data: memoryview, at: int) -> int:
    """Return the first bit from `at` on that is set, or the number of all bits."""
    byte = at >> 3
    if byte < len(data) and data[byte] >> (at & 7):
        rest = data[byte] >> (at & 7)
        return at + (rest & -rest).bit_length() - 1
    for start in range(byte + 1, len(data), WINDOW):
        found = np.flatnonzero(np.frombuffer(data[start : start + WINDOW], dtype=np.uint8))
        if len(found):
            byte = start + int(found[0])
            return 8 * byte + (data[byte] & -data[byte]).bit_length() - 1
    return 8 * len(data)


def _number(data: memoryview, at: int, size: int) -> int:
    """Return `size` bits from `at` on, the lowest first."""
    window = int.from_bytes(data[at >> 3 : (at + size + 7) >> 3], "little")
    return window >> (at & 7) & (1 << size) - 1


def _class_of(gaps: np.ndarray, m: int) -> tuple[np.ndarray, np.ndarray]:
    """Class and number of low bits of each gap: below 2ᵐ a class of its own, above 2ᵐ classes an octave."""
    octave = np.frexp(gaps.astype(np.float64))[1].astype(np.int64) - 1  # ⌊log2⌋; exact below 2⁵³
    low_bits = np.maximum(octave - m, 0)
    classes = np.where(gaps < 1 << m, gaps, (octave - m << m) + (gaps >> low_bits))
    return classes, low_bits


def gap_classes(gaps: np.ndarray, m: int) -> tuple[np.ndarray, bytes]:
    """Return the class of each gap, and the low bits of all gaps, which the classes leave open, one after the other."""
    classes, low_bits = _class_of(gaps, m)
    ends = np.cumsum(low_bits)
    bits = np.zeros(int(ends[-1]) if len(gaps) else 0, dtype=np.uint8)
    for i in range(int(low_bits.max(initial=0))):
        has = low_bits > i
        bits[(ends - low_bits)[has] + i] = gaps[has] >> i & 1
    return classes.astype(np.uint8), np.packbits(bits, bitorder="little").tobytes()


def gap_counts(gaps: np.ndarray, m: int) -> np.ndarray:
    """Return how many gaps each of 256 classes has."""
    return np.bincount(_class_of(gaps, m)[0], minlength=256)


def class_positions(
    classes: np.ndarray, m: int, data: memoryview, at: int, limit: int, before: int
) -> tuple[np.ndarray, int]:
    """Return the positions behind `before` with gaps of these classes, whose low bits stand from bit `at` on.

    The second result is the bit behind them. All positions have to be below the limit.
    """
    classes = classes.astype(np.int64)
    low_bits = np.maximum((classes >> m) - 1, 0)
    ends = np.cumsum(low_bits)
    total = int(ends[-1]) if len(classes) else 0
    if at + total > 8 * len(data):
        raise FrameError("coded positions are cut short")
    gaps = np.where(classes < 1 << m, classes, (classes & (1 << m) - 1) + (1 << m)) << low_bits
    window = np.frombuffer(data[at >> 3 : (at + total + 7) >> 3], dtype=np.uint8)
    bits = np.unpackbits(window, bitorder="little")[at & 7 :]
    for i in range(int(low_bits.max(initial=0))):
        has = low_bits > i
        gaps[has] |= bits[(ends - low_bits)[has] + i].astype(np.int64) << i
    # No gap reaches the limit, so the first position beyond it is seen before any sum could overflow.
    if len(gaps) and int(gaps.max()) >= limit:
        raise FrameError("a position in the frame is beyond its tensor")
    positions = np.cumsum(gaps + 1) + before
    if len(gaps) and bool(((positions < 0) | (positions >= limit)).any()):
        raise FrameError("a position in the frame is beyond its tensor")
    return positions, at + total
