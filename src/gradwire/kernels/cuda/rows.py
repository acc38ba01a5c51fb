"""Rows of a batch, in Triton. The work is that of the memory, so each kernel reads and writes every number once.

- Nothing waits for the GPU: `finite` is read by the kernel that needs it.
- No multiplication is fused with an addition (`enable_fp_fusion=False`): values are those of the reference, bit for
  bit; norms are, to the rounding of fp64 sums in another order.
- Offsets are int64: a million rows of 8192 numbers are more than int32 can count.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["can", "row_norms", "take_rows"]

# A program has a tile of so many numbers at a time, of one row or of several short ones.
TILE, WARPS = 4096, 8
# fp64 sums of squares neither vanish for rows of 1e-25 nor overflow for those of 1e20, and hide behind the memory.
SUM = tl.float64
PLACES = 4096


def can(rows: torch.Tensor, memory: torch.Tensor | None) -> bool:
    known = rows.dtype in (torch.float32, torch.bfloat16, torch.float16) and rows.dim() == 2 and rows.is_contiguous()
    if memory is None or not known:
        return known
    return memory.dtype in (torch.float32, torch.bfloat16) and memory.shape == rows.shape and memory.is_contiguous()


def row_norms(rows: torch.Tensor, memory: torch.Tensor | None, keep: float, scale: float) -> torch.Tensor:
    count, columns = rows.shape
    norms = torch.empty(count, dtype=torch.float64, device=rows.device)
    if not rows.numel():
        return norms.zero_()
    with torch.cuda.device_of(rows):
        grid, tile = _tiles(count, columns)
        _norms[grid](rows, memory, norms, count, keep, scale, SUM, columns, **tile)
    return norms


def take_rows(
    rows: torch.Tensor, memory: torch.Tensor | None, keep: float, scale: float, gain: float,
    chosen: torch.Tensor, finite: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    (count, columns), taken = rows.shape, len(chosen)
    packed = torch.empty(taken, columns, dtype=rows.dtype, device=rows.device)
    if memory is None:  # no other rows are looked at
        count, places = taken, chosen
    else:
        places = torch.empty(count, dtype=torch.int32, device=rows.device)
    if not count or not columns:
        return packed
    with torch.cuda.device_of(rows):
        if memory is not None:
            parts = triton.next_power_of_2(triton.cdiv(taken, PLACES))  # few kernels for all sizes of batches
            _invert[(triton.cdiv(count, PLACES),)](chosen, places, count, taken, parts, PLACES, num_warps=8)
        grid, tile = _tiles(count, columns)
        _take[grid](rows, memory, packed, places, finite, count, keep, scale, gain, columns, **tile)
    return packed


def _tiles(count: int, columns: int) -> tuple[tuple[int], dict[str, int | bool]]:
    block = min(triton.next_power_of_2(columns), TILE)
    rows = TILE // block
    how: dict[str, int | bool] = {"ROWS": rows, "BLOCK": block, "num_warps": WARPS, "enable_fp_fusion": False}
    return (triton.cdiv(count, rows),), how


@triton.jit
def _joined(rows, memory, at, here, keep, scale, eviction: tl.constexpr):
    joined = tl.load(rows + at, mask=here, other=0, eviction_policy=eviction).to(tl.float32) * scale
    if memory is not None:
        joined = tl.load(memory + at, mask=here, other=0, eviction_policy=eviction).to(tl.float32) * keep + joined
    return joined


@triton.jit(do_not_specialize=["count"])
def _norms(
    rows, memory, norms, count, keep, scale,
    SUM: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    squares = tl.zeros([ROWS, BLOCK], SUM)
    for start in range(0, COLUMNS, BLOCK):
        column = start + tl.arange(0, BLOCK)
        here = (row < count)[:, None] & (column < COLUMNS)[None, :]
        # take_rows comes next: of small batches it finds all in the cache.
        joined = _joined(rows, memory, row[:, None] * COLUMNS + column[None, :], here, keep, scale, "").to(SUM)
        squares += joined * joined
    tl.store(norms + row, tl.sqrt(tl.sum(squares, 1)).to(tl.float64), mask=row < count)


@triton.jit(do_not_specialize=["count", "taken"])
def _invert(chosen, places, count, taken, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """places[chosen[i]] = i, and -1 elsewhere: every program fills a part of its own, and looks through all chosen."""
    index = tl.arange(0, BLOCK)
    first = tl.program_id(0) * BLOCK
    tl.store(places + first + index, -1, mask=first + index < count)
    tl.debug_barrier()
    for _ in range(PARTS):
        row = tl.load(chosen + index, mask=index < taken, other=-1)
        tl.store(places + row, index, mask=(row >= first) & (row < first + BLOCK))
        index += BLOCK


@triton.jit(do_not_specialize=["count"])
def _take(
    rows, memory, packed, places, finite, count, keep, scale, gain,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Over all rows, where `places` says which row of `packed` each becomes; without memory over those of `packed`,
    where it says which rows they are."""
    index = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = index < count
    place = tl.load(places + index, mask=inside, other=-1).to(tl.int64)
    is_finite = tl.load(finite)
    is_chosen = place >= 0
    if memory is None:
        row, to = place, index
    else:
        row, to = index, place
    for start in range(0, COLUMNS, BLOCK):
        column = start + tl.arange(0, BLOCK)
        here = inside[:, None] & (column < COLUMNS)[None, :]
        at = row[:, None] * COLUMNS + column[None, :]
        joined = _joined(rows, memory, at, here, keep, scale, "evict_first")
        value = tl.where(is_finite, joined * gain, float("nan")).to(packed.dtype.element_ty)
        tl.store(packed + (to[:, None] * COLUMNS + column[None, :]), value, mask=here & is_chosen[:, None])
        if memory is not None:
            left = tl.where(is_chosen[:, None], 0.0, joined).to(memory.dtype.element_ty)
            tl.store(memory + at, left, mask=here & is_finite, eviction_policy="evict_first")
