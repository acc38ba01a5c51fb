"""Rows of a batch: their norms with what is remembered of them, and the choice of some of them."""

from __future__ import annotations

import torch

__all__ = ["row_norms", "take_rows"]


def row_norms(rows: torch.Tensor, memory: torch.Tensor | None, keep: float, scale: float) -> torch.Tensor:
    """‖keep·memory + scale·rows‖ of each row, in fp64: squares of small fp32 numbers would be zero."""
    return torch.linalg.vector_norm(_joined(rows, memory, keep, scale), dim=1, dtype=torch.float64)


def take_rows(
    rows: torch.Tensor, memory: torch.Tensor | None, keep: float, scale: float, gain: float,
    chosen: torch.Tensor, finite: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """The chosen rows of keep·memory + scale·rows, times gain, in the dtype of `rows`; the memory keeps the others.

    `chosen` is ascending. Chosen rows of the memory become zero. Where `finite` is false the memory stays as it is, and
    the outcome is NaN.
    """
    joined = _joined(rows, memory, keep, scale)
    taken = (joined[chosen] * gain).to(rows.dtype)
    if not finite:
        return taken.fill_(torch.nan)
    if memory is not None:
        joined[chosen] = 0
        memory.copy_(joined)
    return taken


def _joined(rows: torch.Tensor, memory: torch.Tensor | None, keep: float, scale: float) -> torch.Tensor:
    """In the wider of fp32 and the dtype of the rows, whatever the memory is stored in."""
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32)) * scale
    return rows if memory is None else memory.to(rows.dtype) * keep + rows
