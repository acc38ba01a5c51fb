"""Which recipe each tensor has, and which tensors share a frame."""

from __future__ import annotations

import fnmatch
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ..catalogue import recipe
from ..codecs import Codec
from ..errors import SpecError
from ..recipe import Recipe

SMALL = 4096  # entries: tensors below this share a frame, each with its own step
Spec = str | Mapping[str, str]
Recipes = dict[str, Recipe]  # by pattern of parameter names; the first that matches counts
Named = Sequence[tuple[str, torch.Tensor]]


@dataclass
class Piece:
    """What one frame carries: one large tensor, or several with the same recipe."""

    recipe: Recipe
    codec: Codec  # the recipe's at this step
    names: list[str] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)

    @property
    def sizes(self) -> list[int]:
        return [t.numel() for t in self.tensors]

    def target(self) -> torch.Tensor:
        """Where frames are decoded to: the tensor itself, or a flat one on the CPU for several or a GPU's."""
        first = self.tensors[0]
        alone = len(self.tensors) == 1 and first.device.type == "cpu"
        return first if alone else torch.empty(sum(self.sizes), dtype=first.dtype)

    def put(self, target: torch.Tensor) -> None:
        """The tensors become what was decoded."""
        if target is not self.tensors[0]:
            for tensor, part in zip(self.tensors, target.split(self.sizes), strict=True):
                tensor.copy_(part.view(tensor.shape))


def parse_spec(spec: Spec) -> Recipes:
    """A recipe for every pattern of parameter names."""
    if isinstance(spec, str):
        return {"*": recipe(spec)}
    if not isinstance(spec, Mapping) or not spec:
        raise SpecError("a spec is a string, or a dict from patterns of parameter names to strings")
    if not all(isinstance(pattern, str) for pattern in spec):
        raise SpecError("the patterns of a dict spec are strings such as '*.bias'")
    return {pattern: recipe(s) for pattern, s in spec.items()}


def recipe_of(name: str, recipes: Recipes) -> Recipe:
    for pattern, chosen in recipes.items():
        if fnmatch.fnmatchcase(name, pattern):
            return chosen
    raise SpecError(f"no pattern matches parameter {name!r}: add a last entry '*' (its spec may be 'none')")


def own_recipe(name: str, entries: int, recipes: Recipes) -> Recipe:
    """That of its name, or of small tensors."""
    chosen = recipe_of(name, recipes)
    return chosen.small if entries < SMALL and chosen.small is not None else chosen


def divide(tensors: Named, recipes: Recipes, clock: int, parts: Mapping[str, float]) -> list[Piece]:
    """Small tensors share a frame where that changes nothing for any of them, since DDP hands over others together
    in its first step; tensors that entries are selected from together share one too. All others have their own."""
    shared: dict[str, Piece] = {}
    single: list[Piece] = []
    for name, tensor in tensors:
        chosen = own_recipe(name, tensor.numel(), recipes)
        small = tensor.numel() < SMALL
        codec = chosen.at(clock, parts.get(name, 1.0))
        coded_alone = (codec.converter.lists_segments or codec.converter.elementwise) and not codec.stochastic
        if chosen.whole_model or (small and coded_alone):
            piece = shared.setdefault(str(chosen), Piece(chosen, codec))
        else:
            piece = Piece(chosen, codec)
            single.append(piece)
        piece.names.append(name)
        piece.tensors.append(tensor)
    return [*shared.values(), *single]


def fingerprint(pieces: list[Piece]) -> int:
    """A number that differs where ranks would send different tensors, or code them differently."""
    text = ";".join(f"{p.recipe}:{p.names}:{[tuple(t.shape) for t in p.tensors]}" for p in pieces)
    return zlib.crc32(text.encode())
