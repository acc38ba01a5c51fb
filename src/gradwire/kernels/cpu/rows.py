"""The kernels of rows, by the native module: one pass over the batch and its memory for each."""

from __future__ import annotations

import torch

from ... import _native
from ..reference import rows as reference

__all__ = ["can", "row_norms", "take_rows"]

DTYPES = (torch.float32, torch.bfloat16)


def can(rows: torch.Tensor, memory: torch.Tensor | None) -> bool:
    """fp32 or bf16 on the CPU, row after row without gaps."""
    return _fits(rows) and (memory is None or _fits(memory))


def _fits(matrix: torch.Tensor) -> bool:
    return matrix.is_cpu and matrix.dtype in DTYPES and matrix.dim() == 2 and matrix.is_contiguous()


def row_norms(rows: torch.Tensor, memory: torch.Tensor | None, keep: float, scale: float) -> torch.Tensor:
    norms = torch.empty(rows.shape[0], dtype=torch.float64)
    _native.row_norms(_matrix(rows), _matrix(memory), keep, scale, torch.get_num_threads(), norms.numpy())
    return norms


def take_rows(
    rows: torch.Tensor, memory: torch.Tensor | None, keep: float, scale: float, gain: float,
    chosen: torch.Tensor, finite: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    taken = torch.empty(chosen.shape[0], rows.shape[1], dtype=rows.dtype)
    if not finite:
        return taken.fill_(torch.nan)
    _native.take_rows(
        _matrix(rows), _matrix(memory), keep, scale, gain, chosen.numpy(), torch.get_num_threads(), _matrix(taken)
    )
    return taken


row_norms.__doc__, take_rows.__doc__ = reference.row_norms.__doc__, reference.take_rows.__doc__


def _matrix(matrix: torch.Tensor | None) -> object:
    """For the native module, which knows bf16 as its bits."""
    if matrix is None:
        return None
    if matrix.requires_grad:
        matrix = matrix.detach()
    return (matrix if matrix.dtype == torch.float32 else matrix.view(torch.uint16)).numpy()
