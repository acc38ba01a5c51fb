"""Sparse codecs: which entries are sent, and entries put back in their places, by the native module.

Passes over whole tensors run on all threads that torch has, if there is enough to do for them.
"""

from __future__ import annotations

import torch

from gradwire import _native
from gradwire.kernels.conditions import where
from gradwire.kernels.cpu.native_arguments import as_array, flat_fp32
from gradwire.kernels.reference.sparse import Selection

__all__ = ["mean_magnitude", "replace", "scatter", "select"]


@where(flat_fp32)
def select(
    gradient: torch.Tensor, memory: torch.Tensor | None, memory_out: torch.Tensor | None, decay: float,
    count: int | None, low: int = 1, one_sign: bool = False,
) -> Selection:  # fmt: skip
    """Select in two passes: a histogram of magnitudes, then the entries."""
    done, positions, values = _native.select(
        as_array(gradient), as_array(memory), as_array(memory_out), decay, count, max(1, low), one_sign,
        torch.get_num_threads(),
    )  # fmt: skip
    return done, torch.from_numpy(positions), torch.from_numpy(values)


@where(flat_fp32)
def mean_magnitude(values: torch.Tensor) -> float:
    """Return the mean of |x|, by eight sums."""
    return _native.sum_magnitudes(as_array(values)) / values.numel() if values.numel() else 0.0


@where(flat_fp32)
def scatter(out: torch.Tensor, positions: torch.Tensor, values: torch.Tensor, accumulate: bool) -> None:
    """Write or add values at ascending positions."""
    _native.scatter(as_array(out), as_array(positions), as_array(values), accumulate, torch.get_num_threads())


@where(flat_fp32)
def replace(out: torch.Tensor, positions: torch.Tensor, values: torch.Tensor) -> None:
    """Write values at ascending positions."""
    _native.replace(as_array(out), as_array(positions), as_array(values), torch.get_num_threads())
