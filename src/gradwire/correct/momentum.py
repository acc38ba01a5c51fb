"""Momentum on the worker's side of a sparse codec (DGC, arXiv 1712.01887; SBC, arXiv 1805.08768).

An optimizer that adds momentum after the exchange gives an entry that waited n steps in the error memory the
momentum of one step. So the velocity is accumulated before the exchange, by every worker for itself:

    v ← m·v + g        (g with SGD's weight decay; Nesterov: g + m·v is passed on in place of v)
    sent = C(v + e)    and e ← v + e − sent, as with any codec
    v ← 0 where sent ≠ 0    (momentum factor masking: what was sent must not push a second time)

Like error memory, velocity is kept by parameter name and provisional until `commit`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, NamedTuple
from weakref import WeakSet

import torch

from gradwire.correct.complex_pairs import as_reals
from gradwire.errors import GradwireError, SpecError

MOMENTS = ("momentum_buffer", "exp_avg")  # what SGD and RMSprop, and the Adams call it


class Factor(NamedTuple):
    """How SGD makes a step of a parameter's gradient."""

    parameter: torch.Tensor
    momentum: float
    nesterov: bool
    weight_decay: float


class Velocity:
    """The velocities of this worker, by parameter name."""

    def __init__(self) -> None:
        self.memory: dict[str, torch.Tensor] = {}
        self._pending: dict[str, torch.Tensor] = {}
        self._spare: dict[str, torch.Tensor] = {}  # of `buffers`, which allocates nothing after the first steps

    def buffers(self, name: str, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor] | None:
        """Return (velocity so far, where the new one goes), for somebody who does what `push` does on a GPU.

        None if that velocity has been pushed in this step, or lies elsewhere: `push` knows what to do then.
        """
        before = self.memory.get(name)
        if name in self._pending or (before is not None and not _alike(before, gradient)):
            return None
        spare = self._spare.pop(name, None)
        if spare is None or not _alike(spare, gradient):
            spare = torch.empty(gradient.shape, dtype=torch.float32, device=gradient.device)
        self._pending[name] = self._spare[name] = spare
        return before, spare

    def pending(self, name: str) -> torch.Tensor | None:
        """Return the velocity that was pushed in this step."""
        return self._pending.get(name)

    def push(self, name: str, gradient: torch.Tensor, factor: Factor) -> torch.Tensor:
        """Return what to send, or to step along, in place of the gradient: torch.optim.SGD's arithmetic, in fp32."""
        gradient = gradient.float()
        if factor.weight_decay:
            parameter = factor.parameter.detach().float().to(gradient.device).contiguous()
            gradient = gradient.add(parameter, alpha=factor.weight_decay)
        if not factor.momentum:
            return gradient
        before, pushed = self.memory.get(name), self._pending.get(name)
        if pushed is not None:  # for another part of it, which may have been masked since
            velocity = pushed
        elif before is None:
            velocity = gradient.clone()
        else:
            velocity = (before.to(gradient.device) * factor.momentum).add_(gradient)
        self._pending[name] = velocity
        return gradient.add(velocity, alpha=factor.momentum) if factor.nesterov else velocity

    def mask(self, name: str, sent: torch.Tensor, lo: int = 0) -> None:
        """Let entries from index `lo` on that were sent start again from zero."""
        if name in self._pending:
            velocity = self._pending[name].view(-1)[lo : lo + sent.numel()]
            velocity.masked_fill_(sent.view(-1).to(velocity.device), 0)

    def rescale(self, factor: float) -> None:
        """Multiply all velocities: gradients are this many times larger from now on, because a loss scale changed."""
        for velocity in self.memory.values():
            velocity.mul_(factor)

    def adopt(self, velocities: Mapping[str, torch.Tensor]) -> None:
        """Go on from velocities that an optimizer has accumulated so far."""
        self.memory.update(velocities)

    def rearrange(self, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Put the entries of a velocity in another order, between two steps."""
        self._spare.pop(name, None)
        if name in self.memory:
            self.memory[name] = change(self.memory[name])

    def load(self, velocities: Mapping[str, torch.Tensor]) -> None:
        """Take over these velocities, which nobody else writes to, in place of all that there are."""
        self.memory = dict(velocities)
        self._spare.clear()
        self._pending.clear()

    def commit(self) -> None:
        """End a step whose gradients were finite on all workers: its velocities count from now on."""
        for name in self._spare.keys() & self._pending.keys():
            before = self.memory.get(name)
            if before is None:
                del self._spare[name]
            else:
                self._spare[name] = before
        self.memory.update(self._pending)
        self._pending.clear()

    def rollback(self) -> None:
        """End a step with a gradient that was not finite: velocities stay what they were before the step."""
        self._pending.clear()


def _alike(velocity: torch.Tensor, gradient: torch.Tensor) -> bool:
    return (
        velocity.device == gradient.device
        and velocity.shape == gradient.shape
        and velocity.dtype == torch.float32
        and velocity.is_contiguous()
    )


class Takeover:
    """While it lasts, momentum and weight decay are ours, and the optimizer's own steps know neither.

    Its groups show both as ever, for schedulers and checkpoints: they are 0 only while `step` runs.
    """

    _taken: ClassVar[WeakSet[torch.optim.Optimizer]] = WeakSet()

    def __init__(self, optimizer: torch.optim.Optimizer):
        if not isinstance(optimizer, torch.optim.SGD):
            raise SpecError(
                f"momentum correction is defined for SGD, not {type(optimizer).__name__}: use gradwire.LocalSGD, which "
                "masks the momentum of any optimizer, or switch it off in the spec (mask=off)"
            )
        if any(group["dampening"] for group in optimizer.param_groups):
            raise SpecError("momentum correction knows no dampening: build the SGD optimizer with dampening=0")
        if optimizer in self._taken:
            raise GradwireError("another model has taken over this optimizer's momentum: detach it first")
        self.optimizer = optimizer
        self._held: list[tuple[dict[str, Any], float, float]] = []
        self._taken.add(optimizer)
        self._hooks = [
            optimizer.register_step_pre_hook(lambda *_: self._hold()),
            optimizer.register_step_post_hook(lambda *_: self._restore()),
        ]

    def factors(self) -> dict[int, Factor]:
        """Return the factors of each parameter, by its id, as the optimizer's groups have them now."""
        self._restore()  # of no effect, unless the last step failed midway
        return {
            id(p): Factor(
                p, g["momentum"], bool(g["nesterov"]), -g["weight_decay"] if g["maximize"] else g["weight_decay"]
            )
            for g in self.optimizer.param_groups
            for p in g["params"]
        }

    def take_buffers(self) -> dict[int, torch.Tensor]:
        """Return the velocities that the optimizer has by now, by id of the parameter, and take them from it.

        It starts from zero when it gets its momentum back.
        """
        velocities = {}
        for parameter, state in self.optimizer.state.items():
            buffer = state.pop("momentum_buffer", None)
            if buffer is not None:
                velocities[id(parameter)] = as_reals(buffer.detach()).float().clone()
        return velocities

    def release(self) -> None:
        """Give momentum and weight decay back to the optimizer."""
        self._restore()
        for hook in self._hooks:
            hook.remove()
        self._taken.discard(self.optimizer)

    def _hold(self) -> None:
        self._restore()
        for group in self.optimizer.param_groups:
            self._held.append((group, group["momentum"], group["weight_decay"]))
            group["momentum"] = group["weight_decay"] = 0

    def _restore(self) -> None:
        for group, momentum, weight_decay in self._held:
            group["momentum"], group["weight_decay"] = momentum, weight_decay
        self._held.clear()


def mask_optimizer(optimizer: torch.optim.Optimizer, sent: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Zero the optimizer's own momentum where a worker's local update was sent: (parameter, mask) pairs."""
    for parameter, mask in sent:
        state = optimizer.state.get(parameter, {})
        for key in MOMENTS:
            moment = state.get(key)
            if isinstance(moment, torch.Tensor) and moment.shape == parameter.shape:
                entries = as_reals(moment)
                entries.masked_fill_(mask.view(entries.shape).to(entries.device), 0)


def reset_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Clear the optimizer's state after a divergence: its momentum, and whatever is not finite."""
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and (key in MOMENTS or not value.isfinite().all()):
                value.zero_()
