"""Which tensors share a frame, and how large ones are cut."""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from gradwire.catalogue.recipe import Recipe
from gradwire.catalogue.spec_by_name import SMALL, Recipes, recipe_of_tensor
from gradwire.codecs import Codec

CHUNK = 2**22  # entries: larger tensors are cut, so that one chunk is on its way while the next is encoded
SUMMED = 2**21  # entries of a chunk whose words are added up on their way: cells of a sketch are met at random
ALIGNED = 2**12  # entries: where chunks begin, so that buckets and vectors of the codecs stay whole
Named = Sequence[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Part:
    """The entries lo … hi of a tensor, in its flat order."""

    name: str
    tensor: torch.Tensor
    lo: int
    hi: int

    @property
    def size(self) -> int:
        return self.hi - self.lo

    @property
    def whole(self) -> bool:
        return self.size == self.tensor.numel()

    @property
    def key(self) -> str:
        return self.name if self.whole else f"{self.name}[{self.lo}:{self.hi}]"

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same entries of another tensor of this shape; whole tensors keep their shape."""
        return tensor if self.whole else tensor.view(-1)[self.lo : self.hi]

    @property
    def entries(self) -> torch.Tensor:
        return self.of(self.tensor)

    def cut(self, pieces: int, aligned: int) -> list[Part]:
        step = -(-self.size // pieces // aligned) * aligned
        edges = [*range(self.lo, self.hi, step), self.hi] if step else [self.lo, self.hi]
        return [Part(self.name, self.tensor, a, b) for a, b in itertools.pairwise(edges)]


def whole(tensors: Named) -> list[Part]:
    return [Part(name, tensor, 0, tensor.numel()) for name, tensor in tensors]


@dataclass
class Piece:
    """What one frame carries: (a part of) one large tensor, or several with the same recipe."""

    recipe: Recipe
    codec: Codec  # the recipe's at this step
    parts: list[Part] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        return [part.name for part in self.parts]

    @property
    def sizes(self) -> list[int]:
        return [part.size for part in self.parts]

    def target(self) -> torch.Tensor:
        """Where frames are decoded to: the part itself, or a flat tensor for several of them."""
        first = self.parts[0]
        if len(self.parts) == 1:
            return first.entries
        return torch.empty(sum(self.sizes), dtype=first.tensor.dtype)

    def put(self, target: torch.Tensor) -> None:
        """The tensors become what was decoded."""
        if len(self.parts) > 1:
            for part, values in zip(self.parts, target.split(self.sizes), strict=True):
                own = part.entries
                own.copy_(values.view(own.shape))


def divide(parts: Iterable[Part], recipes: Recipes, clock: int, shares: Mapping[str, float]) -> list[Piece]:
    """Small tensors share a frame where that changes nothing for any of them, since DDP hands over others together
    in its first step; tensors that entries are selected from together share one too. All others have their own."""
    shared: dict[str, Piece] = {}
    single: list[Piece] = []
    for part in parts:
        entries = part.tensor.numel()
        chosen = recipe_of_tensor(part.name, entries, recipes)
        codec = chosen.at(clock, shares.get(part.name, 1.0))
        coded_alone = (codec.converter.lists_segments or codec.converter.elementwise) and not codec.stochastic
        if chosen.whole_model or (entries < SMALL and coded_alone):
            piece = shared.setdefault(f"{chosen} {part.tensor.dtype}", Piece(chosen, codec))
        else:
            piece = Piece(chosen, codec)
            single.append(piece)
        piece.parts.append(part)
    return [*shared.values(), *single]


def messages(tensors: Named, recipes: Recipes) -> list[list[Part]]:
    """Tensors that travel together, in turn: about a chunk each, large tensors in several."""
    result: list[list[Part]] = []
    filled = 0
    for part in whole(tensors):
        chosen = recipe_of_tensor(part.name, part.size, recipes)
        most = SUMMED if chosen.sums else CHUNK
        # What is selected from a whole tensor, or corrected as a whole, is not cut.
        uncut = chosen.codec.converter.selects or chosen.mask or chosen.clip
        count = 1 if uncut else math.ceil(part.size / most)
        for chunk in part.cut(count, ALIGNED) if count > 1 else [part]:
            entries = 0 if uncut else chunk.size  # what is selected is few bytes
            if not result or filled + entries > most + most // 8:
                result.append([])
                filled = 0
            result[-1].append(chunk)
            filled += entries
    return result


def owners(sizes: Mapping[str, int], world: int) -> dict[str, int]:
    """The rank of each tensor that is too small to be cut for all: the one with the least to do, largest first."""
    loads = [0] * world
    result = {}
    for name, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        if size < world * SMALL:
            result[name] = loads.index(min(loads))
            loads[result[name]] += size
    return result


def shards(parts: Iterable[Part], world: int, owned: Mapping[str, int]) -> list[list[Part]]:
    """One list for each rank: large parts are cut for all, each smaller one belongs to one of them.

    Which entries a rank gets depends on the parameter alone, not on what it travels with.
    """
    result: list[list[Part]] = [[] for _ in range(world)]
    for part in parts:
        if part.size >= world * SMALL:
            for rank, cut in enumerate(part.cut(world, 64)):
                result[rank].append(cut)
        else:
            result[owned.get(part.name, zlib.crc32(part.name.encode()) % world)].append(part)
    return result


def fingerprint(pieces: Iterable[Piece]) -> int:
    """A number that differs where ranks would send different tensors, or code them differently."""
    text = ";".join(f"{p.recipe}:{[(q.key, tuple(q.tensor.shape)) for q in p.parts]}" for p in pieces)
    return zlib.crc32(text.encode())
