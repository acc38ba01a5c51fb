"""Replicas stay identical: one recipe of each kind, both aggregations, three ranks (`make nightly` has all of them)."""

from __future__ import annotations

from functools import partial

import pytest

from support.rank_pool import named
from support.replicas import AGGREGATIONS, Training, recipes_for_a_hook, verdict, work

STEPS = 20
RECIPES = ("co3", "orq", "topk", "sbc")  # a memory; random and none; sparse; sparse with the optimizer's momentum
SPOILED = Training("none", AGGREGATIONS[0], 5, spoiled_at=2)


TRAININGS = {f"{recipe}-{how}": Training(recipe, how, STEPS) for recipe in RECIPES for how in AGGREGATIONS}


@pytest.mark.parametrize("training", named(TRAININGS, ["co3-scatter_reduce", "topk-all_gather"]))
def test_replicas_stay_identical(ranks, training):
    assert verdict(training, ranks.run(partial(work, [training], 3, None))) == "equal"


def test_a_rank_that_parts_is_noticed(ranks):
    assert verdict(SPOILED, ranks.run(partial(work, [SPOILED], 3, None))) == "parted in step 2"


def test_the_nightly_run_has_every_recipe_that_attach_takes():
    assert set(RECIPES) < set(recipes_for_a_hook()) and not {"sbc2", "diloco"} & set(recipes_for_a_hook())
