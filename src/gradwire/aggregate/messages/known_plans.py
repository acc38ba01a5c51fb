"""What is known about messages that come again in every step: they have hundreds of tensors, and Python is slow.

DDP's buckets lie in the same places in every step. So the parts of their messages are the same lists in every step; the
plan of such a list is kept, and what follows from the plan is worked out once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from gradwire.aggregate.messages.frame_plan import FramePlan
from gradwire.aggregate.messages.model_recipes import ModelRecipes
from gradwire.aggregate.messages.tensor_parts import TensorPart

Result = TypeVar("Result")


@dataclass
class _Known:
    parts: Sequence[TensorPart]
    generation: int = -1  # of the recipes that the plan was made with
    plans: list[FramePlan] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def plan_anew(self, recipes: ModelRecipes, clock: int) -> None:
        """Make the plan with the recipes of now; what followed from the one before is forgotten."""
        self.generation, self.facts = recipes.generation, {}
        self.plans = recipes.plan_frames(self.parts, clock, joins=True)


class KnownPlans:
    """Plans of the lists of parts that were announced, and facts about these plans.

    Nothing is kept of other lists: their tensors may be large, and gone after the step. Lists are announced by the
    training's thread, before the exchange thread asks for their plans.
    """

    def __init__(self, recipes: ModelRecipes):
        self._recipes = recipes
        self._by_key: dict[Hashable, list[_Known]] = {}
        self._by_parts: dict[int, _Known] = {}
        self._by_plans: dict[int, _Known] = {}

    def expect(self, key: Hashable, lists: Iterable[Sequence[TensorPart]]) -> None:
        """Announce lists of parts that will come again; those that had the same key before will not."""
        for known in self._by_key.pop(key, ()):
            self._by_parts.pop(id(known.parts), None)
            self._by_plans.pop(id(known.plans), None)
        expected = [_Known(parts) for parts in lists]
        if expected:
            self._by_key[key] = expected
            self._by_parts.update((id(known.parts), known) for known in expected)

    def of_parts(self, parts: Sequence[TensorPart], clock: int) -> list[FramePlan]:
        """Return the frames that these parts are sent in at this step."""
        known = self._by_parts.get(id(parts))
        if known is None or not self._recipes.settled(clock):
            return self._recipes.plan_frames(parts, clock, joins=True)
        if known.generation != self._recipes.generation:
            self._by_plans.pop(id(known.plans), None)
            known.plan_anew(self._recipes, clock)
            self._by_plans[id(known.plans)] = known
        return known.plans

    def fact(self, name: str, plans: Sequence[FramePlan], find: Callable[[Sequence[FramePlan]], Result]) -> Result:
        """Return what `find` says about the plans, which is asked once for plans that come again."""
        known = self._by_plans.get(id(plans))
        if known is None:
            return find(plans)
        if name not in known.facts:
            known.facts[name] = find(plans)
        result: Result = known.facts[name]
        return result
