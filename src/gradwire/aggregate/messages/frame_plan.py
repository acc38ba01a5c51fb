"""Which tensors share a frame: the plan that all ranks make alike before they encode, and check by its fingerprint."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from gradwire.aggregate.messages.tensor_parts import TensorPart
from gradwire.catalogue.recipe import Recipe
from gradwire.catalogue.spec_by_name import SMALL, Recipes, recipe_of_tensor
from gradwire.codecs import Codec

# Entries. A frame takes as long to begin as 10⁵ entries take to code, so that tensors below JOINED had better share one
# of a converter that `joins`. With a single table of frequencies for layers of every kind, larger tensors would take
# some 3% more bytes: they share a frame with those of their own shape, which costs 0.5%.
JOINED, JOINED_WITH_LIKE = 2**16, 2**18


@dataclass
class FramePlan:
    """What one frame carries: one large tensor or a part of it, or several small ones with the same recipe."""

    recipe: Recipe
    codec: Codec  # the recipe's codec at this step
    parts: list[TensorPart] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """The names of the tensors, in the order of the frame."""
        return [part.name for part in self.parts]

    @property
    def sizes(self) -> list[int]:
        """The number of entries of each part."""
        return [part.size for part in self.parts]

    @property
    def key(self) -> str:
        """The key of the first part, which tells the frames of a step apart."""
        return self.parts[0].key

    def target(self) -> torch.Tensor:
        """Return a tensor to decode into: the part itself, or a new flat tensor for several of them."""
        first = self.parts[0]
        if len(self.parts) == 1:
            return first.entries
        return torch.empty(sum(self.sizes), dtype=first.tensor.dtype, device=first.tensor.device)

    def put(self, target: torch.Tensor) -> None:
        """Copy what was decoded into `target` to the tensors, unless it was decoded in place."""
        if len(self.parts) > 1:
            for part, values in zip(self.parts, target.split(self.sizes), strict=True):
                part.entries.copy_(values.view(part.entries.shape))


def plan_frames(
    parts: Iterable[TensorPart], recipes: Recipes, clock: int, shares: Mapping[str, float], joins: bool = False
) -> list[FramePlan]:
    """Return the frames of a message: shared ones first, then one for each other part.

    Small tensors share a frame if each is coded as if it were alone. Otherwise a tensor's mean would depend on those
    that share its frame, and these are not the same in all steps: DDP forms other buckets after its first step. Tensors
    whose recipe selects entries from the whole model (`whole_model`) share a frame whatever their size. `clock` is the
    step that schedules go by, and `shares` holds each tensor's part of the model's budget. With `joins`, tensors that
    are not small share frames, too, if that saves more time than their bytes take: in messages of every training step.
    """
    shared: dict[tuple[Recipe, torch.dtype, tuple[int, ...]], FramePlan] = {}
    single: list[FramePlan] = []
    for part in parts:
        entries = part.tensor.numel()
        recipe = recipe_of_tensor(part.name, entries, recipes)
        codec = recipe.at(clock, shares.get(part.name, 1.0))
        with_whom = _shared_by(part, recipe, codec, joins)
        if with_whom is None:
            plan = FramePlan(recipe, codec)
            single.append(plan)
        else:
            plan = shared.setdefault((recipe, part.tensor.dtype, with_whom), FramePlan(recipe, codec))
        plan.parts.append(part)
    return [*shared.values(), *single]


def _shared_by(part: TensorPart, recipe: Recipe, codec: Codec, joins: bool) -> tuple[int, ...] | None:
    """Return what parts have in common that share a frame; None for a part with a frame of its own."""
    if recipe.whole_model:
        return ()
    converter = codec.converter
    if codec.stochastic or not (converter.lists_segments or converter.elementwise):
        return None
    joins = joins and converter.joins
    if part.tensor.numel() < SMALL or (joins and part.size < JOINED):
        return ()
    return part.shape if joins and part.size < JOINED_WITH_LIKE else None


def only_present(plans: Sequence[FramePlan], present: Sequence[bool]) -> Sequence[FramePlan]:
    """Return the plans without the parts that are not present; `present` has a flag for each part of all plans.

    If all are present, these are the plans themselves, of which more is known (`KnownPlans`).
    """
    if all(present):
        return plans
    flags = iter(present)
    result = []
    for plan in plans:
        parts = [part for part, is_present in zip(plan.parts, flags, strict=False) if is_present]
        if parts:
            result.append(FramePlan(plan.recipe, plan.codec, parts))
    return result


def fingerprint(plans: Iterable[FramePlan]) -> int:
    """Return a number that differs where ranks would send different tensors, or code them differently."""
    text = ";".join(f"{p.recipe}:{[(q.key, tuple(q.tensor.shape)) for q in p.parts]}" for p in plans)
    return zlib.crc32(text.encode())
