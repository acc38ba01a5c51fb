"""Plans of messages that come again in every step are kept, and nothing of others."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence

import torch

from gradwire.aggregate.messages.known_plans import KnownPlans
from gradwire.aggregate.messages.model_recipes import ModelRecipes
from gradwire.aggregate.messages.tensor_parts import TensorPart, whole_tensors


def parts_of(size: int = 70_000) -> list[TensorPart]:
    return whole_tensors([("weight", torch.ones(size)), ("bias", torch.ones(10))])


def test_plans_that_were_announced_are_made_once() -> None:
    known, parts = KnownPlans(ModelRecipes("co3")), parts_of()
    known.expect("bucket", [parts])
    plans = known.of_parts(parts, 0)
    assert known.of_parts(parts, 1) is plans
    asked: list[int] = []
    assert known.fact("length", plans, lambda p: asked.append(0) or len(p)) == 2
    assert known.fact("length", plans, lambda p: asked.append(0) or len(p)) == 2
    assert len(asked) == 1


def test_other_recipes_make_other_plans() -> None:
    recipes, parts = ModelRecipes("co3"), parts_of()
    known = KnownPlans(recipes)
    known.expect("bucket", [parts])
    before = known.of_parts(parts, 0)
    known.fact("recipe", before, lambda p: str(p[0].recipe))
    recipes.use("ecq")
    after = known.of_parts(parts, 1)
    assert after is not before
    assert known.fact("recipe", after, lambda p: str(p[0].recipe)).startswith("ecq")


def in_halves(parts: Sequence[TensorPart]) -> list[list[TensorPart]]:
    return [[half[i] for half in (part.cut(2, 1) for part in parts)] for i in range(2)]


def test_shards_are_cut_and_planned_once() -> None:
    recipes, parts = ModelRecipes("co3"), parts_of()
    known, cuts = KnownPlans(recipes), list[int]()

    def cut(parts: Sequence[TensorPart]) -> list[list[TensorPart]]:
        cuts.append(0)
        return in_halves(parts)

    known.expect("bucket", [parts])
    shards = known.of_shards(parts, cut, 0)
    assert [sum(sum(plan.sizes) for plan in plans) for plans in shards.of_owners] == [35_005, 35_005]
    assert shards.all == [plan for plans in shards.of_owners for plan in plans]
    assert known.of_shards(parts, cut, 1) is shards and len(cuts) == 1
    asked: list[int] = []
    for _ in range(2):
        for plans in (*shards.of_owners, shards.all):
            known.fact("length", plans, lambda p: asked.append(0) or len(p))
    assert len(asked) == 3
    whole = known.of_parts(parts, 1)  # of the same parts, beside them
    assert known.of_parts(parts, 1) is whole and known.of_shards(parts, cut, 1) is shards
    recipes.use("ecq")
    assert str(known.of_shards(parts, cut, 2).all[0].recipe).startswith("ecq") and len(cuts) == 2


def test_a_warm_up_is_planned_in_every_step() -> None:
    known, parts = KnownPlans(ModelRecipes("topk:warmup=10")), parts_of()
    known.expect("bucket", [parts])
    first, later = known.of_parts(parts, 0), known.of_parts(parts, 10)
    assert first is not known.of_parts(parts, 1)
    assert later is known.of_parts(parts, 11)
    assert str(first[-1].codec) != str(later[-1].codec)


def test_nothing_is_kept_of_tensors_that_do_not_come_again() -> None:
    """Copies of gradients were kept for a thousand steps."""
    known = KnownPlans(ModelRecipes("co3"))
    parts = parts_of()
    seen = weakref.ref(parts[0].tensor)
    known.fact("length", known.of_parts(parts, 0), len)
    del parts
    gc.collect()
    assert seen() is None
    announced = parts_of()
    seen = weakref.ref(announced[0].tensor)
    known.expect("bucket", [announced])
    known.fact("length", known.of_parts(announced, 0), len)
    known.fact("length", known.of_shards(announced, in_halves, 0).all, len)
    del announced
    known.expect("bucket", ())
    gc.collect()
    assert seen() is None
