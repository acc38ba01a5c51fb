"""Compressed gradients for DistributedDataParallel, in one line:

    handle = gradwire.ddp.attach(ddp_model, "co3")

Every bucket that DDP hands us (`State.reduce`) is encoded and its frames are sent while backward goes on; what has
arrived by then is decoded and averaged, the rest in the last bucket's call (`aggregate/mean.py` has the steps).
After the last bucket the error memories are committed, or, if any rank sent a NaN or an infinity (GradScaler
relies on them), rolled back on all ranks.
"""

# No `from __future__ import annotations` here: DDP checks the annotations of its hooks at run time.
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from . import aggregate
from .aggregate.all_gather import AllGather
from .aggregate.handshake import compare, describe
from .aggregate.mean import Mean
from .aggregate.pieces import Spec
from .correct.momentum import Takeover
from .errors import GradwireError, SpecError
from .recipe import Recipe


@dataclass
class Pending:
    """A bucket whose frames are under way."""

    buffer: torch.Tensor
    frames: aggregate.mean.Pending
    future: torch.futures.Future


class State:
    """All that the hook remembers. `State(spec, model)` and `hook` are the pair for `register_comm_hook`.

    Without the model, parameters are named by the order in which they first appear.
    Recipes that correct momentum need the optimizer, whose momentum they take over.
    """

    def __init__(
        self,
        spec: Spec,
        model: torch.nn.Module | None = None,
        process_group: dist.ProcessGroup | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ):
        self.mean = Mean(spec, process_group)
        self.dense_bytes = 0
        self._steps_before = 0  # of the run that was loaded: the other figures do not cover them
        self._names: dict[int, str] = {}
        self._pending: list[Pending] = []
        self._optimizer: torch.optim.Optimizer | None = None
        self._takeover: Takeover | None = None
        for chosen in self.mean.recipes.values():
            _check_for_hook(chosen, model is not None)
        if model is not None:
            inner = model.module if isinstance(model, DistributedDataParallel) else model
            for name, parameter in inner.named_parameters():
                self._names[id(parameter)] = name
                self.mean.recipe_of(name)
            self.mean.know_model([(name, p) for name, p in inner.named_parameters() if p.requires_grad])
        if any(chosen.mask for chosen in self.mean.recipes.values()):
            self._optimizer = _checked_for_momentum(optimizer, self._names)
            self.open()

    @property
    def exchange(self) -> AllGather:
        return self.mean.exchange

    @property
    def steps(self) -> int:
        return self.mean.steps

    # ── the hook ──

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        try:
            if bucket.buffer().layout != torch.strided:
                raise GradwireError("sparse gradients are not supported: build the embedding with sparse=False")
            if self._takeover is not None:
                self.mean.factors = self._by_name(self._takeover.factors())
            named = [(self._name_of(p), g) for p, g in zip(bucket.parameters(), bucket.gradients(), strict=True)]
            self.dense_bytes += 4 * bucket.buffer().numel()
            frames = self.mean.start((bucket.index(), bucket.buffer().numel()), named)
            self._pending.append(Pending(bucket.buffer(), frames, future))
            while self._pending and (bucket.is_last() or self.mean.ready(self._pending[0].frames)):
                done = self._pending.pop(0)
                self.mean.finish(done.frames)
                done.future.set_result(done.buffer)
            if bucket.is_last():
                self.mean.end_step()
        except BaseException:
            self._pending.clear()
            self.mean.abandon_step()
            raise
        return future

    def _name_of(self, parameter: torch.Tensor) -> str:
        return self._names.setdefault(id(parameter), f"parameter{len(self._names)}")

    # ── what users see ──

    def stats(self) -> dict[str, float]:
        """Totals of this rank since it was attached (or loaded); `ratio` is fp32 over frames."""
        own = self.mean.stats()
        return {
            "steps": self.steps - self._steps_before,
            **own,
            "dense_bytes": self.dense_bytes,
            "ratio": self.dense_bytes / own["frame_bytes"] if own["frame_bytes"] else 1.0,
        }

    def state_dict(self) -> dict[str, Any]:
        """This rank's error memory, by parameter name."""
        return self.mean.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean.load_state_dict(state, set(self._names.values()))
        self._steps_before = self.steps

    def open(self) -> None:
        """Take over the optimizer's momentum, where a recipe masks it."""
        if self._optimizer is not None and self._takeover is None:
            self._takeover = Takeover(self._optimizer)
            self.mean.velocity.memory.update(self._by_name(self._takeover.take_buffers()))

    def close(self) -> None:
        """The optimizer has its momentum again, from zero on."""
        if self._takeover is not None:
            self._takeover.release()
            self._takeover = None
            self.mean.factors = {}

    def _by_name(self, by_id: dict[int, Any]) -> dict[str, Any]:
        return {self._names[i]: value for i, value in by_id.items()}


