"""The kernels of rows, by the native module: one pass over the batch and its memory for each."""

from __future__ import annotations

import torch

from ... import _native
from ..reference import rows as reference

__all__ = ["can", "row_norms", "take_rows"]

DTYPES = (torch.float32, torch.bfloat16)


def can(rows: torch.Tensor, memory: torch.Tensor | None) -> bool:
    """fp32 or bf16 on the CPU, row after row without gaps."""
    return all(
        t.dtype in DTYPES and t.dim() == 2 and t.is_contiguous() and t.device.type == "cpu"
        for t in ((rows,) if memory is None else (rows, memory))
    )


def row_norms(rows: torch.Tensor, memory: torch.Tensor | None, keep: float, scale: float) -> torch.Tensor:
    norms = torch.empty(len(rows), dtype=torch.float64)
    _native.row_norms(_matrix(rows), _matrix(memory), keep, scale, torch.get_num_threads(), norms.numpy())
    return norms


def take_rows(
    rows: torch.Tensor, memory: torch.Tensor | None, keep: float, scale: float, gain: float,
    chosen: torch.Tensor, finite: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    taken = torch.empty(len(chosen), rows.shape[1], dtype=rows.dtype)
    if not finite:
        return taken.fill_(torch.nan)
    threads = torch.get_num_threads()
    _native.take_rows(
        _matrix(rows), _matrix(memory), keep, scale, gain, chosen.numpy(), threads, _matrix(taken)
    )
    return taken


row_norms.__doc__, take_rows.__doc__ = reference.row_norms.__doc__, reference.take_rows.__doc__


def _matrix(matrix: torch.Tensor | None) -> object:
    """For the native module, which knows bf16 as its bits."""
    if matrix is None:
        return None
    matrix = matrix.detach()
    return (matrix if matrix.dtype == torch.float32 else matrix.view(torch.uint16)).numpy()
