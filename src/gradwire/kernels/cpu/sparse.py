"""The kernels of sparse codecs: selection, and codes of positions, by the native module."""

from __future__ import annotations

import numpy as np
import torch

from gradwire import _native
from gradwire.errors import FrameError
from gradwire.kernels.cpu.dense import _array, _bytes, _native_can
from gradwire.kernels.reference import sparse as reference
from gradwire.kernels.reference.sparse import Selection

__all__ = [
    "gap_classes", "gap_counts", "gap_tails", "golomb_bits", "golomb_decode", "golomb_encode", "join_gaps",
    "mean_magnitude", "scatter", "select", "split_gaps",
]  # fmt: skip


def select(
    gradient: torch.Tensor, memory: torch.Tensor | None, memory_out: torch.Tensor | None, decay: float,
    count: int | None, low: int = 1, one_sign: bool = False,
) -> Selection:  # fmt: skip
    if not _native_can(gradient):
        return reference.select(gradient, memory, memory_out, decay, count, low, one_sign)
    done, positions, values = _native.select(
        _array(gradient), _array(memory), _array(memory_out), decay, count, max(1, low), one_sign
    )
    return done, torch.from_numpy(positions), torch.from_numpy(values)


def mean_magnitude(values: torch.Tensor) -> float:
    if not _native_can(values):
        return reference.mean_magnitude(values)
    return _native.sum_magnitudes(_array(values)) / values.numel() if values.numel() else 0.0


def scatter(out: torch.Tensor, positions: torch.Tensor, values: torch.Tensor, accumulate: bool) -> None:
    if not _native_can(out):
        return reference.scatter(out, positions, values, accumulate)
    return _native.scatter(_array(out), _array(positions), _array(values), accumulate)


def split_gaps(positions: np.ndarray) -> np.ndarray:
    return _native.split_gaps(positions)


def join_gaps(gaps: np.ndarray, limit: int) -> np.ndarray:
    positions = np.empty_like(gaps)
    if not _native.join_gaps(gaps, limit, positions):
        raise FrameError("a position in the frame is beyond its tensor")
    return positions


def golomb_bits(gaps: np.ndarray, b: int) -> int:
    return len(gaps) * (b + 1) + _native.golomb_quotients(gaps, b)


def golomb_encode(gaps: np.ndarray, b: int) -> bytes:
    out = np.empty(golomb_bits(gaps, b) // 8 + 9, dtype=np.uint8)
    return out[: _native.golomb_encode(gaps, b, out)].tobytes()


def golomb_decode(data: memoryview, count: int, b: int, limit: int) -> tuple[np.ndarray, int]:
    if count * (b + 1) > 8 * len(data):
        raise FrameError("coded positions are cut short")
    positions = np.empty(count, dtype=np.int64)
    used = _native.golomb_decode(_bytes(data), b, limit, positions)
    if not used:
        raise FrameError("damaged positions")
    return positions, used


def gap_classes(gaps: np.ndarray, m: int) -> tuple[np.ndarray, bytes]:
    classes, low = np.empty(len(gaps), dtype=np.uint8), np.empty(6 * len(gaps) + 8, dtype=np.uint8)
    length = _native.gap_classes(gaps, m, classes, low)
    return classes, low[:length].tobytes()


def gap_counts(gaps: np.ndarray, m: int) -> np.ndarray:
    counts = np.empty(256, dtype=np.int64)
    _native.gap_counts(gaps, m, counts)
    return counts


def gap_tails(classes: np.ndarray, m: int, data: memoryview) -> np.ndarray:
    gaps = np.empty(len(classes), dtype=np.int64)
    if not _native.gap_tails(classes, m, _bytes(data), gaps):
        raise FrameError("damaged low bits of positions")
    return gaps
