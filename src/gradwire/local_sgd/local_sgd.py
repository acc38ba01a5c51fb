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

import hashlib
import warnings
from collections.abc import Callable, Collection, Iterator
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
from gradwire.aggregate.transport.exchange_thread import ExchangeThread
from gradwire.aggregate.transport.link import Link
from gradwire.catalogue.saved_recipes import KEY
from gradwire.catalogue.spec_by_name import Spec, warn_of_idle_patterns
from gradwire.correct.complex_pairs import as_reals
from gradwire.correct.momentum import mask_optimizer, reset_optimizer
from gradwire.correct.worker_memories import WorkerMemories
from gradwire.errors import AggregateError, GradwireError
from gradwire.local_sgd.buffers import Buffers
from gradwire.local_sgd.checks import (
    check_mix,
    check_model,
    check_overlap,
    check_parameters,
    check_recipes,
    checked_steps,
    divide_spec,
    trainable,
)
from gradwire.local_sgd.common_parameters import Outer, outer_by_name
from gradwire.local_sgd.parts import Turns, divide
from gradwire.local_sgd.replica import Replica
from gradwire.local_sgd.saved_state import read_state
from gradwire.local_sgd.sync_round import RankUpdate, SyncRound
from gradwire.local_sgd.under_way import ExchangeUnderWay

Schedule = int | Callable[[int], int]


