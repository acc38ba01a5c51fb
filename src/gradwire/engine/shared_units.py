"""The units of Adam's steps in which gradients are exchanged: measured now and then, and the same on all ranks.

Units are measured in the first steps and then every `EVERY`, from the optimizer's second moments. A checksum of them
goes to all ranks. If it is the same everywhere, the new units count from that step on; if not, because optimizers
differ (each rank keeps a part of the state, say), all ranks go on with the old ones, and say so once.
"""

from __future__ import annotations

import struct
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gradwire.aggregate.transport.link import Link
from gradwire.checkpoints.saved_values import tensors_in
from gradwire.correct.adam_units import Units, check_adam, checksum, exponents_of, measure_units, power_of_two
from gradwire.errors import CheckpointError

EVERY = 64  # steps; before them when steps double
CHECKSUM = struct.Struct("<I")
KEY, MEMORIES = "units", {"memory", "shards"}  # in a state

Arrange = Callable[[str, torch.Tensor], torch.Tensor]


def is_due(step: int) -> bool:
    """Tell whether units are measured before this step."""
    return step % EVERY == 0 if step > EVERY else step & (step - 1) == 0


class SharedUnits:
    """Scales gradients by units that all ranks share, and means back.

    The training's thread calls everything: `due` and `renew` before the first gradient of a step, `scale` for each
    gradient, and `unscale` when all of them are means.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Sequence[tuple[str, torch.Tensor]]):
        check_adam(optimizer, parameters)
        self._optimizer, self._parameters = optimizer, parameters
        self._units: dict[str, torch.Tensor] = {}  # in the order of the parameter's own dimensions
        self._factors: dict[str, torch.Tensor] = {}  # in the order of the bucket
        self._scaled: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._loaded: Units | None = None
        self._has_loaded = False  # since the last renewal: on all ranks, also on one whose state has no units
        self._differed = False

    def due(self, step: int) -> bool:
        """Tell whether units are to be measured before this step: the same on all ranks."""
        return self._has_loaded or is_due(step)

    def renew(self, link: Link, arrange: Arrange) -> dict[str, torch.Tensor]:
        """Measure the units, or take those that were loaded; return what memories are to be multiplied by.

        All ranks call it. The factors are in the order in which `arrange` puts the entries of a parameter.
        """
        units, self._loaded = self._loaded or measure_units(self._optimizer, self._parameters), None
        self._has_loaded = False
        own = CHECKSUM.pack(checksum(units))
        if any(other != own for other in link.gather_short(own)):
            if not self._differed:
                self._differed = True
                warnings.warn(
                    "the second moments of the optimizers differ between ranks, so that gradients are not scaled by "
                    "them: every rank has to keep all of the optimizer's state (no ZeRO), and take the same steps",
                    stacklevel=2,
                )
            return {}
        changes = {}
        for name, exponents in units.items():
            self._factors[name] = power_of_two(arrange(name, exponents).contiguous())
            old = self._units.get(name)
            change = exponents if old is None else exponents - old
            self._units[name] = exponents
            if bool(change.any()):
                changes[name] = power_of_two(arrange(name, change).contiguous())
        return changes

    def rearrange(self, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Put the factors of a parameter in another order, between two steps."""
        if name in self._factors:
            self._factors[name] = change(self._factors[name])

    @torch.no_grad()
    def scale(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Multiply gradients by their factors, in place."""
        for name, gradient in tensors:
            factor = self._factors.get(name)
            if factor is not None:
                gradient.mul_(factor)
                self._scaled.append((gradient, factor))

    @torch.no_grad()
    def unscale(self) -> None:
        """Divide the means by their factors."""
        for mean, factor in self._scaled:
            mean.div_(factor)
        self._scaled.clear()

    def abandon_step(self) -> None:
        """Forget the gradients of a step that is given up."""
        self._scaled.clear()

    # ── what is saved ──

    def without_units(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state of this rank whose memories are gradients as other recipes have them, in no units."""
        plain = dict(state)
        for key in MEMORIES & state.keys():
            plain[key] = {name: self._without_unit(name, memory) for name, memory in state[key].items()}
        return plain

    def _without_unit(self, name: str, memory: torch.Tensor) -> torch.Tensor:
        factor = self._factors.get(name)
        return memory if factor is None else memory / factor.to(memory.device)

    def state_dict(self) -> dict[str, Any]:
        """Return the units by parameter name, as factors, under a key of their own."""
        units = self._units if self._loaded is None else self._loaded
        return {KEY: {name: power_of_two(exponents).cpu() for name, exponents in units.items()}}

    def read_state(self, state: Any) -> Units:
        """Return the units in a state, none if it has none; CheckpointError if they are not of these parameters."""
        shapes = {name: parameter.shape for name, parameter in self._parameters}
        factors = tensors_in(state, KEY, shapes, shapes)
        if any(not bool((factor > 0).all()) for factor in factors.values()):
            raise CheckpointError("the units in this state are not powers of two: it is damaged")
        return {name: exponents_of(factor) for name, factor in factors.items()}

    def load(self, units: Units) -> None:
        """Take these units up before the next step; without any, they are measured then. Memories have none so far."""
        devices = {name: parameter.device for name, parameter in self._parameters}
        self._units, self._factors, self._scaled = {}, {}, []
        self._loaded = {name: exponents.to(devices[name]) for name, exponents in units.items()} or None
        self._has_loaded = True
