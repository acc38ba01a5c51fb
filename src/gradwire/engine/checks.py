"""What a model and its recipes must be like for gradients to be averaged in every step."""

from __future__ import annotations

import warnings

import torch

from gradwire.aggregate.messages.model_recipes import ModelRecipes
from gradwire.catalogue.spec_by_name import idle_patterns
from gradwire.codecs import CONVERTIBLE
from gradwire.errors import GradwireError, SpecError

NUMBERED = [f"parameter{number}" for number in range(1000)]  # names of parameters where the model is not known


def check_recipes(recipes: ModelRecipes, model_is_known: bool) -> None:
    """Raise SpecError for a recipe that a hook cannot follow, or that needs the model where it is not known.

    Warn of patterns of names where there are none but numbers.
    """
    if not model_is_known:
        for sentence in idle_patterns(recipes.by_pattern, NUMBERED):
            warnings.warn(
                f"{sentence}: to have the names of parameters, give the model, State(spec, model)", stacklevel=2
            )
    for recipe in recipes.by_pattern.values():
        name = recipe.name
        if recipe.delayed:
            raise SpecError(f"{name} {recipe.delayed}: use gradwire.LocalSGD, not a hook of DDP")
        if recipe.clip and not model_is_known:
            raise SpecError(f"{name} clips by the whole model's norm, so it needs the model: State(spec, model)")
        if recipe.power != 1 and not model_is_known:
            raise SpecError(f"{name} shares the whole model's budget, so it needs the model: State(spec, model)")


def check_dtypes(named: list[tuple[str, torch.Tensor]]) -> None:
    """Raise GradwireError for trained parameters whose gradients cannot be encoded, such as those of float8."""
    for name, parameter in named:
        if parameter.requires_grad and parameter.dtype.to_real() not in CONVERTIBLE:
            raise GradwireError(
                f"{name!r} is {parameter.dtype}, whose gradients cannot be encoded: train a copy of it in bfloat16 or "
                f"float32, and convert that in the forward pass"
            )


def check_momentum(optimizer: torch.optim.Optimizer | None, names: dict[int, str]) -> torch.optim.Optimizer:
    """Return the optimizer whose momentum a recipe takes over, or raise SpecError if it cannot be taken over.

    `names` holds the names of the model's parameters by their ids.
    """
    if optimizer is None:
        raise SpecError(
            "this recipe masks momentum where it sends, and a hook cannot see the optimizer: pass optimizer= to "
            "attach, use gradwire.LocalSGD, or switch it off in the spec (mask=off)"
        )
    if not names:
        raise SpecError("a recipe that masks momentum needs the model too: State(spec, model, optimizer=…)")
    if not {id(p) for group in optimizer.param_groups for p in group["params"]} <= set(names):
        raise SpecError(
            "the optimizer also holds parameters of another model, whose momentum would be lost: "
            "give this model an optimizer of its own"
        )
    return optimizer
