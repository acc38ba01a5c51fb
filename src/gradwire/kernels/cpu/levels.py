"""The kernels of quantizers with a few levels in each bucket (BinGrad, ORQ, QSGD, …), by the native module."""

from __future__ import annotations

import numpy as np
import torch

from gradwire import _native

__all__ = ["assign_levels", "bucket_stats", "search_levels", "spread_levels"]

METHODS = ("greedy", "polished", "exact", "two", "pair")


def _array(tensor: torch.Tensor | None) -> np.ndarray | None:
    return None if tensor is None else tensor.numpy()


def bucket_stats(gradient: torch.Tensor, memory: torch.Tensor | None, decay: float, starts: np.ndarray) -> np.ndarray:
    out = np.empty((len(starts) - 1, 5))
    _native.bucket_stats(_array(gradient), _array(memory), decay, starts, out.ravel())
    return out


def search_levels(
    gradient: torch.Tensor, memory: torch.Tensor | None, decay: float, starts: np.ndarray,
    limits: np.ndarray | None, levels: int, method: str,
) -> np.ndarray:  # fmt: skip
    out = np.empty((len(starts) - 1, 1 if method == "pair" else levels), dtype=np.float32)
    _native.search_levels(
        _array(gradient), _array(memory), decay, starts, limits, levels, METHODS.index(method), out.ravel()
    )
    return out


def assign_levels(
    gradient: torch.Tensor, memory: torch.Tensor | None, memory_out: torch.Tensor | None, decay: float,
    values: torch.Tensor, starts: np.ndarray, seed: int | None,
) -> tuple[torch.Tensor, np.ndarray]:  # fmt: skip
    levels = values.shape[1]
    symbols, counts = torch.empty(gradient.numel(), dtype=torch.uint8), np.zeros(levels, dtype=np.int64)
    _native.assign_levels(
        _array(gradient), _array(memory), _array(memory_out), decay, values.reshape(-1).numpy(), levels, starts,
        None if seed is None else seed & 0xFFFFFFFFFFFFFFFF, _array(symbols), counts,
    )  # fmt: skip
    return symbols, counts


def spread_levels(
    symbols: np.ndarray, values: torch.Tensor, starts: np.ndarray, out: torch.Tensor, accumulate: bool
) -> None:
    _native.spread_levels(symbols, values.reshape(-1).numpy(), values.shape[1], starts, _array(out), accumulate)
