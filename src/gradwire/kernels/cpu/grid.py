"""The kernels of evenly spaced grids (ecq), by the native module."""

from __future__ import annotations

import numpy as np
import torch

from gradwire import _native
from gradwire.errors import FrameError
from gradwire.kernels.cpu.dense import _array, _bytes, _native_can, _seed
from gradwire.kernels.reference import grid as reference
from gradwire.kernels.reference.dense import chunk_size
from gradwire.kernels.reference.grid import LOGS, Measured, Outliers

__all__ = ["add_at", "grid_measure", "grid_quantize", "grid_rans", "pack_outliers", "unpack_outliers"]


def _room(capacity: int) -> Outliers:
    return torch.empty(capacity, dtype=torch.int64), torch.empty(capacity, dtype=torch.int32)


def _first(count: int, outliers: Outliers) -> Outliers:
    return outliers[0][:count], outliers[1][:count]


def grid_measure(
    x: np.ndarray, first: np.ndarray, second: np.ndarray, zeros: int, step: float, shift: float
) -> Measured | None:
    return _native.grid_measure(x, first, second, zeros, LOGS, step, shift)


def grid_quantize(
    gradient: torch.Tensor, memory: torch.Tensor | None, memory_out: torch.Tensor | None, decay: float, step: float,
    shift: float, values: torch.Tensor, capacity: int, seed: int | None = None,
) -> tuple[torch.Tensor, Outliers]:  # fmt: skip
    if not _native_can(gradient):
        return reference.grid_quantize(gradient, memory, memory_out, decay, step, shift, values, capacity, seed)
    symbols, outliers = torch.empty(gradient.numel(), dtype=torch.uint8), _room(capacity)
    count = _native.grid_quantize(
        _array(gradient), _array(memory), _array(memory_out), decay, step, shift, _array(values), _seed(seed),
        _array(symbols), *map(_array, outliers),
    )  # fmt: skip
    return symbols, _first(count, outliers)


def grid_rans(
    gradient: torch.Tensor, memory: torch.Tensor | None, memory_out: torch.Tensor | None, decay: float, step: float,
    shift: float, values: torch.Tensor, offset: float | None, capacity: int, frequencies: np.ndarray, precision: int,
    lane_bits: int, chunks: int, out: torch.Tensor,
) -> tuple[list[int], int, Outliers] | None:  # fmt: skip
    """With an `offset` of the multiples beyond the symbols' range, e ← u − value of these too.

    Also says how many entries the chunks hold: less than all if it stopped before a NaN or an infinity."""
    if not _native_can(gradient):
        return None
    outliers = _room(capacity)
    size = chunk_size(gradient.numel(), chunks)
    lengths, done, count = _native.grid_rans(
        _array(gradient), _array(memory), _array(memory_out), decay, step, shift, _array(values), offset,
        frequencies, precision, 1 << lane_bits, size, _array(out), *map(_array, outliers),
    )  # fmt: skip
    return lengths, done, _first(count, outliers)


def add_at(x: torch.Tensor, positions: torch.Tensor, values: torch.Tensor) -> None:
    if _native_can(x) and x.dim() == 1 and values.dtype == torch.float32:
        _native.add_at(_array(x), _array(positions.cpu()), _array(values.cpu()))
    else:
        reference.add_at(x, positions, values)


def pack_outliers(gaps: np.ndarray, negative: np.ndarray, excesses: np.ndarray, a: int, b: int) -> bytes:
    bits = int((gaps >> a).sum()) + len(gaps) * (a + b + 53)
    out = np.empty(bits // 8 + 8, dtype=np.uint8)
    return out[: _native.pack_outliers(gaps, negative.view(np.uint8), excesses, a, b, out)].tobytes()


def unpack_outliers(
    data: memoryview, count: int, elements: int, largest: int, a: int, b: int
) -> tuple[np.ndarray, np.ndarray]:
    positions, multiples = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int32)
    if not _native.unpack_outliers(_bytes(data), elements, largest, a, b, positions, multiples):
        raise FrameError("damaged outliers")
    return positions, multiples
