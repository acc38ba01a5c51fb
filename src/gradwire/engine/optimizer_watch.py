"""Says once what a sparse recipe costs under Adam, which a hook sees for the first time when it makes a step.

Adam divides by the root of the mean square of what it has seen. Under a sparse recipe that is mostly zeros, now and
then the sum of a hundred gradients: the steps that follow have another scale than those of the whole gradients.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection
from functools import lru_cache
from typing import Any
from weakref import WeakSet

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gradwire.catalogue.recipe import Recipe
from gradwire.correct.adam_units import ADAMS

_watches: WeakSet[OptimizerWatch] = WeakSet()


class OptimizerWatch:
    """Waits for the first step of an optimizer of these parameters, of which any part of the program may hold it."""

    def __init__(self, parameters: Collection[int], recipe: Recipe):
        self._parameters, self._recipe = parameters, recipe
        _hook()
        _watches.add(self)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at an optimizer that is about to make a step."""
        if not any(id(p) in self._parameters for group in optimizer.param_groups for p in group["params"]):
            return
        self.end()
        if isinstance(optimizer, ADAMS):
            warnings.warn(
                f"{self._recipe.name} sends few entries in each step, and under {type(optimizer).__name__} that costs "
                f"loss (0.2 to 0.8 nats in small language models, docs/adam.md): use 'adam', with optimizer=, or co3",
                stacklevel=2,
            )

    def end(self) -> None:
        """Stop waiting."""
        _watches.discard(self)


@lru_cache(maxsize=1)
def _hook() -> object:
    """Let all watches look at every step. The hook stays: torch goes through its hooks while they are called."""
    return register_optimizer_step_pre_hook(_before_any_step)


def _before_any_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for watch in list(_watches):
        watch.before_step(optimizer)
