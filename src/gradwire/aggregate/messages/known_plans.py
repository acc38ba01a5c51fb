"""What is known about plans that come again in every step: a message has hundreds of tensors, and Python is slow.

In a training the same tensors lie in the same places in every step. So the plan of a message is kept with its parts,
and what follows from a plan is worked out once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from gradwire.aggregate.messages.frame_plan import FramePlan
from gradwire.aggregate.messages.model_recipes import ModelRecipes
from gradwire.aggregate.messages.tensor_parts import TensorPart

MOST = 1024  # lists that are known at a time: those of one model, as a rule
Result = TypeVar("Result")


class KnownPlans:
    """Plans by the list of their parts, and facts by the list of plans. One thread at a time uses it."""

    def __init__(self, recipes: ModelRecipes):
        self._recipes = recipes
        self._plans: dict[int, tuple[Sequence[TensorPart], int, list[FramePlan]]] = {}
        self._facts: dict[tuple[str, int], tuple[Sequence[FramePlan], Any]] = {}

    def of_parts(self, parts: Sequence[TensorPart], clock: int) -> list[FramePlan]:
        """Return the frames that these parts are sent in at this step."""
        known = self._plans.get(id(parts))
        if known is not None and known[0] is parts and known[1] == self._recipes.generation:
            return known[2]
        plans = self._recipes.plan_frames(parts, clock)
        if self._recipes.settled(clock):
            if len(self._plans) >= MOST:
                self._plans.clear()
            self._plans[id(parts)] = parts, self._recipes.generation, plans
        return plans

    def fact(self, name: str, plans: Sequence[FramePlan], find: Callable[[Sequence[FramePlan]], Result]) -> Result:
        """Return what `find` says about the plans, which is asked once for each list of them."""
        key = name, id(plans)
        known = self._facts.get(key)
        if known is None or known[0] is not plans:
            if len(self._facts) >= 8 * MOST:
                self._facts.clear()
            known = self._facts[key] = plans, find(plans)
        result: Result = known[1]
        return result
