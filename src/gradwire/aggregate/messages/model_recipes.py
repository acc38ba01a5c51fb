"""The recipes of a model: which one each tensor has, and which part of the model's budget."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from gradwire.aggregate.messages.frame_plan import FramePlan, plan_frames
from gradwire.aggregate.messages.tensor_parts import TensorPart
from gradwire.catalogue.recipe import Recipe, budget_parts
from gradwire.catalogue.saved_recipes import recipes_to_save
from gradwire.catalogue.spec_by_name import Recipes, Spec, parse_spec, recipe_of_name, recipe_of_tensor, spec_text


class ModelRecipes:
    """The recipe of every tensor of a model.

    It is read by everything that codes tensors, and changed only by `know_model`, `rearrange` and `use`, between two
    steps and on all ranks alike.
    """

    def __init__(self, spec: Spec):
        self.by_pattern: Recipes = parse_spec(spec)
        self.shapes: dict[str, torch.Size] = {}  # of all tensors of the model, where it is known
        self.generation = 0  # changes with the recipes: what was worked out from them before is out of date
        self._shares: dict[str, float] = {}  # of the model's budget, for each tensor whose share is not by its size

    def __str__(self) -> str:
        """The spec that was given, in full."""
        return spec_text(self.by_pattern)

    def know_model(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take note of the tensors of the whole model: some recipes share one budget among all of them."""
        self.shapes = {name: tensor.shape for name, tensor in tensors}
        self._share_budget()

    def rearrange(self, name: str, shape: torch.Size) -> None:
        """Take note that the dimensions of a tensor come in another order from now on."""
        if name in self.shapes:
            self.shapes[name] = shape

    def use(self, spec: Spec) -> None:
        """Use another spec from the next step on."""
        self.by_pattern = parse_spec(spec)
        self._share_budget()

    def _share_budget(self) -> None:
        self.generation += 1
        sizes = self.sizes
        self._shares = budget_parts(sizes, {name: self.of_tensor(name, d) for name, d in sizes.items()})

    @property
    def sizes(self) -> dict[str, int]:
        """The number of entries of every tensor of the model."""
        return {name: shape.numel() for name, shape in self.shapes.items()}

    @property
    def total(self) -> int:
        """The number of entries of the whole model."""
        return sum(self.sizes.values())

    def of(self, name: str) -> Recipe:
        """Return the recipe of a parameter's name; SpecError if no pattern matches it."""
        return recipe_of_name(name, self.by_pattern)

    def of_tensor(self, name: str, entries: int) -> Recipe:
        """Return the recipe that a tensor of this size really gets: small ones may have another."""
        return recipe_of_tensor(name, entries, self.by_pattern)

    def of_part(self, part: TensorPart) -> Recipe:
        """Return the recipe of the tensor that the part is of."""
        return self.of_tensor(part.name, part.tensor.numel())

    def any(self, attribute: str) -> bool:
        """Return whether any recipe has this property, such as `mask`, `sums` or `flush`."""
        return any(getattr(recipe, attribute) for recipe in self.by_pattern.values())

    @property
    def send_as_is(self) -> bool:
        """Whether every tensor travels as it is."""
        return all(recipe.name == "none" for recipe in self.by_pattern.values())

    @property
    def sums_all(self) -> bool:
        """Whether all gradients are added up on their way, without being decoded."""
        return all(recipe.sums for recipe in self.by_pattern.values())

    def settled(self, clock: int) -> bool:
        """Return whether plans stay what they are from this step on: no recipe has a warm-up that goes on."""
        return all(clock >= float(recipe.values.get("warmup", 0)) for recipe in self.by_pattern.values())

    def remembered(self) -> list[str]:
        """Return the names of the model's tensors whose recipe has an error memory."""
        return [name for name, entries in self.sizes.items() if self.of_tensor(name, entries).decay]

    def state_dict(self) -> dict[str, str]:
        """Return the recipes for a checkpoint, whose memories are worth nothing without them."""
        return recipes_to_save(self.by_pattern)

    def plan_frames(
        self, parts: Iterable[TensorPart], clock: int, last: bool = False, joins: bool = False
    ) -> list[FramePlan]:
        """Return the frames of a message at step `clock`; the `last` exchange of a training may have other recipes.

        Where messages are sent in every step, tensors of some size share frames (`joins`): see `plan_frames`.
        """
        recipes = self.by_pattern
        if last:
            recipes = {pattern: recipe.last or recipe for pattern, recipe in recipes.items()}
        return plan_frames(parts, recipes, clock, self._shares, joins)
