"""Replicas stay identical: one recipe of each kind, both aggregations, three ranks (`make nightly` has all of them)."""

from __future__ import annotations

from functools import partial

import pytest

from support.ranks import launch
from support.replicas import AGGREGATIONS, Training, recipes_for_a_hook, verdict, work

STEPS = 20
RECIPES = ("co3", "orq", "topk", "sbc")  # a memory; random and none; sparse; sparse with the optimizer's momentum
TRAININGS = [Training(recipe, how, STEPS) for recipe in RECIPES for how in AGGREGATIONS]
SPOILED = Training("none", AGGREGATIONS[0], 5, spoiled_at=2)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list:
    return launch(partial(work, [*TRAININGS, SPOILED], 3, None), tmp_path_factory.mktemp("replicas"), seconds=120)


@pytest.mark.parametrize("how", AGGREGATIONS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_replicas_stay_identical(results, recipe, how):
    assert verdict(Training(recipe, how, STEPS), results) == "equal"


def test_a_rank_that_parts_is_noticed(results):
    assert verdict(SPOILED, results) == "parted in step 2"


def test_the_nightly_run_has_every_recipe_that_attach_takes():
    assert set(RECIPES) < set(recipes_for_a_hook()) and not {"sbc2", "diloco"} & set(recipes_for_a_hook())
