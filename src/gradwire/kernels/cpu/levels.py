"""The kernels of quantizers with a few levels in each bucket (BinGrad, ORQ, QSGD, …), by the native module.

Buckets do not depend on each other: they are shared by all threads that torch has.
"""

from __future__ import annotations

import numpy as np
import torch

from gradwire import _native
from gradwire.kernels.conditions import where
from gradwire.kernels.cpu.native_arguments import as_array, as_seed, flat_fp32
from gradwire.kernels.reference.levels import blocks_of

__all__ = ["assign_levels", "bucket_stats", "search_levels", "spread_levels"]

METHODS = ("greedy", "polished", "exact", "two", "pair")


@where(flat_fp32)
def bucket_stats(gradient: torch.Tensor, memory: torch.Tensor | None, decay: float, starts: np.ndarray) -> np.ndarray:
    """Return minimum, maximum and sums of every bucket, in one pass."""
    out = np.empty((len(starts) - 1, 5))
    _native.bucket_stats(as_array(gradient), as_array(memory), decay, starts, out.ravel(), torch.get_num_threads())
    return out


@where(flat_fp32)
def search_levels(
    gradient: torch.Tensor, memory: torch.Tensor | None, decay: float, starts: np.ndarray,
    limits: np.ndarray | None, levels: int, method: str,
) -> np.ndarray:  # fmt: skip
    """Search the best levels of every bucket."""
    out = np.empty((len(starts) - 1, 1 if method == "pair" else levels), dtype=np.float32)
    _native.search_levels(
        as_array(gradient), as_array(memory), decay, starts, limits, levels, METHODS.index(method), out.ravel(),
        torch.get_num_threads(),
    )  # fmt: skip
    return out


@where(flat_fp32)
def assign_levels(
    gradient: torch.Tensor, memory: torch.Tensor | None, memory_out: torch.Tensor | None, decay: float,
    values: torch.Tensor, starts: np.ndarray, seed: int | None,
) -> tuple[torch.Tensor, np.ndarray]:  # fmt: skip
    """Round every entry to a level of its bucket, and count the symbols, in one pass."""
    levels = values.shape[1]
    symbols, counts = torch.empty(gradient.numel(), dtype=torch.uint8, device="cpu"), np.zeros(levels, dtype=np.int64)
    _native.assign_levels(
        as_array(gradient), as_array(memory), as_array(memory_out), decay, values.reshape(-1).numpy(), levels, starts,
        as_seed(seed), as_array(symbols), counts, torch.get_num_threads(),
    )  # fmt: skip
    return symbols, counts


def spread_levels(
    symbols: np.ndarray, values: torch.Tensor, starts: np.ndarray, out: torch.Tensor, accumulate: bool
) -> None:
    """Write straight into fp32 tensors; those of another dtype get blocks of fp32 numbers."""
    threads = torch.get_num_threads()
    if flat_fp32(out):
        flat = as_array(values.reshape(-1))
        _native.spread_levels(symbols, flat, values.shape[1], starts, as_array(out), accumulate, threads)
        return
    for block, buckets, cut in blocks_of(starts):
        part, flat = np.empty(block.stop - block.start, dtype=np.float32), as_array(values[buckets].reshape(-1))
        _native.spread_levels(symbols[block], flat, values.shape[1], cut, part, False, threads)
        if accumulate:
            out[block] += torch.from_numpy(part)
        else:
            out[block] = torch.from_numpy(part)
