"""Communication delay: several local steps, then one exchange of the compressed update.

    with gradwire.LocalSGD(model, optimizer, "sbc:p=0.01", sync_every=10):
        for x, y in loader:                       # the loop stays as it is, without DDP
            optimizer.zero_grad(); loss(model(x), y).backward(); optimizer.step()

Every `sync_every` optimizer steps (SBC, arXiv 1805.08768):
1. Δ = parameters − those of the last sync, plus the error memory, becomes frames, and all ranks average them;
2. an outer optimizer (DiLoCo, arXiv 2311.08105; plain averaging by default) moves the common parameters by the
   mean, and all ranks go on from them; floating-point buffers are averaged;
3. where this rank's Δ was sent, its optimizer's momentum is cleared (`mask`): it must not push there again.

Ranks may take different numbers of steps: one that leaves the `with` block answers the others until all have left.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from . import wire
from .aggregate.mean import Mean, Spec
from .catalogue import recipe
from .correct.momentum import MOMENTS, mask_optimizer
from .errors import GradwireError, SpecError

LEFT, SENT = 1, 2  # bits of the note before a rank's frames: it has left the block; frames follow
BUFFERS = "buffer:"  # before the names of buffers, which no parameter's name has
Outer = Callable[[list[torch.Tensor]], torch.optim.Optimizer]
Schedule = int | Callable[[int], int]


class LocalSGD:
    """Local steps with compressed synchronization, as a context manager around the training loop.

    `sync_every` is a number of steps, or a function from the step to one; by default the recipe's own (sbc2: 10).
    `outer` makes the optimizer of the common parameters, such as `lambda p: torch.optim.SGD(p, lr=0.7,
    momentum=0.9, nesterov=True)`; by default it is the recipe's own, or plain averaging.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        spec: Spec = "sbc2",
        sync_every: Schedule | None = None,
        *,
        outer: Outer | None = None,
        process_group: dist.ProcessGroup | None = None,
    ):
        if isinstance(model, DistributedDataParallel):
            raise GradwireError("LocalSGD takes the place of DistributedDataParallel: pass the model itself")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise GradwireError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
        self.model, self.optimizer = model, optimizer
        self.mean = Mean(spec, process_group)
        first = next(iter(self.mean.recipes.values()))
        self.sync_every: Schedule = first.sync_schedule if sync_every is None else sync_every
        if not callable(self.sync_every) and (not isinstance(self.sync_every, int) or self.sync_every < 1):
            raise SpecError(f"sync_every must be 1 or more steps, or a function of the step, not {sync_every!r}")
        self.mean.recipes = {f"{BUFFERS}*": recipe("bf16"), **self.mean.recipes}
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        for name in self._parameters:
            self.mean.recipe_of(name)
        self._anchor = {name: p.detach().clone() for name, p in self._parameters.items()}
        self._outer = (outer or first.outer)(list(self._anchor.values()))
        self.mean.total = sum(p.numel() for p in self._parameters.values())
        self.steps = self.pending = self.syncs = 0  # steps in all and since the last sync, syncs
        self.dense_bytes = 0
        self._steps_before = 0
        self._started = False
        self._hook: torch.utils.hooks.RemovableHandle | None = None

    # ── around the loop ──

    def __enter__(self) -> LocalSGD:
        if self._hook is not None:
            raise GradwireError("this LocalSGD is already in use")
        if not self._started:
            self._start_alike()
        self._hook = self.optimizer.register_step_post_hook(lambda *_: self._after_step())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._hook is not None
        self._hook.remove()
        self._hook = None
        if kind is None:
            while not self._sync(LEFT):
                pass

    def _start_alike(self) -> None:
        """All ranks start from rank 0's parameters and buffers."""
        group = self.mean.exchange.group
        source = dist.get_global_rank(group, 0)
        for tensor in (*self._parameters.values(), *self.model.buffers()):
            dist.broadcast(tensor.detach(), src=source, group=group)
        if self.pending == 0:
            self._take_anchor()
        self._started = True

    @torch.no_grad()
    def _take_anchor(self) -> None:
        for name, parameter in self._parameters.items():
            self._anchor[name].copy_(parameter)

    def _after_step(self) -> None:
        self.steps += 1
        self.pending += 1
        self.dense_bytes += 4 * self.mean.total
        every = self.sync_every(self.steps) if callable(self.sync_every) else self.sync_every
        if self.pending >= every:
            self._sync(0)

    def sync(self) -> None:
        """Exchange now, whatever `sync_every` says; all ranks must call it."""
        self._sync(0)

    # ── one sync ──

    @torch.no_grad()
    def _sync(self, left: int) -> bool:
        """Average the updates of all ranks that took steps; whether all ranks have left the block."""
        send = self.pending > 0
        updates = {name: p.float() - self._anchor[name].float() for name, p in self._parameters.items()}
        buffers = {name: b.clone() for name, b in self.model.named_buffers() if b.is_floating_point()}
        named = [*updates.items(), *((BUFFERS + name, b) for name, b in buffers.items())]
        try:
            self.mean.clock = self.steps
            note = left | (SENT if send else 0)
            pending = self.mean.start("sync", named, bytes([note]), send)
            messages = self.mean.wait(pending)
            notes = [int(message[0]) for message in messages]
            bodies = [m[1:] if n & SENT else None for m, n in zip(messages, notes, strict=True)]
            usable = self._drop_nonfinite(bodies)
            self.mean.average(pending, usable)
        except BaseException:
            self.mean.abandon_step()
            raise
        if any(body is not None for body in usable):
            self._move(updates)
            for name, buffer in self.model.named_buffers():
                if name in buffers:
                    buffer.copy_(buffers[name])
            self.syncs += 1
        sent = self.mean.take_sent()
        mask_optimizer(self.optimizer, ((self._parameters[name], where) for name, where in sent.items()))
        self.mean.end_step()
        self.pending = 0
        return all(n & LEFT for n in notes)

    def _move(self, means: dict[str, torch.Tensor]) -> None:
        """The common parameters make an outer step along the mean update; this rank goes on from there."""
        for name, anchor in self._anchor.items():
            anchor.grad = -means[name].to(anchor.dtype)
        self._outer.step()
        for name, parameter in self._parameters.items():
            self._anchor[name].grad = None
            parameter.copy_(self._anchor[name])

    def _drop_nonfinite(self, bodies: list[np.ndarray | None]) -> list[np.ndarray | None]:
        """A rank whose training has diverged must not take the others along: its update is left out."""
        usable = list(bodies)
        for rank, body in enumerate(bodies):
            if body is not None and any(wire.read_header(frame).nonfinite for frame in wire.split(memoryview(body))):
                usable[rank] = None
                warnings.warn(f"rank {rank} has a NaN or an infinity: its update is left out", stacklevel=2)
                if rank == self.mean.exchange.rank:
                    self._forget()
        if any(body is not None for body in bodies) and not any(body is not None for body in usable):
            raise GradwireError("all ranks have a NaN or an infinity in their parameters: the training has diverged")
        return usable

    def _forget(self) -> None:
        """Nothing of this rank's update was used: keep the old error memory, and no momentum."""
        self.mean.residual.rollback()
        for state in self.optimizer.state.values():
            for key in MOMENTS:
                if isinstance(state.get(key), torch.Tensor):
                    state[key].zero_()

    # ── what users see ──

    @contextmanager
    @torch.no_grad()
    def common_parameters(self) -> Iterator[None]:
        """For evaluation between syncs: while it lasts, the model has the parameters that all ranks share.

        What is done to parameters and buffers in the meantime is undone.
        """
        tensors = [*self._parameters.values(), *self.model.buffers()]
        own = [t.clone() for t in tensors]
        for name, parameter in self._parameters.items():
            parameter.copy_(self._anchor[name])
        try:
            yield
        finally:
            for tensor, before in zip(tensors, own, strict=True):
                tensor.copy_(before)

    def stats(self) -> dict[str, float]:
        """Totals of this rank; `dense_bytes` is what fp32 gradients of all local steps would have been."""
        own = self.mean.stats()
        return {
            "steps": self.steps - self._steps_before,
            "syncs": self.syncs,
            **own,
            "dense_bytes": self.dense_bytes,
            "ratio": self.dense_bytes / own["frame_bytes"] if own["frame_bytes"] else 1.0,
        }

    def state_dict(self) -> dict[str, Any]:
        """This rank's error memory, its place between two syncs and the outer optimizer.

        Save the model and the optimizer of every rank beside it: between syncs they differ.
        """
        anchor = {name: a.detach().cpu().clone() for name, a in self._anchor.items()}
        own = {"local_steps": self.steps, "pending": self.pending, "anchor": anchor, "outer": self._outer.state_dict()}
        return {**self.mean.state_dict(), **own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        anchor = state.get("anchor")
        if not isinstance(anchor, dict) or set(anchor) != set(self._anchor):
            raise GradwireError("not the state of a LocalSGD of this model")
        self.mean.load_state_dict(state, set(self._parameters))
        with torch.no_grad():
            for name, saved in anchor.items():
                self._anchor[name].copy_(saved)
        self._outer.load_state_dict(state["outer"])
        self.steps = self._steps_before = int(state["local_steps"])
        self.pending = int(state["pending"])
        self._started = True
