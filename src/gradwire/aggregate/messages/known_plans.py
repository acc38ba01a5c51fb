"""What is known about messages that come again in every step: they have hundreds of tensors, and Python is slow.

DDP's buckets lie in the same places in every step. So the parts of their messages are the same lists in every step; the
plan of such a list is kept, and what follows from the plan is worked out once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from gradwire.aggregate.messages.frame_plan import FramePlan
from gradwire.aggregate.messages.model_recipes import ModelRecipes
from gradwire.aggregate.messages.tensor_parts import TensorPart

Result = TypeVar("Result")
Cut = Callable[[Sequence[TensorPart]], list[list[TensorPart]]]


class ShardPlans(NamedTuple):
    """The frames of a message that is cut into shards."""

    of_owners: list[list[FramePlan]]  # those of each rank's shard
    all: list[FramePlan]


@dataclass
class _Known:
    parts: Sequence[TensorPart]
    generation: int = -1  # of the recipes that the plans were made with
    whole: list[FramePlan] | None = None
    shards: ShardPlans | None = None

    @property
    def lists(self) -> list[list[FramePlan]]:
        """All lists of plans that were made."""
        whole = [] if self.whole is None else [self.whole]
        return whole if self.shards is None else [*whole, *self.shards.of_owners, self.shards.all]

    def forget(self, generation: int) -> None:
        """Forget all plans; those to come are made with recipes of this generation."""
        self.generation, self.whole, self.shards = generation, None, None

    def keep_whole(self, plans: list[FramePlan]) -> list[FramePlan]:
        """Keep the plans of the parts as they are."""
        self.whole = plans
        return plans

    def keep_shards(self, plans: ShardPlans) -> ShardPlans:
        """Keep the plans of the shards that the parts are cut into."""
        self.shards = plans
        return plans


class KnownPlans:
    """Plans of the lists of parts that were announced, and facts about these plans.

    Nothing is kept of other lists: their tensors may be large, and gone after the step. Lists are announced by the
    training's thread, before the exchange thread asks for their plans.
    """

    def __init__(self, recipes: ModelRecipes):
        self._recipes = recipes
        self._by_key: dict[Hashable, list[_Known]] = {}
        self._by_parts: dict[int, _Known] = {}
        self._facts: dict[int, dict[str, Any]] = {}  # of each list of plans

    def expect(self, key: Hashable, lists: Iterable[Sequence[TensorPart]]) -> None:
        """Announce lists of parts that will come again; those that had the same key before will not."""
        for known in self._by_key.pop(key, ()):
            self._by_parts.pop(id(known.parts), None)
            self._forget_facts(known)
        expected = [_Known(parts) for parts in lists]
        if expected:
            self._by_key[key] = expected
            self._by_parts.update((id(known.parts), known) for known in expected)

    def of_parts(self, parts: Sequence[TensorPart], clock: int) -> list[FramePlan]:
        """Return the frames that these parts are sent in at this step."""
        known = self._settled(parts, clock)
        if known is None:
            return self._plan(parts, clock)
        if known.whole is not None:
            return known.whole
        plans = known.keep_whole(self._plan(parts, clock))
        self._facts[id(plans)] = {}
        return plans

    def of_shards(self, parts: Sequence[TensorPart], cut: Cut, clock: int) -> ShardPlans:
        """Return the frames of the shards that `cut` makes of these parts, which are the same in all steps."""
        known = self._settled(parts, clock)
        if known is None:
            return self._plan_shards(parts, cut, clock)
        if known.shards is not None:
            return known.shards
        shards = known.keep_shards(self._plan_shards(parts, cut, clock))
        self._facts.update((id(plans), {}) for plans in (*shards.of_owners, shards.all))
        return shards

    def _settled(self, parts: Sequence[TensorPart], clock: int) -> _Known | None:
        """Return what is kept of parts whose plans stay what they are; nothing of what other recipes had planned."""
        known = self._by_parts.get(id(parts))
        if known is None or not self._recipes.settled(clock):
            return None
        if known.generation != self._recipes.generation:
            self._forget_facts(known)
            known.forget(self._recipes.generation)
        return known

    def _plan(self, parts: Sequence[TensorPart], clock: int) -> list[FramePlan]:
        return self._recipes.plan_frames(parts, clock, joins=True)

    def _plan_shards(self, parts: Sequence[TensorPart], cut: Cut, clock: int) -> ShardPlans:
        of_owners = [self._plan(shard, clock) for shard in cut(parts)]
        return ShardPlans(of_owners, [plan for plans in of_owners for plan in plans])

    def _forget_facts(self, known: _Known) -> None:
        for plans in known.lists:
            self._facts.pop(id(plans), None)

    def fact(self, name: str, plans: Sequence[FramePlan], find: Callable[[Sequence[FramePlan]], Result]) -> Result:
        """Return what `find` says about the plans, which is asked once for plans that come again."""
        facts = self._facts.get(id(plans))
        if facts is None:
            return find(plans)
        if name not in facts:
            facts[name] = find(plans)
        result: Result = facts[name]
        return result