def _check_for_hook(chosen: Recipe, model_is_known: bool) -> None:
    if chosen.delayed:
        raise SpecError(f"{chosen.name} {chosen.delayed}: use gradwire.LocalSGD, not a hook of DDP")
    if chosen.clip and not model_is_known:
        raise SpecError(f"{chosen.name} clips by the whole model's norm, so it needs the model: State(spec, model)")
    if chosen.power != 1 and not model_is_known:
        raise SpecError(f"{chosen.name} shares the whole model's budget, so it needs the model: State(spec, model)")


def _checked_for_momentum(optimizer: torch.optim.Optimizer | None, names: dict[int, str]) -> torch.optim.Optimizer:
    if optimizer is None:
        raise SpecError(
            "this recipe masks momentum where it sends, and a hook cannot see the optimizer: pass optimizer= to "
            "attach, use gradwire.LocalSGD, or switch it off in the spec (mask=off)"
        )
    if not names:
        raise SpecError("a recipe that masks momentum needs the model too: State(spec, model, optimizer=…)")
    if not {id(p) for group in optimizer.param_groups for p in group["params"]} <= set(names):
        raise SpecError(
            "the optimizer also holds parameters of another model, whose momentum would be lost: "
            "give this model an optimizer of its own"
        )
    return optimizer


def hook(state: State, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The DDP communication hook that goes with `State`."""
    return state.reduce(bucket)


class _Slot:
    """DDP takes one hook for life; what the hook does can change."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.state: State | None = None


def _slot_hook(slot: _Slot, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return allreduce_hook(slot.group, bucket) if slot.state is None else slot.state.reduce(bucket)


class Handle:
    """What `attach` returns."""

    def __init__(self, slot: _Slot, state: State):
        self._slot, self.state = slot, state

    def stats(self) -> dict[str, float]:
        return self.state.stats()

    def state_dict(self) -> dict[str, Any]:
        return self.state.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state.load_state_dict(state)

    def detach(self) -> None:
        """Back to plain all-reduce; the model can be attached again."""
        if self._slot.state is self.state:
            self._slot.state = None
            self.state.close()


def attach(
    model: DistributedDataParallel, spec: Spec = "co3", *, optimizer: torch.optim.Optimizer | None = None
) -> Handle:
    """Compress the gradients of a DDP model. `spec` is a recipe, or a dict from name patterns to recipes.

    A model that is attached already gets the new recipe in place of the old one, and an empty error memory.

    Recipes that mask momentum (sbc, stc, dgc) take over that of the `optimizer`, an SGD, until they are detached.
    """
    if not isinstance(model, DistributedDataParallel):
        raise GradwireError(f"attach needs a DistributedDataParallel model, got {type(model).__name__}: wrap it first")
    slot = getattr(model, "_gradwire_slot", None)
    before = slot.state if slot else None
    if before:
        before.close()  # the next one may take over the same optimizer's momentum
    try:
        state = State(spec, model, model.process_group, optimizer)
    except BaseException:
        if before:
            before.open()
        raise
    if slot is None:
        slot = _Slot(model.process_group)
        model.register_comm_hook(slot, _slot_hook)
        object.__setattr__(model, "_gradwire_slot", slot)  # not a parameter, not a module
    inner = model.module
    link = state.mean.exchange
    compare(
        link,
        {"spec": str({p: str(r) for p, r in state.mean.recipes.items()})},
        describe(inner.named_parameters()),
        link.roll_call,
        link.names,
    )
    slot.state = state
    return Handle(slot, state)
