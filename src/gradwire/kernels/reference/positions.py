"""Codes of ascending positions (docs/wire-format.md): Golomb–Rice, and classes of gaps with their low bits.

Positions and gaps are int64 arrays of numpy in the host's memory, wherever the tensor is that they point into.
"""

from __future__ import annotations

import numpy as np

from gradwire.errors import FrameError

__all__ = [
    "gap_classes", "gap_counts", "gap_tails", "golomb_bits", "golomb_decode", "golomb_encode", "join_gaps",
    "split_gaps",
]  # fmt: skip


def split_gaps(positions: np.ndarray) -> np.ndarray:
    """Return what lies between ascending positions: the first, then each less the one before less 1."""
    return np.diff(positions, prepend=-1) - 1


def join_gaps(gaps: np.ndarray, limit: int) -> np.ndarray:
    """Do the opposite of `split_gaps`; all positions have to be below the limit."""
    # No gap reaches the limit, so the first position beyond it is seen before any sum could overflow.
    if len(gaps) and int(gaps.max()) >= limit:
        raise FrameError("a position in the frame is beyond its tensor")
    positions = np.cumsum(gaps + 1) - 1
    if len(gaps) and bool(((positions < 0) | (positions >= limit)).any()):
        raise FrameError("a position in the frame is beyond its tensor")
    return positions


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


def golomb_decode(data: memoryview, count: int, b: int, limit: int) -> tuple[np.ndarray, int]:
    """Return `count` positions below `limit`, and how many bytes they took; the last byte is padded with zeros."""
    bits = np.unpackbits(np.frombuffer(data, dtype=np.uint8), bitorder="little")
    text = bits.tobytes()
    positions, position, at = np.empty(count, dtype=np.int64), -1, 0
    for i in range(count):
        one = text.find(1, at)
        if one < 0 or one + 1 + b > len(text):
            raise FrameError("coded positions are cut short")
        low = sum(text[one + 1 + j] << j for j in range(b))
        position += 1 + (one - at << b) + low
        if position >= limit:
            raise FrameError("a position in the frame is beyond its tensor")
        positions[i] = position
        at = one + 1 + b
    used = -(-at // 8)
    if any(text[at : 8 * used]):
        raise FrameError("damaged padding of positions")
    return positions, used


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


def gap_tails(classes: np.ndarray, m: int, data: memoryview) -> np.ndarray:
    """Return the gaps of these classes and low bits; the opposite of `gap_classes`."""
    classes = classes.astype(np.int64)
    low_bits = np.maximum((classes >> m) - 1, 0)
    high = np.where(classes < 1 << m, classes, (classes & (1 << m) - 1) + (1 << m))
    gaps: np.ndarray = high << low_bits
    ends = np.cumsum(low_bits)
    total = int(ends[-1]) if len(classes) else 0
    if len(data) != -(-total // 8):
        raise FrameError("wrong length of the low bits of positions")
    bits = np.unpackbits(np.frombuffer(data, dtype=np.uint8), bitorder="little").astype(np.int64)
    if bits[total:].any():
        raise FrameError("damaged padding of positions")
    for i in range(int(low_bits.max(initial=0))):
        has = low_bits > i
        gaps[has] |= bits[(ends - low_bits)[has] + i] << i
    return gaps
