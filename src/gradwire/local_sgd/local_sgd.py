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

import copy
import hashlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, ClassVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn

from gradwire.aggregate.messages.message_coder import MessageCoder
from gradwire.aggregate.messages.model_recipes import ModelRecipes
from gradwire.aggregate.messages.step_ledger import StepLedger
from gradwire.aggregate.peers.handshake import describe
from gradwire.aggregate.transport.all_gather import AllGather
from gradwire.aggregate.transport.link import Link
from gradwire.catalogue.saved_recipes import KEY
from gradwire.catalogue.spec_by_name import Spec, warn_of_idle_patterns
from gradwire.correct.complex_pairs import as_reals
from gradwire.correct.momentum import mask_optimizer, reset_optimizer
from gradwire.correct.worker_memories import WorkerMemories
from gradwire.errors import AggregateError, GradwireError, SpecError
from gradwire.local_sgd.buffers import Buffers, has_real_entries
from gradwire.local_sgd.checks import check_model, check_parameters, checked_steps, divide_spec, trainable
from gradwire.local_sgd.saved_state import read_state
from gradwire.local_sgd.sync_round import SyncRound

Outer = Callable[[list[torch.Tensor]], torch.optim.Optimizer]
Schedule = int | Callable[[int], int]


class LocalSGD:
    """Local steps with compressed synchronization, as a context manager around the training loop.

    `sync_every` is a number of steps, or a function from the step to one; by default the recipe's own (sbc2: 10).
    `outer` makes the optimizer of the common parameters, such as `lambda p: torch.optim.SGD(p, lr=0.7,
    momentum=0.9, nesterov=True)`; by default it is the recipe's own, or plain averaging.
    """

    _in_use: ClassVar[WeakSet[torch.optim.Optimizer]] = WeakSet()

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
        check_model(model, optimizer)
        self.model, self.optimizer = model, optimizer
        spec, of_buffers = divide_spec(spec)
        self.recipes = ModelRecipes(spec)
        self.memories, self.ledger = WorkerMemories(), StepLedger()
        self._group = process_group
        self._round: SyncRound | None = None  # from the first block on, when the ranks have met
        self._parameters = trainable(model)
        self._check_recipes()
        slowest = max(self.recipes.by_pattern.values(), key=lambda recipe: recipe.sync_every)
        self.sync_every: Schedule = slowest.sync_schedule if sync_every is None else sync_every
        if not callable(self.sync_every):
            checked_steps(self.sync_every)
        # The common parameters: those of the last sync, the same on all ranks, in fp32 at least.
        self._anchor = {
            name: p.to(torch.promote_types(p.dtype, torch.float32), copy=True) for name, p in self._entries().items()
        }
        self._buffers = Buffers(model, of_buffers)
        self._buffers_every = slowest.buffers_every
        self._outer = (outer or slowest.outer)(list(self._anchor.values()))
        warn_of_idle_patterns(self.recipes.by_pattern, (name for name, _ in model.named_parameters()))
        self.recipes.know_model(self._entries().items())
        self.steps = self.pending = self.syncs = 0  # steps in all and since the last sync, syncs
        self.dense_bytes = 0
        self._steps_before = 0
        self._started = False
        self._inside = False  # in the block, or left by an exception: this rank has parameters and buffers of its own
        self._resumed = False  # from a state that was saved there
        self._hook: torch.utils.hooks.RemovableHandle | None = None
        self._reminder = optimizer.register_step_post_hook(_remind)

    def _entries(self) -> dict[str, torch.Tensor]:
        """Return the real entries of the parameters that are trained, by name; complex ones are pairs of reals."""
        return {name: as_reals(p.detach()) for name, p in self._parameters.items()}

    def _check_recipes(self) -> None:
        for name in self._parameters:
            if self.recipes.of(name).clip:
                raise SpecError("clip_norm is for gradients, and LocalSGD sends updates: clip in your loop")

    # ── around the loop ──

    def __enter__(self) -> LocalSGD:
        if self._hook is not None or self.optimizer in self._in_use:
            raise GradwireError("this optimizer is already in a LocalSGD block: leave that one first")
        self._reminder.remove()
        self._start_alike()
        self._inside = True
        self._hook = self.optimizer.register_step_post_hook(lambda *_: self._after_step())
        self._in_use.add(self.optimizer)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._hook is not None
        self._hook.remove()
        self._hook = None
        self._in_use.discard(self.optimizer)
        if kind is None:
            while not self._sync(left=True):
                pass
            if self.recipes.any("flush"):
                self._sync(left=True, last=True)
            self._inside = False

    def _connected(self) -> SyncRound:
        if self._round is None:
            gather = AllGather(Link(self._group))
            coder = MessageCoder(self.recipes, self.memories, self.ledger, gather.link.rank, gather.link.world)
            self._round = SyncRound(coder, gather, self._buffers)
        return self._round

    @property
    def _link(self) -> Link:
        return self._connected().gather.link

    @torch.no_grad()
    def _start_alike(self) -> None:
        """Start all ranks from the same parameters and buffers: rank 0's, which travel only if they differ."""
        if self.pending == 0:
            loaded = [] if self._resumed else self._loaded()
            for name in loaded:
                self._anchor[name].copy_(as_reals(self._parameters[name].detach()))
            if loaded or not self._inside:
                self._buffers.follow()
        link = self._link
        named = (*self.model.named_parameters(), *self.model.named_buffers())
        link.agree({"spec": str(self.recipes)}, describe(named))
        states = link.gather_short(self._digest() + bytes([self.pending > 0]))
        if len({state[:-1] for state in states}) > 1:
            if any(state[-1] for state in states):
                raise AggregateError(
                    "ranks are in the middle of a round, with different common parameters: load the same checkpoint"
                )
            self._take_common()
            for tensor in (*self.model.parameters(), *self.model.buffers()):
                link.broadcast(tensor)
            for name, entries in self._entries().items():
                self._anchor[name].copy_(entries)
            self._buffers.follow()
        if self.pending == 0:
            self._go_on()
        self._started, self._resumed = True, False

    def _loaded(self) -> list[str]:
        """Return the parameters that changed between two blocks, such as by loading a model."""
        return [
            name
            for name, entries in self._entries().items()
            if not any(torch.equal(entries, t.to(entries.dtype)) for t in (self._anchor[name], self._beginning(name)))
        ]

    def _digest(self) -> bytes:
        """Return bytes that differ where ranks have other numbers in their parameters and buffers."""
        frozen = [p.detach() for p in self.model.parameters() if not p.requires_grad]
        # Integer buffers count the steps of a rank, and may differ later.
        integers = [] if self._started else [b for b in self.model.buffers() if not has_real_entries(b)]
        sha = hashlib.sha256()
        for tensor in (*self._anchor.values(), *self._buffers.common.values(), *frozen, *integers):
            sha.update(tensor.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data)
        return sha.digest()

    def _after_step(self) -> None:
        self.steps += 1
        self.pending += 1
        self.dense_bytes += 4 * self.recipes.total
        every = self.sync_every(self.steps) if callable(self.sync_every) else self.sync_every
        if self.pending >= checked_steps(every):
            self._sync()

    def sync(self) -> None:
        """Exchange now, whatever `sync_every` says; all ranks must call it."""
        if self._hook is None:
            raise GradwireError("sync() belongs in the `with` block")
        self._sync()

    # ── one sync ──

    @torch.no_grad()
    def _sync(self, left: bool = False, last: bool = False) -> bool:
        """Average the updates of all ranks that took steps; return whether all ranks have left the block.

        The `last` sync sends a larger part of what is left in the error memories, since no step is to follow; the model
        is at the common parameters then.
        """
        check_parameters(self._parameters, trainable(self.model))
        means = {
            name: _difference(entries, self._anchor[name] if last else self._beginning(name))
            for name, entries in self._entries().items()
            if not last or self._has_rest(name, entries.numel())
        }
        send = last or self.pending > 0
        if left:
            with_buffers = send or self._buffers.changed()
        else:
            with_buffers = send and self.ledger.steps % self._buffers_every == 0
        sync_round = self._connected()
        try:
            with self.ledger.waiting():
                arrived = sync_round.run(means, self.steps, send=send, left=left, with_buffers=with_buffers, last=last)
        except BaseException as error:
            self._link.give_up(error)
            sync_round.coder.abandon_step()
            raise
        own = arrived[self._link.rank]
        if any(update.usable for update in arrived):
            self._move(means)
            self.syncs += 1
        if own.diverged:
            # Nothing of this rank's update was used: it keeps its old error memory, and no momentum.
            self.memories.errors.rollback()
            reset_optimizer(self.optimizer)
        else:
            sent = self.memories.take_sent()
            mask_optimizer(self.optimizer, ((self._parameters[name], where) for name, where in sent.items()))
        sync_round.coder.end_step()
        self._link.at_step(self.ledger.steps)
        if left:
            self._take_common()
        elif any(update.sent for update in arrived):
            if with_buffers or own.diverged:
                self._buffers.take(only_averaged=not own.diverged)
            self._go_on()
        self.pending = 0
        return all(update.left for update in arrived)

    def _move(self, means: dict[str, torch.Tensor]) -> None:
        """Move the common parameters by an outer step along the mean update."""
        for name, mean in means.items():
            self._anchor[name].grad = -mean.to(self._anchor[name].dtype)
        self._outer.step()
        for anchor in self._anchor.values():
            anchor.grad = None

    def _has_rest(self, name: str, entries: int) -> bool:
        """Return whether the last sync has something to send of this parameter."""
        return self.recipes.of(name).flush > 0 and self.recipes.of_tensor(name, entries).decay > 0

    def _beginning(self, name: str) -> torch.Tensor:
        """Return where this rank goes on from after a sync: the common parameters, plus a part of its error memory."""
        ahead, memory = self.recipes.of(name).ahead, self.memories.errors.memory.get(name)
        anchor = self._anchor[name]
        return anchor if not ahead or memory is None else anchor + ahead * memory.to(anchor.device, anchor.dtype)

    def _go_on(self) -> None:
        for name, entries in self._entries().items():
            entries.copy_(self._beginning(name))

    def _take_common(self) -> None:
        """Give the model the parameters and buffers that all ranks share."""
        for name, entries in self._entries().items():
            entries.copy_(self._anchor[name])
        self._buffers.take()

    # ── what users see ──

    @contextmanager
    @torch.no_grad()
    def common_parameters(self) -> Iterator[None]:
        """Give the model the common parameters and buffers while the block lasts, for evaluation between syncs.

        What is done to them in the meantime is undone.
        """
        tensors = [*self._parameters.values(), *self.model.buffers()]
        own = [t.clone() for t in tensors]
        self._take_common()
        try:
            yield
        finally:
            for tensor, before in zip(tensors, own, strict=True):
                tensor.copy_(before)

    def stats(self) -> dict[str, float]:
        """Return the totals of this rank; `dense_bytes` is what fp32 gradients of all local steps would have been."""
        figures, link = self.ledger.stats(), None if self._round is None else self._link
        return {
            "steps": self.steps - self._steps_before,
            "syncs": self.syncs,
            **figures,
            "wire_bytes_sent": link.bytes_sent if link else 0,
            "wire_bytes_received": link.bytes_received if link else 0,
            "dense_bytes": self.dense_bytes,
            "ratio": self.dense_bytes / figures["frame_bytes"] if figures["frame_bytes"] else 1.0,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's error memory, its place between two syncs, the common parameters and the outer optimizer.

        Save the model and the optimizer of every rank beside it: between syncs they differ.
        """
        return {
            "steps": self.ledger.steps,
            KEY: self.recipes.state_dict(),
            **self.memories.state_dict(),
            "local_steps": self.steps,
            "pending": self.pending,
            "inside": self._inside,
            "anchor": {name: a.detach().cpu().clone() for name, a in self._anchor.items()},
            "buffers": {name: b.detach().cpu().clone() for name, b in self._buffers.common.items()},
            "outer": copy.deepcopy(self._outer.state_dict()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state of this rank; before the `with` block.

        A state that does not fit is a CheckpointError, and changes nothing.
        """
        if self._hook is not None:
            raise GradwireError("load the state before the `with` block")
        saved = read_state(state, self.recipes, self._anchor, self._buffers.common, self._outer)
        self.memories.load(saved.memories)
        self.ledger.resume_at(saved.memories.steps)
        with torch.no_grad():
            for name, anchor in saved.anchor.items():
                self._anchor[name].copy_(anchor)
            self._buffers.load(saved.buffers)
        self._outer.load_state_dict(saved.outer)
        self.steps = self._steps_before = saved.local_steps
        self.pending = saved.pending
        self._inside = self._resumed = saved.inside
        self._started = True


def _remind(*_: object) -> None:
    """Warn of steps before the block is entered for the first time. It keeps no hold of the LocalSGD."""
    warnings.warn(
        "the optimizer steps outside of the LocalSGD block, so nothing is exchanged: use `with LocalSGD(…):`",
        stacklevel=3,
    )


def _difference(parameter: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
    """Return what local steps have added since the parameter was the anchor, rounded to its own dtype."""
    return (parameter.to(anchor.dtype) - anchor.to(parameter.dtype).to(anchor.dtype)).float()
