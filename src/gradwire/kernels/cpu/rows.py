"""The kernels of rows, by the native module: one pass over the batch and its memory, then the chosen rows alone."""

from __future__ import annotations

import math

import torch

from gradwire import _native
from gradwire.kernels.conditions import where
from gradwire.kernels.reference.rows import Side, is_plain

__all__ = ["join_rows", "largest", "take_rows"]

DTYPES = (torch.float32, torch.bfloat16)


def can(side: Side) -> bool:
    """Tell whether a side is fp32 or bf16, row after row without gaps, and its mean in the dtype of the rows."""
    rows, memory, mean = side.rows, side.memory, side.mean
    if rows.dim() != 2 or not _fits(rows) or (memory is not None and (memory.dim() != 2 or not _fits(memory))):
        return False
    return mean is None or (mean.dtype == rows.dtype and mean.dim() == 1 and _fits(mean))


def _fits(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu and tensor.dtype in DTYPES and tensor.is_contiguous() and is_plain(tensor)


@where(can)
def join_rows(inputs: Side, outputs: Side, keep: float) -> torch.Tensor:
    """Join and score rows on all threads, each row in one pass."""
    scores = torch.empty(inputs.rows.shape[0], dtype=torch.float64, device="cpu")
    _native.join_rows(_side(inputs), _side(outputs), keep, torch.get_num_threads(), scores.data_ptr())
    return scores


@where(can)
def take_rows(
    inputs: Side, outputs: Side, chosen: torch.Tensor, total: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy the chosen rows on all threads, and clear them in the memory."""
    count = chosen.shape[0]
    more = count + (inputs.mean is not None)
    a = torch.empty(more, inputs.rows.shape[1], dtype=inputs.rows.dtype, device="cpu")
    b = torch.empty(more, outputs.rows.shape[1], dtype=outputs.rows.dtype, device="cpu")
    if math.isnan(total.item()):
        return a.fill_(math.nan), b.fill_(math.nan)
    if chosen.dtype != torch.int64 or not chosen.is_contiguous():
        chosen = chosen.to(torch.int64).contiguous()
    addresses = (a.data_ptr(), b.data_ptr())
    _native.take_rows(_side(inputs), _side(outputs), chosen.data_ptr(), count, torch.get_num_threads(), addresses)
    return a, b


def _flat_fp64(keys: torch.Tensor) -> bool:
    return keys.dtype == torch.float64 and keys.is_contiguous() and is_plain(keys)


@where(_flat_fp64)
def largest(keys: torch.Tensor, count: int) -> torch.Tensor:
    """Return where the largest keys are, without sorting the others."""
    places = torch.empty(count, dtype=torch.int64, device="cpu")
    _native.largest(keys.data_ptr(), keys.shape[0], count, places.data_ptr())
    return places


def _side(side: Side) -> tuple[object, ...]:
    """For the native module, which reads addresses; `can` has made sure of what is there."""
    rows, memory, scale, gain, most, mean = side
    half = rows.dtype == torch.bfloat16
    slots = None if memory is None else (memory.data_ptr(), *memory.shape, memory.dtype == torch.bfloat16)
    one = None if mean is None else (mean.data_ptr(), 1, mean.shape[0], half)
    return (rows.data_ptr(), *rows.shape, half), slots, scale, gain, most, one
