"""The recipes beside saved memories: what a memory holds depends on the recipe that it is of.

An entry of an error memory is a gradient, or with momentum masking a velocity, and is worth one step under a recipe
that sends every entry, but a hundred steps under one that sends 1% of them: loaded into another recipe, it would be
sent as a step of a hundred times the size, or forgotten.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from gradwire.catalogue.recipe import Recipe
from gradwire.catalogue.spec_by_name import Recipes, parse_spec, recipe_of_name, recipe_of_tensor
from gradwire.errors import CheckpointError, SpecError

KEY = "recipes"  # in a state


def recipes_to_save(recipes: Recipes) -> dict[str, str]:
    """Return what stands in a state: the full spec of every pattern."""
    return {pattern: str(recipe) for pattern, recipe in recipes.items()}


def check_saved_recipes(
    state: Mapping[str, Any], now: Recipes, remembered: Mapping[str, int], accelerated: Mapping[str, int],
    equivalent: Collection[str] = (),
) -> None:  # fmt: skip
    """Raise a CheckpointError if memories were saved under recipes that the present ones cannot go on from.

    `remembered` has the numbers of entries of the tensors that have an error memory in the state, by name, and
    `accelerated` of those that have a velocity. Recipes with names among `equivalent` may follow each other, as they
    do under `auto`. States of versions that did not save recipes are taken as they are.
    """
    if KEY in state:
        before = _parsed(state[KEY])
        for name, entries in remembered.items():
            saved, present = _recipe_of(name, entries, before), recipe_of_tensor(name, entries, now)
            switches = saved.name in equivalent and present.name in equivalent
            if not present.decay or not (switches or saved.name == present.name) or _fixed(saved) != _fixed(present):
                raise _refusal(name, before, now)
        for name, entries in accelerated.items():
            saved, present = _recipe_of(name, entries, before), recipe_of_tensor(name, entries, now)
            if saved.mask != present.mask:
                raise _refusal(name, before, now)
    if accelerated and not any(recipe.mask for recipe in now.values()):
        raise CheckpointError(
            "the state has velocities, of a recipe that masks momentum (dgc, sbc, stc), and there is none here: use "
            "the recipes that it was saved with, or do not load it"
        )


def check_same_kind(state: Mapping[str, Any], now: Recipes, sizes: Mapping[str, int]) -> None:
    """Raise a CheckpointError unless every tensor has the recipe that it was saved under, parameters aside.

    That is for states which hold more than error memories, such as the outer optimizer of LocalSGD.
    """
    if KEY not in state:
        return
    before = _parsed(state[KEY])
    for name, entries in sizes.items():
        saved, present = _recipe_of(name, entries, before), recipe_of_tensor(name, entries, now)
        if saved.name != present.name or _fixed(saved) != _fixed(present):
            raise _refusal(name, before, now)


def _parsed(saved: Any) -> Recipes:
    try:
        return parse_spec(saved)
    except SpecError as error:
        raise CheckpointError(f"the state was saved under recipes that this version does not know: {error}") from error


def _recipe_of(name: str, entries: int, recipes: Recipes) -> Recipe:
    try:
        return recipe_of_tensor(name, entries, recipes)
    except SpecError as error:
        raise CheckpointError(f"the state has a memory of {name!r}, which none of its recipes is for") from error


def _fixed(recipe: Recipe) -> tuple[object, ...]:
    """Return the parameters that must stay the same: without them, what was saved would mean something else."""
    return recipe.mask, recipe.ahead, recipe.values.get("outer_lr"), recipe.values.get("outer_momentum")


def _refusal(name: str, before: Recipes, now: Recipes) -> CheckpointError:
    saved, present = recipe_of_name(name, before), recipe_of_name(name, now)  # as users wrote them
    in_full = saved.name == present.name
    was, is_now = (str(saved), str(present)) if in_full else (saved.name, present.name)
    return CheckpointError(
        f"the memory of {name!r} was saved under the recipe {was!r}, and its recipe is {is_now!r} now, which would "
        f"misread it: use the recipe {was!r} to go on, or do not load this state (what was not sent yet is lost then)"
    )
