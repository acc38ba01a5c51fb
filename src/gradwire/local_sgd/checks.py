"""What LocalSGD asks of a model, an optimizer and a spec."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.aggregate.messages.model_recipes import ModelRecipes
from gradwire.catalogue.spec_by_name import Recipes, Spec, parse_spec
from gradwire.errors import GradwireError, SpecError
from gradwire.local_sgd.parts import Turns

BUFFERS = "buffer:"  # patterns of a dict spec that begin so are for buffers


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are trained, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def check_parameters(before: Mapping[str, nn.Parameter], now: Mapping[str, nn.Parameter]) -> None:
    """Raise GradwireError if other parameters are trained now than when the LocalSGD was made."""
    changed = sorted(before.keys() ^ now.keys()) or [name for name, p in before.items() if now[name] is not p]
    if changed:
        raise GradwireError(
            f"parameters were frozen or unfrozen, added, removed or replaced ({', '.join(changed[:5])}): make a new "
            f"LocalSGD then"
        )


def check_recipes(recipes: ModelRecipes, names: Iterable[str]) -> None:
    """Raise SpecError if some parameter has a recipe that is for gradients alone."""
    if any(recipes.of(name).clip for name in names):
        raise SpecError("clip_norm is for gradients, and LocalSGD sends updates: clip in your loop")


def check_overlap(overlap: Any, turns: Turns, sync_every: int | Callable[[int], int], recipes: ModelRecipes) -> int:
    """Return the steps that an exchange may go on beside; SpecError if that, or the schedule, cannot be."""
    if isinstance(overlap, bool) or not isinstance(overlap, int) or overlap < 0:
        raise SpecError(f"overlap must be a number of steps from 0 on, not {overlap!r}")
    if not callable(sync_every):
        every, parts = checked_steps(sync_every), len(turns.unsent)
        if parts > every:
            raise SpecError(f"{parts} parts cannot be exchanged once each in {every} steps: take fewer parts")
        if overlap > turns.least_gap(every):
            raise SpecError(
                f"overlap={overlap} is more than the {turns.least_gap(every)} steps between two exchanges "
                f"(sync_every={every}, parts={parts}): one has to end before the next begins"
            )
    if overlap and recipes.any("mask"):
        raise SpecError(
            f"mask clears momentum where it was sent, and with overlap={overlap} newer momentum would go with it: "
            f"set mask=off in the spec"
        )
    return overlap


def check_mix(mix: Any, overlap: int, recipes: ModelRecipes) -> float | None:
    """Return the part of its own parameters that a rank keeps; SpecError if that cannot be."""
    if mix is None:
        return None
    if isinstance(mix, bool) or not isinstance(mix, int | float) or not 0 <= mix < 1:
        raise SpecError(f"mix must be a number from 0 to below 1, or None, not {mix!r}")
    if not overlap:
        raise SpecError("mix is about what a rank does beside an exchange: it needs an overlap")
    if any(recipe.codec.converter.selects for recipe in recipes.by_pattern.values()):
        raise SpecError(
            "with mix a rank keeps a part of its own update and sends it again, and sparse recipes would add what "
            "waits in the error memory: use mix=None with them"
        )
    return float(mix)


def divide_spec(spec: Spec) -> tuple[Spec, Recipes]:
    """Return the part of a spec that is for parameters, and the recipes of buffers."""
    if not isinstance(spec, Mapping):
        return spec, {}
    of_buffers = {p[len(BUFFERS) :]: s for p, s in spec.items() if isinstance(p, str) and p.startswith(BUFFERS)}
    others = {p: s for p, s in spec.items() if not (isinstance(p, str) and p.startswith(BUFFERS))}
    return others, parse_spec(of_buffers) if of_buffers else {}


def checked_steps(every: Any) -> int:
    """Return a number of steps as an int, or raise SpecError if it is not one."""
    try:
        if isinstance(every, bool) or operator.index(every) < 1:
            raise TypeError
    except TypeError:
        raise SpecError(f"sync_every must be 1 or more steps, or a function of the step to it, not {every!r}") from None
    return operator.index(every)


def check_model(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise GradwireError unless the model and the optimizer belong together, and are not in DDP."""
    if not isinstance(model, nn.Module):
        raise GradwireError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise GradwireError("LocalSGD takes the place of DistributedDataParallel: pass the model itself")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise GradwireError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not held & {id(p) for p in trainable(model).values()}:
        raise GradwireError("the optimizer holds no trainable parameter of the model")
    if not held <= {id(p) for p in model.parameters()}:
        raise GradwireError(
            "the optimizer holds parameters that are not the model's, and would not be synced: "
            "put all modules that it trains into one, such as nn.ModuleList([model, head])"
        )
