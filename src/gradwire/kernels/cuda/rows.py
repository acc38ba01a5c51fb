"""Rows of a batch, in Triton: both sides of a layer in one launch, and every number is read and written once.

- Nothing waits for the GPU: `total` is read by the kernel that needs it.
- No multiplication is fused with an addition (`enable_fp_fusion=False`): values are those of the reference, bit for
  bit; norms are, to the rounding of fp64 sums in another order.
- Offsets are int64: a million rows of 8192 numbers are more than int32 can count.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gradwire.kernels.conditions import where
from gradwire.kernels.cuda.largest import largest
from gradwire.kernels.reference.rows import Side, is_plain

__all__ = ["join_rows", "largest", "take_rows"]

# What a program has of a side at a time: of one row, or of several short ones.
JOINED, TAKEN = 4096, 4096
# Rows of up to so many columns are joined in registers; of wider ones all but the first block are read twice.
HELD = 16384
# Numbers of a side for each warp: 16 for each thread. They are all loaded before the first is needed.
OF_A_WARP = 512


def can(side: Side) -> bool:
    """Tell whether a side is fp32, bf16 or fp16 without gaps, and its memory fp32 or bf16 of the same shape."""
    rows, memory, mean = side.rows, side.memory, side.mean
    if not all(is_plain(tensor) for tensor in (rows, memory, mean) if tensor is not None):
        return False
    if mean is not None and (mean.dtype != rows.dtype or not mean.is_contiguous()):
        return False
    if rows.dtype not in (torch.float32, torch.bfloat16, torch.float16) or rows.dim() != 2 or not rows.is_contiguous():
        return False
    if memory is None:
        return True
    return memory.dtype in (torch.float32, torch.bfloat16) and memory.shape == rows.shape and memory.is_contiguous()


@where(can)
def join_rows(inputs: Side, outputs: Side, keep: float) -> torch.Tensor:
    """Join and score rows, both sides in one launch."""
    (count, x_columns), d_columns = inputs.rows.shape, outputs.rows.shape[1]
    scores = torch.empty(count, dtype=torch.float64, device=inputs.rows.device)
    if not count:
        return scores
    x_block, d_block = _held(x_columns), _held(d_columns)
    rows = max(1, JOINED // max(x_block, d_block))
    with torch.cuda.device_of(scores):
        _join[(triton.cdiv(count, rows),)](
            inputs.rows, inputs.mean, inputs.memory, outputs.rows, outputs.mean, outputs.memory, scores, count,
            keep, inputs.scale, outputs.scale, inputs.most, outputs.most,
            x_columns, d_columns, rows, x_block, d_block,
            num_warps=_warps(rows * max(x_block, d_block)), enable_fp_fusion=False,
        )  # fmt: skip
    return scores


@where(can)
def take_rows(
    inputs: Side, outputs: Side, chosen: torch.Tensor, total: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy the chosen rows of both sides in one launch, and clear them in the memory in another."""
    count, x_columns, d_columns = chosen.shape[0], inputs.rows.shape[1], outputs.rows.shape[1]
    more = 0 if inputs.mean is None else 1
    x = inputs.rows.new_empty(count + more, x_columns)
    d = outputs.rows.new_empty(count + more, d_columns)
    if not count:
        return x, d
    x_block, d_block = _block(x_columns, TAKEN), _block(d_columns, TAKEN)
    rows = max(1, TAKEN // max(x_block, d_block))
    parts = max(triton.cdiv(x_columns, x_block), triton.cdiv(d_columns, d_block), 1)
    grid = triton.cdiv(count, rows), parts
    warps = _warps(rows * max(x_block, d_block))
    remembered = inputs.memory is not None
    with torch.cuda.device_of(x):
        _take[grid](
            inputs.memory if remembered else inputs.rows, None if remembered else inputs.mean, x,
            outputs.memory if remembered else outputs.rows, None if remembered else outputs.mean, d,
            chosen, total, count, inputs.gain, outputs.gain,
            remembered, x_columns, d_columns, rows, x_block, d_block, num_warps=warps, enable_fp_fusion=False,
        )  # fmt: skip
        if remembered:
            _clear[grid](
                inputs.memory, outputs.memory, chosen, total, count,
                x_columns, d_columns, rows, x_block, d_block, num_warps=warps,
            )  # fmt: skip
    return x, d


def _block(columns: int, most: int) -> int:
    return min(triton.next_power_of_2(max(columns, 1)), most)


def _held(columns: int) -> int:
    return _block(columns, JOINED if columns > HELD else HELD)


def _warps(numbers: int) -> int:
    return min(16, max(4, numbers // OF_A_WARP))


@triton.jit
def _centred(rows, mean, at, here, column, COLUMNS: tl.constexpr):
    value = tl.load(rows + at, mask=here, other=0).to(tl.float32)
    if mean is not None:
        value -= tl.load(mean + column, mask=column < COLUMNS, other=0).to(tl.float32)[None, :]
    return value


@triton.jit
def _is_zero(rows, mean, row, inside, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """Of each row, less the mean."""
    found = tl.zeros(row.shape, tl.int32)
    for start in range(0, COLUMNS, BLOCK):
        column = start + tl.arange(0, BLOCK)
        here = inside[:, None] & (column < COLUMNS)[None, :]
        value = _centred(rows, mean, row[:, None] * COLUMNS + column[None, :], here, column, COLUMNS)
        found += tl.sum((here & (value != 0)).to(tl.int32), 1)
    return found == 0


@triton.jit
def _joined(rows, mean, memory, row, inside, column, keep, scale, COLUMNS: tl.constexpr):
    """`scale` is that of each row."""
    at = row[:, None] * COLUMNS + column[None, :]
    here = inside[:, None] & (column < COLUMNS)[None, :]
    joined = _centred(rows, mean, at, here, column, COLUMNS) * scale[:, None]
    if memory is not None:
        joined = tl.load(memory + at, mask=here, other=0).to(tl.float32) * keep + joined
    return joined


@triton.jit
def _norm(rows, mean, memory, row, inside, first, keep, scale, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """Of a row whose first block is here. fp64 squares neither vanish for rows of 1e-25 nor overflow for 1e20."""
    squares = first.to(tl.float64) * first.to(tl.float64)
    for start in range(BLOCK, COLUMNS, BLOCK):
        column = start + tl.arange(0, BLOCK)
        joined = _joined(rows, mean, memory, row, inside, column, keep, scale, COLUMNS).to(tl.float64)
        squares += joined * joined
    return tl.sqrt(tl.sum(squares, 1))


@triton.jit
def _remember(rows, mean, memory, row, fits, first, keep, scale, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    if memory is not None:
        at = row[:, None] * COLUMNS + tl.arange(0, BLOCK)[None, :]
        here = fits[:, None] & (tl.arange(0, BLOCK) < COLUMNS)[None, :]
        tl.store(memory + at, first.to(memory.dtype.element_ty), mask=here)
        for start in range(BLOCK, COLUMNS, BLOCK):
            column = start + tl.arange(0, BLOCK)
            joined = _joined(rows, mean, memory, row, fits, column, keep, scale, COLUMNS).to(memory.dtype.element_ty)
            here = fits[:, None] & (column < COLUMNS)[None, :]
            tl.store(memory + (row[:, None] * COLUMNS + column[None, :]), joined, mask=here)


@triton.jit(do_not_specialize=["count"])
def _join(
    x, x_mean, x_memory, d, d_mean, d_memory, scores, count,
    keep, x_scale, d_scale, x_most: tl.float64, d_most: tl.float64,
    X: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, X_BLOCK: tl.constexpr, D_BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < count
    idle = _is_zero(x, x_mean, row, inside, X, X_BLOCK) | _is_zero(d, d_mean, row, inside, D, D_BLOCK)
    x_scales, d_scales = tl.where(idle, 0.0, x_scale), tl.where(idle, 0.0, d_scale)
    x_first = _joined(x, x_mean, x_memory, row, inside, tl.arange(0, X_BLOCK), keep, x_scales, X)
    d_first = _joined(d, d_mean, d_memory, row, inside, tl.arange(0, D_BLOCK), keep, d_scales, D)
    x_norm = _norm(x, x_mean, x_memory, row, inside, x_first, keep, x_scales, X, X_BLOCK)
    d_norm = _norm(d, d_mean, d_memory, row, inside, d_first, keep, d_scales, D, D_BLOCK)
    fits = (x_norm <= x_most) & (d_norm <= d_most)  # not for NaN
    tl.store(scores + row, tl.where(fits, x_norm * d_norm, float("nan")), mask=inside)
    _remember(x, x_mean, x_memory, row, inside & fits, x_first, keep, x_scales, X, X_BLOCK)
    _remember(d, d_mean, d_memory, row, inside & fits, d_first, keep, d_scales, D, D_BLOCK)


@triton.jit
def _take_side(
    source, mean, taken, row, place, inside, finite, gain,
    REMEMBERED: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = inside[:, None] & (column < COLUMNS)[None, :]
    at = row[:, None] * COLUMNS + column[None, :]
    value = _centred(source, mean, at, here, column, COLUMNS)
    if REMEMBERED:
        value = value * gain
    value = tl.where(finite[:, None], value, float("nan")).to(taken.dtype.element_ty)
    tl.store(taken + (place[:, None] * COLUMNS + column[None, :]), value, mask=here)


@triton.jit
def _chosen_rows(chosen, total, count, ROWS: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = place < count
    row = tl.load(chosen + place, mask=inside, other=0)
    sum_of_scores = tl.load(total) + tl.zeros([ROWS], tl.float64)  # of a scalar, the interpreter forgets the type
    return place, inside, row, sum_of_scores <= float("inf")  # all but NaN


@triton.jit(do_not_specialize=["count"])
def _take(
    x, x_mean, x_taken, d, d_mean, d_taken, chosen, total, count, x_gain, d_gain, REMEMBERED: tl.constexpr,
    X: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, X_BLOCK: tl.constexpr, D_BLOCK: tl.constexpr,
):  # fmt: skip
    """`x` and `d` are the memories, or the rows where nothing is remembered."""
    place, inside, row, finite = _chosen_rows(chosen, total, count, ROWS)
    _take_side(x, x_mean, x_taken, row, place, inside, finite, x_gain, REMEMBERED, X, X_BLOCK)
    _take_side(d, d_mean, d_taken, row, place, inside, finite, d_gain, REMEMBERED, D, D_BLOCK)


@triton.jit(do_not_specialize=["count"])
def _clear(
    x, d, chosen, total, count,
    X: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, X_BLOCK: tl.constexpr, D_BLOCK: tl.constexpr,
):  # fmt: skip
    """Zero in place of the chosen rows. A launch of its own: Triton may let one thread load a number and another store
    to it, so that a kernel which does both may read what it has just cleared.
    """
    _, inside, row, finite = _chosen_rows(chosen, total, count, ROWS)
    _clear_side(x, row, inside & finite, X, X_BLOCK)
    _clear_side(d, row, inside & finite, D, D_BLOCK)


@triton.jit
def _clear_side(memory, row, where, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = row[:, None] * COLUMNS + column[None, :]
    tl.store(memory + at, 0.0, mask=where[:, None] & (column < COLUMNS)[None, :])
