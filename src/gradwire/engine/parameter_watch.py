"""Notices parameters that are trained without being averaged: such a model drifts apart on the ranks, silently."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from gradwire.errors import GradwireError
from gradwire.torch_internals.modules import held_by


def named_parameters(module: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """Return parameters by the names that they have without torch.compile: specs and checkpoints go by those."""
    return [(name.replace("_orig_mod.", ""), parameter) for name, parameter in module.named_parameters()]


class ParameterWatch:
    """Looks for parameters that came into a model after it was wrapped, or were frozen then and are trained now.

    Looking costs some ten microseconds for a model of a hundred layers: as long as all modules hold the same objects
    as the last time, nothing else is looked at.
    """

    def __init__(self, model: torch.nn.Module, averaged: Iterable[torch.nn.Parameter]):
        self._model = model
        self._averaged = {id(parameter): parameter for parameter in averaged}  # held, so that an id means one object
        self._frozen_at_first = {id(p): p for p in model.parameters() if id(p) not in self._averaged}
        self._look()

    def _look(self) -> None:
        self._held_by_modules = [held for m in self._model.modules() for held in held_by(m)]
        self._held = self._ids()
        self._others = [(name, p) for name, p in named_parameters(self._model) if id(p) not in self._averaged]

    def _ids(self) -> list[int]:
        return [id(thing) for held in self._held_by_modules for thing in held.values()]

    def not_averaged(self) -> list[str]:
        """Return why each parameter that is trained now but not averaged is not, in words that begin with its name."""
        if self._ids() != self._held:
            self._look()
        return [
            f"{name!r} was frozen when the model was wrapped"
            if id(parameter) in self._frozen_at_first
            else f"{name!r} came into the model after it was wrapped"
            for name, parameter in self._others
            if parameter.requires_grad
        ]

    def check(self, fix: str) -> None:
        """Raise GradwireError if a parameter is trained that is not averaged; `fix` says what to do."""
        reasons = self.not_averaged()
        if reasons:
            more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
            raise GradwireError(f"{reasons[0]}, so that its gradient would not be averaged{more}: {fix}")
