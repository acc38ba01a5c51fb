"""Specs of whole models: one recipe for all tensors, or a recipe for each pattern of parameter names."""

from __future__ import annotations

import difflib
import fnmatch
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache

from gradwire.catalogue.parse_recipe import recipe
from gradwire.catalogue.recipe import Recipe
from gradwire.errors import SpecError

SMALL = 4096  # entries: tensors below this share a frame, each with its own step, and may have a recipe of their own
Spec = str | Mapping[str, str]  # what users write: one spec, or a spec for each pattern of parameter names
Recipes = dict[str, Recipe]  # by pattern of parameter names; the first pattern that matches counts


def parse_spec(spec: Spec) -> Recipes:
    """Read a user's spec. A single string becomes the recipe of the pattern `*`, which matches every name."""
    if isinstance(spec, str):
        return {"*": recipe(spec)}
    if not isinstance(spec, Mapping) or not spec:
        raise SpecError("a spec is a string, or a dict from patterns of parameter names to strings")
    if not all(isinstance(pattern, str) for pattern in spec):
        raise SpecError("the patterns of a dict spec are strings such as '*.bias'")
    return {pattern: recipe(s) for pattern, s in spec.items()}


def spec_text(recipes: Recipes) -> str:
    """Write a spec out with all parameters of its recipes, so that equal texts mean equal recipes."""
    return str({p: str(r) for p, r in recipes.items()}) if list(recipes) != ["*"] else str(recipes["*"])


@lru_cache(maxsize=2**16)
def _compiled(pattern: str) -> re.Pattern[str]:
    # The cache of fnmatch holds only 256 patterns. A spec with a pattern for each of more tensors than that
    # would compile every pattern again for every name.
    return re.compile(fnmatch.translate(pattern))


def recipe_of_name(name: str, recipes: Recipes) -> Recipe:
    """Return the recipe of the first pattern that matches this parameter name, or raise SpecError if none does."""
    for pattern, chosen in recipes.items():
        if _compiled(pattern).match(name):
            return chosen
    raise SpecError(f"no pattern matches parameter {name!r}: add a last entry '*' (its spec may be 'none')")


def idle_patterns(recipes: Recipes, names: Iterable[str], of: str = "parameter") -> Iterator[str]:
    """Yield a sentence for each pattern that is of no use for a model's parameters, which is likely a mistake.

    It matches none, since it is misspelt, or what it matches has another recipe by patterns before it.
    """
    names = list(names)
    first = {name: next((p for p in recipes if _compiled(p).match(name)), None) for name in names}
    for pattern in recipes:
        if not names or pattern == "*" or pattern in first.values():
            continue
        matched = [name for name in names if _compiled(pattern).match(name)]
        before = next((p for name in matched if (p := first[name]) and recipes[p] != recipes[pattern]), None)
        if before is not None:
            yield (
                f"the pattern {pattern!r} has no effect: every {of} that it matches is taken by a pattern before it, "
                f"such as {before!r}, since the first that matches counts; put it before that one"
            )
        elif not matched:
            near = difflib.get_close_matches(pattern, names, n=1, cutoff=0.3)
            hint = f"; the nearest is {near[0]!r}" if near else f", which has names such as {names[0]!r}"
            yield f"the pattern {pattern!r} matches no {of} of the model{hint}"


def warn_of_idle_patterns(recipes: Recipes, names: Iterable[str], of: str = "parameter") -> None:
    """Warn of patterns that are of no use for a model's parameters, or for what else it has by these names."""
    for sentence in idle_patterns(recipes, names, of):
        warnings.warn(sentence, UserWarning, stacklevel=3)


def recipe_of_tensor(name: str, entries: int, recipes: Recipes) -> Recipe:
    """Return the recipe of a tensor of this name and size: small tensors have their own if the recipe names one."""
    chosen = recipe_of_name(name, recipes)
    return chosen.small if entries < SMALL and chosen.small is not None else chosen
