"""Plans of messages that come again in every step are kept, and nothing of others."""

from __future__ import annotations

import gc
import weakref

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
    del announced
    known.expect("bucket", ())
    gc.collect()
    assert seen() is None
