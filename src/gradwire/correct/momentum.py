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

BLOCK = 1 << 16  # entries
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

    def push(self, name: str, gradient: torch.Tensor, factor: Factor, entries: slice | None = None) -> torch.Tensor:
        """Return what to send, or to step along, in place of the gradient: torch.optim.SGD's arithmetic, in fp32.

        With `entries` it is returned for these alone, flat. The first call of a step pushes the whole velocity; those
        for other entries find it as it is by then, as it may have been masked since.
        """
        if factor.momentum and name not in self._pending:
            before, velocity = self.buffers(name, gradient) or (self.memory.get(name), None)
            if velocity is None:
                velocity = torch.empty(gradient.shape, dtype=torch.float32, device=gradient.device)
            _push(gradient, None if before is None else before.to(gradient.device), velocity, factor)
            self._pending[name] = velocity
        velocity = self._pending[name] if factor.momentum else None
        if velocity is not None and not factor.nesterov:
            return velocity if entries is None else velocity.view(-1)[entries]
        part = slice(None) if entries is None else entries
        passed = _with_decay(gradient.reshape(-1)[part], _entries_of_parameter(gradient, factor), part, factor)
        if velocity is not None:
            passed = passed.add(velocity.view(-1)[part], alpha=factor.momentum)
        return passed.view(gradient.shape) if entries is None else passed

    def mask(self, name: str, sent: torch.Tensor, lo: int = 0) -> None:
        """Let entries from index `lo` on that were sent start again from zero."""
        if name in self._pending:
            velocity = self._pending[name].view(-1)[lo : lo + sent.numel()]
            velocity.masked_fill_(sent.view(-1).to(velocity.device), 0)

    def clear(self, name: str, positions: torch.Tensor) -> None:
        """Let the entries at these positions, which were sent, start again from zero."""
        if name in self._pending:
            velocity = self._pending[name].view(-1)
            velocity.index_fill_(0, positions.to(velocity.device), 0)

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


def _push(gradient: torch.Tensor, before: torch.Tensor | None, velocity: torch.Tensor, factor: Factor) -> None:
    """Write m·v + g to `velocity`; on the CPU block by block, so that what is computed of a block stays in a cache."""
    flat, new, parameter = gradient.reshape(-1), velocity.view(-1), _entries_of_parameter(gradient, factor)
    old = None if before is None else before.reshape(-1)
    for start in range(0, flat.numel(), BLOCK if flat.is_cpu else flat.numel()):
        part = slice(start, start + BLOCK if flat.is_cpu else flat.numel())
        added = _with_decay(flat[part], parameter, part, factor)
        if old is None:
            new[part].copy_(added)
        else:
            torch.mul(old[part], factor.momentum, out=new[part]).add_(added)


def _entries_of_parameter(gradient: torch.Tensor, factor: Factor) -> torch.Tensor | None:
    """Return the parameter, flat, if weight decay adds it to the gradient."""
    if not factor.weight_decay:
        return None
    return factor.parameter.detach().float().to(gradient.device).reshape(-1)


def _with_decay(gradient: torch.Tensor, parameter: torch.Tensor | None, part: slice, factor: Factor) -> torch.Tensor:
    """Return a part of a gradient, in fp32, with SGD's weight decay."""
    gradient = gradient.float()
    return gradient if parameter is None else gradient.add(parameter[part], alpha=factor.weight_decay)


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
