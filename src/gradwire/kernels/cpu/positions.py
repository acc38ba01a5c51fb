"""Codes of ascending positions, by the native module."""

from __future__ import annotations

import numpy as np

from gradwire import _native
from gradwire.errors import FrameError
from gradwire.kernels.cpu.native_arguments import as_bytes

__all__ = [
    "class_positions", "gap_classes", "gap_counts", "golomb_bits", "golomb_encode", "golomb_positions", "split_gaps",
]  # fmt: skip


def split_gaps(positions: np.ndarray) -> np.ndarray:
    """Return the gaps between ascending positions."""
    return _native.split_gaps(positions)


def golomb_bits(gaps: np.ndarray, b: int) -> int:
    """Return how many bits these gaps take."""
    return len(gaps) * (b + 1) + _native.golomb_quotients(gaps, b)


def golomb_encode(gaps: np.ndarray, b: int) -> bytes:
    """Encode gaps."""
    out = np.empty(golomb_bits(gaps, b) // 8 + 9, dtype=np.uint8)
    return out[: _native.golomb_encode(gaps, b, out)].tobytes()


def golomb_positions(data: memoryview, at: int, count: int, b: int, limit: int, before: int) -> tuple[np.ndarray, int]:
    """Decode the next `count` positions, and say where they end."""
    positions = np.empty(count, dtype=np.int64)
    end = _native.golomb_positions(as_bytes(data), at, b, limit, before, positions)
    if end < 0:
        raise FrameError("damaged positions")
    return positions, end


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


def class_positions(
    classes: np.ndarray, m: int, data: memoryview, at: int, limit: int, before: int
) -> tuple[np.ndarray, int]:
    """Return the positions of gaps of these classes, and where their low bits end."""
    positions = np.empty(len(classes), dtype=np.int64)
    end = _native.class_positions(classes, m, as_bytes(data), at, limit, before, positions)
    if end < 0:
        raise FrameError("damaged positions")
    return positions, end
