"""Codes of ascending positions, by the native module."""

from __future__ import annotations

import numpy as np

from gradwire import _native
from gradwire.errors import FrameError
from gradwire.kernels.cpu.native_arguments import as_bytes

__all__ = [
    "gap_classes", "gap_counts", "gap_tails", "golomb_bits", "golomb_decode", "golomb_encode", "join_gaps",
    "split_gaps",
]  # fmt: skip


def split_gaps(positions: np.ndarray) -> np.ndarray:
    """Return the gaps between ascending positions."""
    return _native.split_gaps(positions)


def join_gaps(gaps: np.ndarray, limit: int) -> np.ndarray:
    """Return the positions of these gaps, all below the limit."""
    positions = np.empty_like(gaps)
    if not _native.join_gaps(gaps, limit, positions):
        raise FrameError("a position in the frame is beyond its tensor")
    return positions


def golomb_bits(gaps: np.ndarray, b: int) -> int:
    """Return how many bits these gaps take."""
    return len(gaps) * (b + 1) + _native.golomb_quotients(gaps, b)


def golomb_encode(gaps: np.ndarray, b: int) -> bytes:
    """Encode gaps."""
    out = np.empty(golomb_bits(gaps, b) // 8 + 9, dtype=np.uint8)
    return out[: _native.golomb_encode(gaps, b, out)].tobytes()


def golomb_decode(data: memoryview, count: int, b: int, limit: int) -> tuple[np.ndarray, int]:
    """Decode `count` positions, and say how many bytes they took."""
    if count * (b + 1) > 8 * len(data):
        raise FrameError("coded positions are cut short")
    positions = np.empty(count, dtype=np.int64)
    used = _native.golomb_decode(as_bytes(data), b, limit, positions)
    if not used:
        raise FrameError("damaged positions")
    return positions, used


def gap_classes(gaps: np.ndarray, m: int) -> tuple[np.ndarray, bytes]:
    """Return class and low bits of each gap."""
    classes, low = np.empty(len(gaps), dtype=np.uint8), np.empty(6 * len(gaps) + 8, dtype=np.uint8)
    length = _native.gap_classes(gaps, m, classes, low)
    return classes, low[:length].tobytes()


def gap_counts(gaps: np.ndarray, m: int) -> np.ndarray:
    """Count the gaps of each class."""
    counts = np.empty(256, dtype=np.int64)
    _native.gap_counts(gaps, m, counts)
    return counts


def gap_tails(classes: np.ndarray, m: int, data: memoryview) -> np.ndarray:
    """Return the gaps of these classes and low bits."""
    gaps = np.empty(len(classes), dtype=np.int64)
    if not _native.gap_tails(classes, m, as_bytes(data), gaps):
        raise FrameError("damaged low bits of positions")
    return gaps
