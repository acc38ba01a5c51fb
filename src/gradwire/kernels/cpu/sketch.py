"""Count-sketches, by the native module, on all threads that torch has."""

from __future__ import annotations

import numpy as np
import torch

from gradwire import _native
from gradwire.kernels.conditions import where
from gradwire.kernels.cpu.native_arguments import as_array, flat_fp32

__all__ = ["sketch_cells", "sketch_estimates", "sketch_largest"]

MASK = (1 << 64) - 1


@where(flat_fp32)
def sketch_cells(u: torch.Tensor, rows: int, columns: int, seed: int) -> torch.Tensor:
    """Hash entries in blocks that stay in the first-level cache, and add them up row by row."""
    cells = np.empty((rows, columns), dtype=np.float64)
    _native.sketch_cells(as_array(u), rows, columns, seed & MASK, cells.ravel(), torch.get_num_threads())
    return torch.from_numpy(cells)


def sketch_estimates(
    cells: np.ndarray, count: int, seed: int, start: int = 0, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Hash entries, and sort what their cells say, in blocks that stay in the first-level cache."""
    out = torch.empty(count, dtype=torch.float32, device="cpu") if out is None else out
    raw, half = cells.reshape(-1).view(np.uint8), cells.dtype.itemsize == 2
    _native.sketch_estimates(raw, half, *cells.shape, seed, start, as_array(out), torch.get_num_threads())
    return out


def sketch_largest(cells: np.ndarray, count: int, kept: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Select from estimates that are made block by block; a sample says from which magnitude on they matter."""
    raw, half = cells.reshape(-1).view(np.uint8), cells.dtype.itemsize == 2
    positions, values = _native.sketch_largest(raw, half, *cells.shape, seed, count, kept, torch.get_num_threads())
    return torch.from_numpy(positions), torch.from_numpy(values)
