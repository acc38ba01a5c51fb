"""The mean gradient of a model in every step: what a hook of DDP and DataParallel have in common.

It knows the parameters by name, takes over the momentum of the optimizer where a recipe asks for that, follows the
loss scale, and keeps figures and memories. The first gradient (or `connect`) makes a process group of its own with the
same ranks, so that nothing of the training comes between its collectives, and compares notes with the other ranks.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from gradwire.aggregate.exchanges.reducer import ALL_GATHER, SCATTER_REDUCE, Reducer
from gradwire.aggregate.messages.mean import Mean
from gradwire.aggregate.peers.handshake import Facts, describe
from gradwire.aggregate.sums.aggregator_or_none import aggregator_sums
from gradwire.aggregate.transport.link import Link
from gradwire.catalogue.recipe import Recipe
from gradwire.catalogue.spec_by_name import Spec, spec_text
from gradwire.checkpoints.rank_states import AllRanks, own_part, refuse_pickling
from gradwire.correct.momentum import Takeover
from gradwire.engine import auto
from gradwire.engine.log import Error, Monitor, nmse
from gradwire.engine.tuner import Tuner
from gradwire.errors import GradwireError, SpecError, unknown_name

AGGREGATIONS = ("auto", ALL_GATHER, SCATTER_REDUCE, "hierarchical")
Named = Iterable[tuple[str, torch.Tensor]]


class Scaler(Protocol):
    """What is asked of a torch.amp.GradScaler."""

    def get_scale(self) -> float: ...


@dataclass(frozen=True)
class Options:
    """How gradients are averaged, beside the recipe."""

    optimizer: torch.optim.Optimizer | None = None
    grad_scaler: Scaler | None = None
    aggregate: str = "auto"
    timeout: float | None = None  # seconds
    aggregator: str | None = None  # host:port
    aggregator_fallback: bool = False  # whether to go on without it

    def __post_init__(self) -> None:
        if self.aggregate not in AGGREGATIONS:
            raise unknown_name("aggregation", self.aggregate, AGGREGATIONS)
        if self.aggregator_fallback and self.aggregator is None:
            raise SpecError("aggregator_fallback goes with aggregator='host:port', which is missing")
        if self.timeout is not None and not (isinstance(self.timeout, int | float) and self.timeout > 0):
            raise SpecError(f"timeout must be a number of seconds above 0, not {self.timeout!r}")
        if self.grad_scaler is not None and not hasattr(self.grad_scaler, "get_scale"):
            raise SpecError(f"grad_scaler must be a torch.amp.GradScaler, not {type(self.grad_scaler).__name__}")
        if self.optimizer is not None and not hasattr(self.optimizer, "param_groups"):
            raise SpecError(f"optimizer must be a torch.optim.Optimizer, not {type(self.optimizer).__name__}")


def named_parameters(module: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """By the names that they have without torch.compile, so that specs and checkpoints do not depend on it."""
    return [(name.replace("_orig_mod.", ""), parameter) for name, parameter in module.named_parameters()]


class Gradients:
    def __init__(self, spec: Spec, parameters: Named | None, group: dist.ProcessGroup | None, options: Options):
        self._target = auto.parse(spec) if isinstance(spec, str) else None  # the error that `auto` may make
        self.mean = Mean(spec if self._target is None else auto.CANDIDATES[0])
        self._spec_text = spec_text(self.mean.recipes) if self._target is None else str(spec)
        self.options = options
        self.monitor: Monitor | None = None
        self._errors: dict[str, Error] = {}  # of the last step in which they were measured
        self.dense_bytes = 0
        self._group = group
        self._steps_before = 0  # of the run that was loaded: the other figures do not cover them
        self._names: dict[int, str] = {}
        self._link: Link | None = None
        self._reducer: Reducer | None = None
        self._tuner: Tuner | None = None
        self._takeover: Takeover | None = None
        for chosen in self.mean.recipes.values():
            _check_for_every_step(chosen, parameters is not None)
        if options.aggregator is not None and not any(chosen.sums for chosen in self.mean.recipes.values()):
            raise SpecError(f"an aggregator adds up integers, which {self._spec_text} does not send: use 'homomorphic'")
        self._tensors: Facts = {}
        if parameters is not None:
            named = list(parameters)
            self._tensors = describe(named)
            _check_dtypes(named)
            for name, parameter in named:
                self._names[id(parameter)] = name
                self.mean.recipe_of(name)
            self.mean.know_model([(name, p) for name, p in named if p.requires_grad])
        self._masks = any(chosen.mask for chosen in self.mean.recipes.values())
        if self._masks:
            _check_for_momentum(options.optimizer, self._names)
            self.open()

    @property
    def steps(self) -> int:
        return self.mean.steps

    @property
    def reducer(self) -> Reducer:
        if self._reducer is None:
            self._reducer = self._connected()
            weakref.finalize(self, self._reducer.close)
        return self._reducer

    @property
    def tuner(self) -> Tuner:
        self.connect()
        assert self._tuner is not None
        return self._tuner

    @property
    def link(self) -> Link:
        """Among all ranks."""
        self.connect()
        assert self._link is not None
        return self._link

    @property
    def given_group(self) -> dist.ProcessGroup:
        """That of the training."""
        group = self._group or dist.group.WORLD
        assert group is not None
        return group

    def connect(self) -> None:
        """All ranks call it, or take their first step."""
        _ = self.reducer

    def _connected(self) -> Reducer:
        self._link = link = Link.beside(self._group, self.options.timeout)
        link.agree({"spec": self._spec_text, "aggregate": self.options.aggregate}, self._tensors)
        host = None
        aggregate = self.options.aggregate
        if aggregate == "hierarchical":
            host, link = _by_host(link)
        sums = None
        if self.options.aggregator is not None:
            sums = aggregator_sums(
                link, self.options.aggregator, self.options.aggregator_fallback, self.options.timeout
            )
        is_open = aggregate in ("auto", "hierarchical")
        reducer = Reducer(self.mean, link, ALL_GATHER if is_open else aggregate, host, sums)
        is_open &= not self.sums_all
        if self.options.grad_scaler is not None:
            reducer.scale = self.options.grad_scaler.get_scale
        self._tuner = Tuner(self.mean, self._link, reducer, self._target, is_open)
        return reducer

    def name_of(self, parameter: torch.Tensor) -> str:
        return self._names.setdefault(id(parameter), f"parameter{len(self._names)}")

    # ── one step ──

    def submit(self, key: Hashable, tensors: list[tuple[str, torch.Tensor]], missing: Collection[str] = ()) -> None:
        """Have the tensors averaged, in place; they are not to be touched before the step is finished."""
        if self._takeover is not None:
            self.mean.factors = self._by_name(self._takeover.factors())
        self.dense_bytes += sum(4 * tensor.numel() for _, tensor in tensors)
        due = self.monitor is not None and self.monitor.due(self.steps + 1)
        if self.mean.measured is None and (self.tuner.step_begins() or due):
            self.mean.measured = {}
        self.reducer.submit(key, tensors, missing)

    def finish_step(self) -> set[str]:
        """Wait until all tensors are means; the names of those that any rank has sent."""
        touched = self.reducer.finish_step()
        self.step_done()
        return touched

    def step_done(self) -> None:
        measured, self.mean.measured = self.mean.measured, None
        if measured is not None:
            self._errors = measured
        if self.monitor is not None and self.monitor.due(self.steps):
            self.monitor.write(self.steps, self.stats(), self._errors)
        self.tuner.step_done()

    @property
    def sums_all(self) -> bool:
        """Whether all gradients are added up on their way."""
        return all(recipe.sums for recipe in self.mean.recipes.values())

    @property
    def plain(self) -> bool:
        """Whether nothing beats all-reduce here, or that is being tried."""
        return self.tuner.plain

    def count_plain(self, size: int) -> None:
        """Bytes that were all-reduced by others."""
        self.dense_bytes += size
        self.mean.frame_bytes += size
        self.link.count_all_reduce(size)

    def abandon_step(self, error: BaseException | None = None) -> None:
        if self._reducer is not None:
            self._reducer.abandon_step(error)

    # ── what users see ──

    def stats(self) -> dict[str, float]:
        """Totals of this rank since it was attached (or loaded); `ratio` is fp32 over frames."""
        if self._reducer is not None:
            own = self._reducer.stats()
            if self._link is not None and self._link is not self._reducer.link:  # it joins only one rank of each host
                own["wire_bytes_sent"] += self._link.bytes_sent
                own["wire_bytes_received"] += self._link.bytes_received
        else:
            own = {**self.mean.stats(), "wire_bytes_sent": 0, "wire_bytes_received": 0, "wait_s": 0.0}
        return {
            "steps": self.steps - self._steps_before,
            **own,
            "dense_bytes": self.dense_bytes,
            "ratio": self.dense_bytes / own["frame_bytes"] if own["frame_bytes"] else 1.0,
            **({"nmse": nmse(self._errors.values())} if self._errors else {}),
        }

    def state_dict(self) -> dict[str, Any]:
        """This rank's error memory, by parameter name."""
        return self._reducer.state_dict() if self._reducer is not None else self.mean.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.reducer.load_state_dict(state, set(self._names.values()))
        self._steps_before = self.steps
        self.tuner.loaded()

    def open(self) -> None:
        """Take over the optimizer's momentum, where a recipe masks it."""
        if self._masks and self._takeover is None:
            assert self.options.optimizer is not None
            self._takeover = Takeover(self.options.optimizer)
            self.mean.velocity.memory.update(self._by_name(self._takeover.take_buffers()))

    def disconnect(self) -> None:
        """The end: on all ranks. Figures and memories can still be read."""
        self.close()
        if self._reducer is not None:
            self._reducer.close()
            for link in {self._link, self._reducer.link, self._reducer.host}:
                if link is not None:
                    link.close()

    def close(self) -> None:
        """The optimizer has its momentum again, from zero on."""
        if self._takeover is not None:
            self._takeover.release()
            self._takeover = None
            self.mean.factors = {}

    def _by_name(self, by_id: dict[int, Any]) -> dict[str, Any]:
        return {self._names[i]: value for i, value in by_id.items()}


