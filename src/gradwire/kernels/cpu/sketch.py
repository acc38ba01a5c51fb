"""Estimates of count-sketches, by the native module, on all threads that torch has."""

from __future__ import annotations

import numpy as np
import torch

from gradwire import _native
from gradwire.kernels.cpu.native_arguments import as_array

__all__ = ["sketch_estimates"]


def sketch_estimates(
    cells: np.ndarray, count: int, seed: int, start: int = 0, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Hash entries, and sort what their cells say, in blocks that stay in the first-level cache."""
    out = torch.empty(count, dtype=torch.float32, device="cpu") if out is None else out
    raw, half = cells.reshape(-1).view(np.uint8), cells.dtype.itemsize == 2
    _native.sketch_estimates(raw, half, *cells.shape, seed, start, as_array(out), torch.get_num_threads())
    return out