class LocalSGD:
    """Local steps with compressed synchronization, as a context manager around the training loop.

    `sync_every` is a number of steps, or a function from the step to one; by default the recipe's own (sbc2: 10).
    `outer` is the optimizer of the common parameters: "average", "nesterov" (SGD with lr 0.7 and Nesterov momentum 0.9,
    as DiLoCo's authors recommend), or a function that makes one of a list of tensors; by default the recipe's own.

    With `parts`, the model is exchanged in that many parts, one after the other, each once in `sync_every` steps. With
    `overlap`, an exchange goes on beside this many steps before its mean is waited for. Then a rank keeps what it has
    changed meanwhile, or, with `mix`, goes on from mix · its own parameters + (1 − mix) · the common ones.
    """

    _in_use: ClassVar[WeakSet[torch.optim.Optimizer]] = WeakSet()

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        spec: Spec = "sbc2",
        sync_every: Schedule | None = None,
        *,
        outer: Outer | str | None = None,
        parts: int = 1,
        overlap: int = 0,
        mix: float | None = None,
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
        check_recipes(self.recipes, self._parameters)
        slowest = max(self.recipes.by_pattern.values(), key=lambda recipe: recipe.sync_every)
        self.sync_every: Schedule = slowest.sync_schedule if sync_every is None else sync_every
        self._parts = divide({name: p.numel() for name, p in self._parameters.items()}, parts)
        self._turns = Turns(len(self._parts))
        self._overlap = check_overlap(overlap, self._turns, self.sync_every, self.recipes)
        self._mix = check_mix(mix, self._overlap, self.recipes)
        self._buffers = Buffers(model, of_buffers, self.recipes.by_pattern)
        self._replica = Replica(
            model, self._parameters, outer_by_name(slowest.outer if outer is None else outer), self._buffers,
            self.recipes, self.memories.errors,
        )  # fmt: skip
        self._common = self._replica.common
        self._buffers_every = slowest.buffers_every
        warn_of_idle_patterns(self.recipes.by_pattern, (name for name, _ in model.named_parameters()))
        self.recipes.know_model(self._replica.entries().items())
        self.steps = self.syncs = 0
        self.dense_bytes = 0
        self._steps_before = 0
        self._started = False
        self._inside = False  # in the block, or left by an exception: this rank has parameters and buffers of its own
        self._resumed = False  # from a state that was saved there
        self._under_way: ExchangeUnderWay | None = None  # not in the model yet
        self._hook: torch.utils.hooks.RemovableHandle | None = None
        self._reminder = optimizer.register_step_post_hook(_remind)

    @property
    def pending(self) -> int:
        """The steps of this rank since its last exchange."""
        return self._turns.since

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
            self._leave()
            self._inside = False

    @torch.no_grad()
    def _leave(self) -> None:
        """Answer the other ranks until all have left, and then all parts have been exchanged once more."""
        self._land()
        by_all = 0
        while by_all < len(self._parts):
            arrived = self._exchange_next_part(left=True)
            by_all = by_all + 1 if all(update.left for update in arrived) else 0
        if self.recipes.any("flush"):
            self._exchange_rest()
        self._connected().close()

    def _meet(self) -> Link:
        """Compare notes with the other ranks before a block, and connect to them before the first one."""
        named = (*self.model.named_parameters(), *self.model.named_buffers())
        notes = {"spec": str(self.recipes), **self._division}, describe(named)
        if self._round is not None:
            self._link.agree(*notes)
            return self._link
        link, thread = Link.attending(self._group), None
        link.agree(*notes)
        if self._overlap:
            # What goes on beside the training must not meet its collectives, and has a group of its own. It is made
            # after the agreement: a rank without overlap would not come, and the others would wait for it.
            met, link, thread = link, Link.beside(self._group), ExchangeThread()
            link.follow(met)
        coder = MessageCoder(self.recipes, self.memories, self.ledger, link.rank, link.world)
        self._round = SyncRound(coder, AllGather(link), self._buffers, thread)
        return link

    def _connected(self) -> SyncRound:
        assert self._round is not None, "ranks meet before the first block"
        return self._round

    @property
    def _link(self) -> Link:
        return self._connected().gather.link

    @torch.no_grad()
    def _start_alike(self) -> None:
        """Start all ranks from the same parameters and buffers: rank 0's, which travel only if they differ."""
        self._await()  # an exchange that an exception has left under way
        if not self._mid_round:
            loaded = [] if self._resumed else self._replica.loaded()
            for name in loaded:
                self._common.take(name, as_reals(self._parameters[name].detach()))
            if loaded or not self._inside:
                self._buffers.follow()
        link = self._meet()
        states = link.gather_short(self._replica.digest(with_integers=not self._started) + bytes([self._mid_round]))
        if len({state[:-1] for state in states}) > 1:
            if any(state[-1] for state in states):
                raise AggregateError(
                    "ranks are in the middle of a round, with different common parameters: load the same checkpoint"
                )
            self._check_same_outer(link)
            self._replica.take_common()
            for tensor in (*self.model.parameters(), *self.model.buffers()):
                link.broadcast(tensor)
            for name, entries in self._replica.entries().items():
                self._common.take(name, entries)
            self._buffers.follow()
        if not self._mid_round:
            self._replica.go_on(self._parameters)
        self._started, self._resumed = True, False

    @property
    def _mid_round(self) -> bool:
        return self._turns.mid_round or self._under_way is not None

    @property
    def _division(self) -> dict[str, str]:
        """What ranks have to agree on beside the recipes, if it is not as usual."""
        usual = len(self._parts) == 1 and not self._overlap
        return {} if usual else {"parts": str(len(self._parts)), "overlap": str(self._overlap), "mix": str(self._mix)}

    def _check_same_outer(self, link: Link) -> None:
        """Raise AggregateError on all ranks if their outer optimizers differ: these would move apart."""
        sha = hashlib.sha256()
        for fact in self._common.outer_facts():
            sha.update(fact)
        if len(set(link.gather_short(sha.digest()))) > 1:
            raise AggregateError(
                "the outer optimizers of ranks differ, in their settings or in what they remember: give all ranks the "
                "same `outer`, and load the state of a checkpoint on all of them or on none"
            )

    def _after_step(self) -> None:
        self.steps += 1
        self._turns.count_step()
        self.dense_bytes += 4 * self.recipes.total
        every = self.sync_every(self.steps) if callable(self.sync_every) else self.sync_every
        if self._under_way is not None and self.steps >= self._under_way.due:
            self._land()
        if self._turns.is_due(checked_steps(every)):
            self._start_next_part()
            if not self._overlap:
                self._land()

    def sync(self) -> None:
        """Exchange all parts now, whatever `sync_every` says, and wait for their means; all ranks must call it."""
        if self._hook is None:
            raise GradwireError("sync() belongs in the `with` block")
        for _ in self._parts:
            self._exchange_next_part()

    # ── one exchange ──

    @torch.no_grad()
    def _exchange_next_part(self, left: bool = False) -> list[RankUpdate]:
        """Exchange the part whose turn it is, without overlap; return what all ranks sent."""
        self._land()
        self._start_next_part(left, overlap=0)
        return self._land(left)

    @torch.no_grad()
    def _start_next_part(self, left: bool = False, overlap: int | None = None) -> None:
        """Send this rank's update of the part whose turn it is, if it took steps since that was sent last."""
        self._land()  # one at a time: where the schedule changes, the next one may be due before the last has ended
        check_parameters(self._parameters, trainable(self.model))
        overlap = self._overlap if overlap is None else overlap
        send = self._turns.unsent[self._turns.next] > 0
        number = self._turns.next
        entries = self._replica.entries(self._parts[number])
        if left:
            with_buffers = send or self._buffers.changed()
        else:  # after the last part of a round
            rounds = self.ledger.steps // len(self._parts)
            with_buffers = send and number == len(self._parts) - 1 and rounds % self._buffers_every == 0
        start = {name: e.clone() for name, e in entries.items()} if overlap else {}
        updates = self._replica.updates(self._parts[number])
        self._turns.take_turn()  # not before: memory may not suffice for all that, and the others wait for this part
        with self._undone_on_failure():
            sync = self._connected().start(number, updates, self.steps, send=send, left=left, with_buffers=with_buffers)
        self._under_way = ExchangeUnderWay(number, self.steps + overlap, start, sync)

    @torch.no_grad()
    def _exchange_rest(self) -> None:
        """Send a larger part of what is left in the error memories: all ranks have left, and no step is to follow."""
        rest = [name for name, entries in self._replica.entries().items() if self._has_rest(name, entries.numel())]
        updates = self._replica.updates(rest, ahead=False)
        with self._undone_on_failure():
            sync = self._connected().start(0, updates, self.steps, send=True, left=True, with_buffers=True, last=True)
        self._under_way = ExchangeUnderWay(0, self.steps, {}, sync)
        self._await()
        self._under_way = None
        self._replica.take_common()

    @contextmanager
    def _undone_on_failure(self) -> Iterator[None]:
        """If the block fails, memories, common parameters and turns are as if the exchange had never begun."""
        try:
            with self.ledger.waiting():
                yield
        except BaseException as error:
            self._link.give_up(error)
            self._connected().coder.abandon_step()
            self._turns.take_back()
            self._under_way = None
            raise

    @torch.no_grad()
    def _await(self) -> list[RankUpdate]:
        """Wait for the exchange under way, if there is one, and let the common parameters follow its mean.

        The model stays as it is, so that this may be done before its time.
        """
        under_way, sync_round = self._under_way, self._round
        if under_way is None or under_way.sync is None or sync_round is None:
            return []
        with self._undone_on_failure():
            arrived = sync_round.finish(under_way.sync)
            moves = any(update.usable for update in arrived)
            if moves:
                self._common.move(under_way.sync.updates)
        self._turns.keep()
        self.syncs += moves
        own = arrived[self._link.rank]
        if own.diverged:
            self.memories.errors.rollback()  # nothing of this rank's update was used
        else:
            sent = self.memories.take_sent()
            mask_optimizer(self.optimizer, ((self._parameters[name], where) for name, where in sent.items()))
        sync_round.coder.end_step()
        self._link.at_step(self.ledger.steps)
        under_way.has_arrived(own, arrived, self._buffers.averaged)
        return arrived

    @torch.no_grad()
    def _land(self, left: bool = False) -> list[RankUpdate]:
        """Wait for the exchange under way, if there is one, and go on from its mean; return what all ranks sent.

        What this rank has changed since it sent its update stays, and is a part of its next one.
        """
        arrived = self._await()
        under_way, self._under_way = self._under_way, None
        if under_way is None:
            return arrived
        names: Collection[str] = self._parts[under_way.part]
        if under_way.diverged:  # it goes back to the common parameters, without momentum
            reset_optimizer(self.optimizer)
            self._turns.send_nothing()
            names = self._parameters
        if left:
            self._replica.take_common(names)
        elif under_way.moves:
            self._buffers.take(None if under_way.diverged else under_way.buffers)
            self._replica.go_on(names, under_way.start, self._mix)
        return arrived

    def _has_rest(self, name: str, entries: int) -> bool:
        """Return whether the last sync has something to send of this parameter."""
        return self.recipes.of(name).flush > 0 and self.recipes.of_tensor(name, entries).decay > 0

    # ── what users see ──

    @contextmanager
    @torch.no_grad()
    def common_parameters(self) -> Iterator[None]:
        """Give the model the common parameters and buffers while the block lasts, for evaluation between syncs.

        What is done to them in the meantime is undone.
        """
        tensors = [*self._parameters.values(), *self.model.buffers()]
        own = [t.clone() for t in tensors]
        self._replica.take_common()
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

        Save the model and the optimizer of every rank beside it: between syncs they differ. An exchange under way is
        waited for, and what is left to be done with its mean is saved: the model does not change.
        """
        self._await()
        return {
            "steps": self.ledger.steps,
            KEY: self.recipes.state_dict(),
            **self.memories.state_dict(),
            **self._common.state_dict(),
            "local_steps": self.steps,
            "pending": self.pending,
            "parts": {"next": self._turns.next, "unsent": list(self._turns.unsent)},
            "under_way": None if self._under_way is None else self._under_way.state_dict(),
            "inside": self._inside,
            "buffers": {name: b.detach().cpu().clone() for name, b in self._buffers.common.items()},
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state of this rank; before the `with` block.

        A state that does not fit is a CheckpointError, and changes nothing.
        """
        if self._hook is not None:
            raise GradwireError("load the state before the `with` block")
        self._await()  # not that it arrives in the middle of what is loaded
        saved = read_state(state, self.recipes, self._common, self._buffers.common, self._parts)
        self.memories.load(saved.memories)
        self.ledger.resume_at(saved.memories.steps)
        self._common.load(saved.anchor, saved.outer)
        self._buffers.load(saved.buffers)
        self.steps = self._steps_before = saved.local_steps
        self._turns.load(saved.following, saved.pending, saved.unsent)
        self._under_way = None if saved.under_way is None else ExchangeUnderWay.of_state(saved.under_way)
        self._inside = self._resumed = saved.inside
        self._started = True


def _remind(*_: object) -> None:
    """Warn of steps before the block is entered for the first time. It keeps no hold of the LocalSGD."""
    warnings.warn(
        "the optimizer steps outside of the LocalSGD block, so nothing is exchanged: use `with LocalSGD(…):`",
        stacklevel=3,
    )
