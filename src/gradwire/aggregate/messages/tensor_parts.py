"""Parts of tensors: what travels together in one message, and which entries of a tensor belong to which rank.

Codecs that use the shape of a tensor (`by_rows` of convert/conversion.py) get parts of whole rows of its first
dimension, as tensors with as many rows; for all others parts begin at multiples of some number of entries, and are
flat.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from gradwire.catalogue.spec_by_name import SMALL, Recipes, recipe_of_tensor

CHUNK = 2**22  # entries: larger tensors are cut, so that one chunk is on its way while the next is encoded
LONG_CHUNK = 2**25  # the same where all ranks code on GPUs, which take longer to be started than to code a chunk
SUMMED = 2**21  # entries of a chunk whose words are added up on their way: cells of a sketch are met at random
ALIGNED = 2**12  # entries: where chunks begin, so that buckets and vectors of the codecs stay whole
NamedTensors = Sequence[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class TensorPart:
    """The entries lo … hi of a named tensor, in its flat order; whole rows if it is `by_rows`, as far as possible."""

    name: str
    tensor: torch.Tensor
    lo: int
    hi: int
    by_rows: bool = False

    @cached_property
    def size(self) -> int:
        """The number of entries of this part."""
        return self.hi - self.lo

    @cached_property
    def whole(self) -> bool:
        """Whether this part is the whole tensor."""
        return self.size == self.tensor.numel()

    @cached_property
    def key(self) -> str:
        """The tensor's name, followed by the range of entries unless the part is the whole tensor."""
        return self.name if self.whole else f"{self.name}[{self.lo}:{self.hi}]"

    @cached_property
    def row(self) -> int:
        """The number of entries of a row of the tensor; 1 if its shape has no rows to keep whole."""
        shape = self.tensor.shape
        return math.prod(shape[1:]) if self.by_rows and len(shape) > 1 else 1

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape in which the part is coded: that of the whole tensor, or of some of its rows, or flat."""
        if self.whole:
            return tuple(self.tensor.shape)
        row = self.row
        if row > 1 and not self.lo % row and not self.hi % row:
            return (self.size // row, *self.tensor.shape[1:])
        return (self.size,)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the same entries of another tensor of this shape, in the shape of the part."""
        if self.whole:
            return tensor
        flat = tensor.view(-1).narrow(0, self.lo, self.size)
        return flat if len(self.shape) == 1 else flat.view(self.shape)

    @property
    def entries(self) -> torch.Tensor:
        """A view of the entries of this part."""
        return self.of(self.tensor)

    def cut(self, count: int, aligned: int) -> list[TensorPart]:
        """Cut the part into at most `count` parts of nearly equal size that begin at multiples of `aligned`.

        Rows that are to be kept whole are the multiples instead, unless a row is too long for a message.
        """
        aligned = self.row if 1 < self.row <= CHUNK else aligned
        step = -(-self.size // count // aligned) * aligned
        edges = [*range(self.lo, self.hi, step), self.hi] if step else [self.lo, self.hi]
        return [replace(self, lo=a, hi=b) for a, b in itertools.pairwise(edges)]


def whole_tensors(tensors: NamedTensors) -> list[TensorPart]:
    """Return every tensor as one part."""
    return [TensorPart(name, tensor, 0, tensor.numel()) for name, tensor in tensors]


def split_into_messages(tensors: NamedTensors, recipes: Recipes, long: bool = False) -> list[list[TensorPart]]:
    """Distribute tensors over messages of about one chunk each, in their order; large tensors are cut."""
    result: list[list[TensorPart]] = []
    filled = 0
    for name, tensor in tensors:
        recipe = recipe_of_tensor(name, tensor.numel(), recipes)
        part = TensorPart(name, tensor, 0, tensor.numel(), recipe.codec.converter.by_rows)
        limit = SUMMED if recipe.sums else LONG_CHUNK if long else CHUNK
        # A codec that selects from a whole tensor, or a corrector that looks at all of it, needs it uncut.
        uncut = recipe.codec.converter.selects or recipe.mask or recipe.clip
        count = 1 if uncut else math.ceil(part.size / limit)
        for chunk in part.cut(count, ALIGNED) if count > 1 else [part]:
            entries = 0 if uncut else chunk.size  # what is selected is few bytes
            if not result or filled + entries > limit + limit // 8:
                result.append([])
                filled = 0
            result[-1].append(chunk)
            filled += entries
    return result


def owners_of_small_tensors(sizes: Mapping[str, int], world: int) -> dict[str, int]:
    """Return the owner of each tensor that is too small to be cut for all ranks.

    Tensors are given out from the largest to the smallest, each to the rank that has the fewest entries so far.
    """
    loads = [0] * world
    result = {}
    for name, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        if size < world * SMALL:
            result[name] = loads.index(min(loads))
            loads[result[name]] += size
    return result


def shards_for_ranks(parts: Iterable[TensorPart], world: int, owners: Mapping[str, int]) -> list[list[TensorPart]]:
    """Return one list of parts for each rank: large parts are cut for all ranks, each smaller one has one owner.

    Which entries a rank gets depends on the parameter alone, not on what it travels with, so that an owner's error
    memory stays right when DDP rebuilds its buckets.
    """
    result: list[list[TensorPart]] = [[] for _ in range(world)]
    for part in parts:
        if part.size >= world * SMALL:
            for rank, shard in enumerate(part.cut(world, 64)):
                result[rank].append(shard)
        else:
            result[owners.get(part.name, zlib.crc32(part.name.encode()) % world)].append(part)
    return result


def lay_out(row: torch.Tensor, parts: Iterable[TensorPart]) -> None:
    """Copy the entries of the parts to the front of a flat tensor, one part after the other."""
    position = 0
    for part in parts:
        row[position : position + part.size] = part.entries.view(-1)
        position += part.size


def take_from(row: torch.Tensor, parts: Iterable[TensorPart]) -> None:
    """Copy the front of a flat tensor to the entries of the parts: what `lay_out` did, backwards."""
    position = 0
    for part in parts:
        part.entries.copy_(row[position : position + part.size].view(part.entries.shape))
        position += part.size
