"""Momentum on the worker's side of a sparse codec (DGC, arXiv 1712.01887; SBC, arXiv 1805.08768).

An optimizer that adds momentum after the exchange gives an entry that waited n steps in the error memory the
momentum of one step. So the velocity is accumulated before the exchange, by every worker for itself:

    v ← m·v + g        (Nesterov: v ← m·(v + g), and v + g is passed on)
    sent = C(v + e)    and e ← v + e − sent, as with any codec
    v ← 0 where sent ≠ 0    (momentum factor masking: what was sent must not push a second time)

Like error memory, velocity is kept by parameter name and provisional until `commit`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ..errors import SpecError

MOMENTS = ("momentum_buffer", "exp_avg", "momentum")  # what SGD, the Adams and RMSprop call it


@dataclass(frozen=True)
class Factor:
    """How a parameter group uses momentum."""

    momentum: float
    nesterov: bool


class Velocity:
    """The velocities of this worker, by parameter name."""

    def __init__(self) -> None:
        self.memory: dict[str, torch.Tensor] = {}
        self._pending: dict[str, torch.Tensor] = {}

    def push(self, name: str, gradient: torch.Tensor, factor: Factor) -> torch.Tensor:
        """What to send in place of the gradient."""
        before = self.memory.get(name)
        gradient = gradient.float()
        if before is None:
            before = torch.zeros_like(gradient)
        before = before.to(gradient.device)
        if factor.nesterov:
            velocity = (before + gradient) * factor.momentum
            passed_on = velocity + gradient
        else:
            velocity = before * factor.momentum + gradient
            passed_on = velocity.clone()
        self._pending[name] = velocity
        return passed_on

    def mask(self, name: str, sent: torch.Tensor) -> None:
        self._pending[name].masked_fill_(sent.view_as(self._pending[name]), 0)

    def commit(self) -> None:
        self.memory.update(self._pending)
        self._pending.clear()

    def rollback(self) -> None:
        self._pending.clear()


def take_over(optimizer: torch.optim.Optimizer) -> dict[int, Factor]:
    """From now on momentum is ours: each parameter's factor, by id; the optimizer's own are set to 0."""
    if not isinstance(optimizer, torch.optim.SGD):
        raise SpecError(
            f"momentum correction is defined for SGD, not {type(optimizer).__name__}: use gradwire.LocalSGD, which "
            "masks the momentum of any optimizer, or switch it off in the spec (mask=off)"
        )
    if any(group["dampening"] for group in optimizer.param_groups):
        raise SpecError("momentum correction knows no dampening: build the SGD optimizer with dampening=0")
    factors = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            factors[id(parameter)] = Factor(group["momentum"], bool(group["nesterov"]))
        # SGD checks that Nesterov has a momentum when it is built, not later.
        group["gradwire_momentum"], group["momentum"] = group["momentum"], 0
    return factors


def give_back(optimizer: torch.optim.Optimizer) -> None:
    """The optimizer has its momentum again, from zero on."""
    for group in optimizer.param_groups:
        if "gradwire_momentum" in group:
            group["momentum"] = group.pop("gradwire_momentum")


def mask_optimizer(optimizer: torch.optim.Optimizer, sent: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Zero the optimizer's own momentum where a worker's local update was sent: (parameter, mask) pairs."""
    for parameter, mask in sent:
        state = optimizer.state.get(parameter, {})
        for key in MOMENTS:
            moment = state.get(key)
            if isinstance(moment, torch.Tensor) and moment.shape == parameter.shape:
                moment.masked_fill_(mask.view(parameter.shape).to(moment.device), 0)
