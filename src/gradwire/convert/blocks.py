"""Work on a tensor block by block, so that decoding it takes little memory beside it.

A frame of few bytes may stand for a tensor of any size that the caller allows. If a decoder made whole tensors on its
way, of indexes or of values before they are rounded, such a frame would take many times the memory of its tensor
(docs/wire-format.md has the bounds).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

BLOCK = 1 << 13  # entries: what is made of a block on its way stays in the second-level cache
WIDEST = 1 << 16


def blocks(count: int, size: int | None = None) -> Iterator[slice]:
    """Yield slices that cover `count` entries in order, each of `size` entries, or of a block."""
    size = size or BLOCK
    for start in range(0, count, size):
        yield slice(start, min(count, start + size))


def wide_blocks(count: int) -> Iterator[slice]:
    """Yield larger blocks of a large tensor: for decoders that have nothing else of its size in memory."""
    return blocks(count, max(BLOCK, min(count >> 12 << 6, WIDEST)))  # whole multiples of 64


def combine(values: torch.Tensor, out: torch.Tensor, weight: float, accumulate: bool) -> None:
    """Write weight·values to a block, or add it, wherever that is; one value may be expanded to a whole tensor."""
    values = values.to(out.device)
    if weight != 1:
        values = values.to(out.dtype) * weight
    if accumulate:
        out += values
    else:
        out.copy_(values)