class Handle:
    """What the user has in hand while gradients are averaged."""

    def __init__(self, gradients: Gradients):
        self.gradients = gradients

    @property
    def recipe(self) -> str:
        """What is in use: the spec, of one name or by patterns; with `auto`, its choice, or "exact" for all-reduce."""
        chosen = self.gradients.tuner.auto
        if chosen is not None:
            return chosen.spec
        recipes = self.gradients.mean.recipes
        return str(recipes["*"]) if list(recipes) == ["*"] else str({p: str(r) for p, r in recipes.items()})

    @property
    def aggregate(self) -> str:
        """How frames meet; "sum" where they are added up on their way."""
        gradients = self.gradients
        return "sum" if gradients.sums_all else gradients.reducer.aggregate

    def log_to(self, to: Any, every: int = 100, layers: bool = False) -> None:
        """Write figures every so many steps, to a TensorBoard SummaryWriter or a function of (figures, step).

        They are bytes and seconds a step, the ratio, and the relative squared error (nmse) of the last step, which
        takes a little time to measure; with `layers`, also error and bytes of each parameter.
        """
        self.gradients.monitor = Monitor(to, every, layers)

    def stats(self) -> dict[str, float]:
        return self.gradients.stats()

    def state_dict(self) -> dict[str, Any]:
        return self.gradients.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What `state_dict` of this rank was, or `all_ranks.state_dict()`, of any number of workers."""
        self.gradients.load_state_dict(own_part(state, self.gradients.given_group))

    @property
    def all_ranks(self) -> AllRanks:
        """The same for all ranks at once, for checkpoints that rank 0 writes."""
        return AllRanks(self, self.gradients.given_group)

    def __reduce__(self) -> Any:
        refuse_pickling("a handle")


def _by_host(link: Link) -> tuple[Link, Link]:
    """(ranks of this host, one rank of each host): hosts have equally many, numbered in turn, as by torchrun."""
    per_host = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    if not per_host or link.world % per_host:
        raise SpecError(
            f"aggregate='hierarchical' needs equally many ranks on every host, and LOCAL_WORLD_SIZE to say how many "
            f"(torchrun sets it); here it is {per_host or 'not set'}, with {link.world} ranks in all"
        )
    first = link.rank - link.rank % per_host
    host = Link.among(range(first, first + per_host), link)
    return host, Link.among(range(link.rank % per_host, link.world, per_host), link)


def _check_dtypes(named: list[tuple[str, torch.Tensor]]) -> None:
    for name, parameter in named:
        if parameter.requires_grad and not parameter.is_floating_point():
            raise GradwireError(
                f"{name!r} is {parameter.dtype}, whose gradients cannot be encoded: make it a real parameter with a "
                f"last dimension of two (torch.view_as_real), and view it as complex in the forward pass"
            )


def _check_for_every_step(chosen: Recipe, model_is_known: bool) -> None:
    if chosen.delayed:
        raise SpecError(f"{chosen.name} {chosen.delayed}: use gradwire.LocalSGD, not a hook of DDP")
    if chosen.clip and not model_is_known:
        raise SpecError(f"{chosen.name} clips by the whole model's norm, so it needs the model: State(spec, model)")
    if chosen.power != 1 and not model_is_known:
        raise SpecError(f"{chosen.name} shares the whole model's budget, so it needs the model: State(spec, model)")


def _check_for_momentum(optimizer: torch.optim.Optimizer | None, names: dict[int, str]) -> None:
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
