"""Where each parameter lies in the flat buffers of FSDP2's reduce-scatter.

The input has one row for every rank, of equal length. A row holds that rank's part of every parameter, one after the
other, each filled up with zeros to the length of the first rank's part:

    weight [5, 2], bias [5] on 2 ranks: | w0 w1 w2 | b0 b1 b2 |  and  | w3 w4 0 | b3 b4 0 |

The filling is not sent. Error memory is kept as long as the whole parameter, with the ranks' parts end to end; for
parameters cut along their first dimension, as most are, that is their own order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ShardedShape:
    """The size of a parameter, and the dimension along which it is cut for the ranks."""

    name: str
    size: tuple[int, ...]
    dim: int = 0

    @property
    def entries(self) -> int:
        """The number of entries of the whole parameter."""
        return math.prod(self.size)

    def chunk(self, ranks: int) -> int:
        """Return the number of entries of the first rank's part, the longest."""
        return -(-self.size[self.dim] // ranks) * (self.entries // max(1, self.size[self.dim]))

    def part_shape(self, entries: int) -> tuple[int, ...]:
        """Return the shape of a rank's part that has so many entries."""
        along = entries * self.size[self.dim] // self.entries
        return (*self.size[: self.dim], along, *self.size[self.dim + 1 :])

    def in_order_of_ranks(self, whole: torch.Tensor, ranks: int) -> torch.Tensor:
        """Return the parts of all ranks end to end, from a tensor of the parameter's size."""
        if self.dim == 0:
            return whole.reshape(-1)
        return torch.cat([part.reshape(-1) for part in whole.view(self.size).chunk(ranks, self.dim)])

    def in_own_order(self, flat: torch.Tensor, ranks: int) -> torch.Tensor:
        """Return the parameter's own shape again: what `in_order_of_ranks` did, backwards."""
        if self.dim == 0:
            return flat.view(self.size)
        part = list(self.size)
        part[self.dim] //= ranks
        return torch.cat([p.view(part) for p in flat.chunk(ranks)], self.dim)


@dataclass(frozen=True)
class PartPlace:
    """Where one rank's part of one parameter lies, in its row of the buffer and in the error memory."""

    name: str
    row: slice  # in the rank's row
    memory: slice  # in the parameter's error memory
    entries: int  # of that memory
    shape: tuple[int, ...]  # of the part: some rows of the parameter, or of another dimension

    def alone(self) -> PartPlace:
        """Return the same place for an error memory that holds this part alone."""
        entries = self.memory.stop - self.memory.start
        return PartPlace(self.name, self.row, slice(0, entries), entries, self.shape)


class ShardLayout:
    """Where the parts of all parameters of one module lie in the rows of all ranks."""

    def __init__(self, shapes: Sequence[ShardedShape], ranks: int):
        self.shapes, self.ranks = {shape.name: shape for shape in shapes}, ranks
        self.row = sum(shape.chunk(ranks) for shape in shapes)
        self.rows = [self._places(rank) for rank in range(ranks)]

    def _places(self, rank: int) -> list[PartPlace]:
        """Return what a rank has of each parameter; those of which it has nothing are left out."""
        places, position = [], 0
        for shape in self.shapes.values():
            chunk = shape.chunk(self.ranks)
            start, end = (min(r * chunk, shape.entries) for r in (rank, rank + 1))
            if end > start:
                row = slice(position, position + end - start)
                memory, part = slice(start, end), shape.part_shape(end - start)
                places.append(PartPlace(shape.name, row, memory, shape.entries, part))
            position += chunk
        return places
