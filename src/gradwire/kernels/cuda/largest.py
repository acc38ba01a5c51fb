"""Where the largest of up to 16384 keys are, in Triton: one program that holds all of them in registers.

torch.topk and a sort of what it finds take longer than the rest of a choice, for a few thousand keys.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gradwire.kernels.reference import rows as reference

__all__ = ["largest"]

MOST_KEYS = 16384  # 1024 threads with 16 keys each; twice as many would not fit their registers
KEYS_OF_A_WARP = 512


def largest(keys: torch.Tensor, count: int) -> torch.Tensor:
    """Return where the `count` largest keys are, ascending; of equal keys the first. NaN is the largest of all."""
    total = keys.shape[0]
    if not 0 < count <= total <= MOST_KEYS or keys.dtype != torch.float64 or not keys.is_contiguous():
        return reference.largest(keys, count)
    places = torch.empty(count, dtype=torch.int64, device=keys.device)
    block = triton.next_power_of_2(total)
    with torch.cuda.device_of(keys):
        _largest[(1,)](keys, places, total, count, block, num_warps=min(32, max(4, block // KEYS_OF_A_WARP)))
    return places


@triton.jit(do_not_specialize=["total", "count"])
def _largest(keys, places, total, count, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    here = index < total
    key = tl.load(keys + index, mask=here, other=0.0)
    # Integers in the order of the numbers: of negative ones all bits but the sign count the other way.
    bits = key.to(tl.int64, bitcast=True)
    order = bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF)
    order = tl.where(key <= float("inf"), order, 0x7FFFFFFFFFFFFFFF)  # NaN is above all
    low = tl.min(tl.where(here, order, 0x7FFFFFFFFFFFFFFF), 0)
    order = tl.where(here, order, -0x7FFFFFFFFFFFFFFF)  # below -inf
    high = tl.max(order, 0)
    # Bisection for the count-th largest, between low and high. It is over as soon as a bound has `count` keys above
    # it, after about 20 steps; only equal keys need to be told apart to the last bit.
    while low < high:
        middle = (low | high) - ((low ^ high) >> 1)  # rounded up, and no sum that overflows
        found = tl.sum((order >= middle).to(tl.int32), 0)
        high = tl.where(found < count, middle - 1, tl.where(found == count, middle, high))
        low = tl.where(found < count, low, middle)
    above, equal = order > low, order == low
    room = count - tl.sum(above.to(tl.int32), 0)
    # Both counts in one scan, in the halves of an integer.
    before = tl.cumsum(above.to(tl.int32) + (equal.to(tl.int32) << 16), 0)
    rank = before >> 16
    place = (before & 0xFFFF) + tl.minimum(rank, room) - 1
    tl.store(places + place, index.to(tl.int64), mask=above | (equal & (rank <= room)))
