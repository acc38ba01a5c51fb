"""The model of one rank under LocalSGD, beside what all ranks share."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping

import torch
from torch import nn

from gradwire.aggregate.messages.model_recipes import ModelRecipes
from gradwire.correct.complex_pairs import as_reals
from gradwire.correct.error_memory_by_parameter import ErrorMemory
from gradwire.local_sgd.buffers import Buffers, has_real_entries
from gradwire.local_sgd.common_parameters import CommonParameters, Outer, tensor_bytes

Tensors = dict[str, torch.Tensor]


class Replica:
    """A model that makes steps of its own between syncs, and the parameters and buffers of the last sync.

    After a sync a rank goes on from a `beginning`, and what it has added since is its update. Nothing is sent here. The
    training's thread alone uses it, under no_grad.
    """

    def __init__(
        self, model: nn.Module, parameters: Mapping[str, nn.Parameter], outer: Outer, buffers: Buffers,
        recipes: ModelRecipes, errors: ErrorMemory,
    ):  # fmt: skip
        self.model, self.buffers = model, buffers
        self._parameters, self._recipes, self._errors = parameters, recipes, errors
        self.common = CommonParameters(self.entries(), outer)

    def entries(self, names: Collection[str] | None = None) -> Tensors:
        """Return the real entries of these parameters, or of all that are trained; complex ones are pairs of reals."""
        return {
            name: as_reals(self._parameters[name].detach()) for name in (self._parameters if names is None else names)
        }

    def beginning(self, name: str) -> torch.Tensor:
        """Return where this rank goes on from after a sync: the common parameters, plus a part of its error memory."""
        ahead, memory = self._recipes.of(name).ahead, self._errors.memory.get(name)
        anchor = self.common.tensors[name]
        return anchor if not ahead or memory is None else anchor + ahead * memory.to(anchor.device, anchor.dtype)

    def updates(self, names: Collection[str], ahead: bool = True) -> Tensors:
        """Return what local steps have added since the beginning, or to the common parameters if not `ahead`."""
        return {
            name: _difference(e, self.beginning(name) if ahead else self.common.tensors[name])
            for name, e in self.entries(names).items()
        }

    def go_on(
        self, names: Collection[str], sent: Mapping[str, torch.Tensor] | None = None, mix: float | None = None
    ) -> None:
        """Go on from the beginning, plus what this rank has changed since these parameters were `sent`.

        With `mix`, go on from this part of its own parameters and the rest of the beginning instead.
        """
        for name, entries in self.entries(names).items():
            beginning = self.beginning(name)
            if sent and mix is not None:
                beginning = mix * entries.to(beginning.dtype) + (1 - mix) * beginning
            elif sent:
                start = sent[name].to(entries.device, beginning.dtype)
                beginning = beginning + (entries.to(beginning.dtype) - start)
            entries.copy_(beginning)

    def take_common(self, names: Collection[str] | None = None) -> None:
        """Give the model what all ranks share: these parameters, or all; and all buffers."""
        for name, entries in self.entries(names).items():
            entries.copy_(self.common.tensors[name])
        self.buffers.take()

    def loaded(self) -> list[str]:
        """Return the parameters that changed between two blocks, such as by loading a model."""
        return [
            name
            for name, entries in self.entries().items()
            if not any(
                torch.equal(entries, t.to(entries.dtype)) for t in (self.common.tensors[name], self.beginning(name))
            )
        ]

    def digest(self, with_integers: bool) -> bytes:
        """Return bytes that differ where ranks have other numbers in what they are to share.

        Integer buffers count the steps of a rank, and may differ when it has made some.
        """
        frozen = [p.detach() for p in self.model.parameters() if not p.requires_grad]
        integers = [b for b in self.model.buffers() if with_integers and not has_real_entries(b)]
        sha = hashlib.sha256()
        for tensor in (*self.common.tensors.values(), *self.buffers.common.values(), *frozen, *integers):
            sha.update(tensor_bytes(tensor))
        for fact in self.common.outer_facts():
            sha.update(fact)
        return sha.digest()


def _difference(parameter: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
    """Return what local steps have added since the parameter was the anchor, rounded to its own dtype."""
    return (parameter.to(anchor.dtype) - anchor.to(parameter.dtype).to(anchor.dtype)).float()
