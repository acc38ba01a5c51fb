"""The kernels of evenly spaced grids (ecq), by the native module."""

from __future__ import annotations

import numpy as np
import torch

from gradwire import _native
from gradwire.errors import FrameError
from gradwire.kernels.conditions import where
from gradwire.kernels.cpu.native_arguments import as_array, as_bytes, as_seed, flat_fp32
from gradwire.kernels.reference.coders import chunk_size
from gradwire.kernels.reference.grid import LOGS, Measured, Outliers

__all__ = [
    "add_at", "grid_measure", "grid_quantize", "grid_quantize_segments", "grid_rans", "grid_search", "pack_outliers",
    "running_sums", "unpack_outliers",
]  # fmt: skip


def _room(capacity: int) -> Outliers:
    positions = torch.empty(capacity, dtype=torch.int64, device="cpu")
    return positions, torch.empty(capacity, dtype=torch.int32, device="cpu")


def _first(count: int, outliers: Outliers) -> Outliers:
    return outliers[0][:count], outliers[1][:count]


def grid_measure(
    x: np.ndarray, first: np.ndarray, second: np.ndarray, zeros: int, step: float, shift: float
) -> Measured | None:
    """Return rate and error of a grid on a sorted sample, by binary searches in it."""
    return _native.grid_measure(x, first, second, zeros, LOGS, step, shift)


def running_sums(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Add up both at a time."""
    first, second = np.empty(len(x) + 1), np.empty(len(x) + 1)
    _native.running_sums(x, first, second)
    return first, second


def grid_search(
    x: np.ndarray, first: np.ndarray, second: np.ndarray, zeros: int, energy: float, error: float
) -> tuple[float, float, Measured] | None:
    """Search without Python between two grids."""
    return _native.grid_search(x, first, second, zeros, LOGS, energy, error)


@where(flat_fp32)
def grid_quantize(
    gradient: torch.Tensor, memory: torch.Tensor | None, memory_out: torch.Tensor | None, decay: float, step: float,
    shift: float, values: torch.Tensor, capacity: int, seed: int | None = None,
) -> tuple[torch.Tensor, Outliers]:  # fmt: skip
    """Quantize a tensor to a grid in one pass."""
    symbols, outliers = torch.empty(gradient.numel(), dtype=torch.uint8, device="cpu"), _room(capacity)
    count = _native.grid_quantize(
        as_array(gradient), as_array(memory), as_array(memory_out), decay, step, shift, as_array(values), as_seed(seed),
        as_array(symbols), *map(as_array, outliers),
    )  # fmt: skip
    return symbols, _first(count, outliers)


@where(flat_fp32)
def grid_quantize_segments(
    gradient: torch.Tensor, memory: torch.Tensor | None, memory_out: torch.Tensor | None, decay: float,
    lengths: np.ndarray, steps: np.ndarray, shift: float, values: torch.Tensor,
) -> tuple[torch.Tensor, Outliers]:  # fmt: skip
    """Quantize all segments in one call."""
    symbols = torch.empty(gradient.numel(), dtype=torch.uint8, device="cpu")
    outliers = _room(int(sum(lengths // 16)))
    count = _native.grid_quantize_segments(
        as_array(gradient), as_array(memory), as_array(memory_out), decay, lengths, steps.astype(np.float32), shift,
        as_array(values.reshape(-1)), as_array(symbols), *map(as_array, outliers),
    )  # fmt: skip
    return symbols, _first(count, outliers)


@where(flat_fp32)
def grid_rans(
    gradient: torch.Tensor, memory: torch.Tensor | None, memory_out: torch.Tensor | None, decay: float, step: float,
    shift: float, values: torch.Tensor, offset: float | None, capacity: int, frequencies: np.ndarray, precision: int,
    lane_bits: int, chunks: int, out: torch.Tensor,
) -> tuple[list[int], int, Outliers] | None:  # fmt: skip
    """Quantize and encode 64 entries at a time, without a pass over the tensor in between, on all threads."""
    outliers = _room(capacity)
    size = chunk_size(gradient.numel(), chunks)
    lengths, done, count = _native.grid_rans(
        as_array(gradient), as_array(memory), as_array(memory_out), decay, step, shift, as_array(values), offset,
        frequencies, precision, 1 << lane_bits, size, as_array(out), *map(as_array, outliers), torch.get_num_threads(),
    )  # fmt: skip
    return lengths, done, _first(count, outliers)


@where(flat_fp32)
def add_at(x: torch.Tensor, positions: torch.Tensor, values: torch.Tensor) -> None:
    """Add values to the entries at these positions, of which none comes twice."""
    _native.add_at(as_array(x), as_array(positions), as_array(values.float()))


def pack_outliers(gaps: np.ndarray, negative: np.ndarray, excesses: np.ndarray, a: int, b: int) -> bytes:
    """Encode gaps, signs and excesses of outliers."""
    bits = int((gaps >> a).sum()) + len(gaps) * (a + b + 53)
    out = np.empty(bits // 8 + 8, dtype=np.uint8)
    return out[: _native.pack_outliers(gaps, negative.view(np.uint8), excesses, a, b, out)].tobytes()


def unpack_outliers(
    data: memoryview, count: int, elements: int, largest: int, a: int, b: int
) -> tuple[np.ndarray, np.ndarray]:
    """Decode positions and multiples of outliers."""
    positions, multiples = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int32)
    if not _native.unpack_outliers(as_bytes(data), elements, largest, a, b, positions, multiples):
        raise FrameError("damaged outliers")
    return positions, multiples
