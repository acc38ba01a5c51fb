"""The mean gradient of a model in every step: what the hook of DDP and DataParallel have in common.

`Gradients` knows the parameters by name, takes over the momentum of the optimizer where a recipe asks for that, follows
the loss scale, and keeps figures and memories. The first gradient (or `connect`) makes a process group of its own with
the same ranks, so that nothing of the training comes between its collectives, and compares notes with the other ranks.
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist

from gradwire.aggregate.exchanges.gradient_exchange import ALL_GATHER, GradientExchange
from gradwire.aggregate.messages.error_probe import CodingError, ErrorProbe, nmse
from gradwire.aggregate.messages.message_coder import MessageCoder
from gradwire.aggregate.messages.model_recipes import ModelRecipes
from gradwire.aggregate.messages.step_ledger import StepLedger
from gradwire.aggregate.peers.handshake import Facts, describe
from gradwire.aggregate.sums.aggregator_for_all_or_none import aggregator_sums
from gradwire.aggregate.transport.link import Link
from gradwire.catalogue.saved_recipes import KEY
from gradwire.catalogue.spec_by_name import Spec, warn_of_idle_patterns
from gradwire.correct.adam_units import ADAMS
from gradwire.correct.memory_dtype import memory_dtype
from gradwire.correct.momentum import Takeover
from gradwire.correct.worker_memories import WorkerMemories
from gradwire.cuda_runtime import programs
from gradwire.engine import auto
from gradwire.engine.bucket_order import BucketOrder
from gradwire.engine.checks import check_dtypes, check_momentum, check_recipes
from gradwire.engine.clipping_watch import ClippingWatch
from gradwire.engine.log import Monitor
from gradwire.engine.optimizer_watch import OptimizerWatch
from gradwire.engine.options import HIERARCHICAL, Options
from gradwire.engine.plain_step import PlainStep
from gradwire.engine.shared_units import SharedUnits
from gradwire.engine.sparse_gradients import SparseMeans
from gradwire.engine.tuner import Tuner
from gradwire.errors import AggregateError, CheckpointError, SpecError


class Gradients:
    """Averages the gradients of one model over all ranks, step by step.

    The training's thread calls everything here: `submit` for tensors as they become ready, in the same order on all
    ranks, then `finish_step`. Encoding and exchanging go on in another thread in between, so submitted tensors are not
    to be touched before the step is finished. The parts that it owns are changed by their own methods alone: `recipes`,
    `memories` (what was not sent), `ledger` (figures), `probe` (errors), `exchange` (the way to the other ranks).

    `has_all` says that every rank has a gradient of every parameter in every step, or zeros in its place. `order` says
    in which order tensors come that have not the order of their dimensions. Complex tensors come as pairs of reals.
    Until `open` is called the optimizer keeps its momentum.
    """

    def __init__(
        self, spec: Spec, parameters: Iterable[tuple[str, torch.Tensor]] | None, group: dist.ProcessGroup | None,
        options: Options, has_all: bool = False, order: BucketOrder | None = None,
    ):  # fmt: skip
        self.order = order or BucketOrder()
        self._target_error = auto.parse(spec) if isinstance(spec, str) else None  # None unless the spec is `auto`
        self.recipes = ModelRecipes(spec if self._target_error is None else auto.CANDIDATES[0])
        self.memories = WorkerMemories(memory_dtype(options.memory))
        self.ledger, self.probe = StepLedger(), ErrorProbe()
        self.sparse = SparseMeans(self.recipes, self.ledger)
        self._spec_text = str(self.recipes) if self._target_error is None else str(spec)
        self.options = options
        self._monitor: Monitor | None = None
        self._errors: dict[str, CodingError] = {}  # of the last step in which they were measured
        self._dense_bytes = 0
        self._group = group
        self._steps_before = 0  # of the run that was loaded: the other figures do not cover them
        self._names: dict[int, str] = {}
        self._devices: set[torch.device] = set()  # of the parameters, as far as they are known
        self._on_gpu = False
        self._has_all = has_all
        self._link: Link | None = None
        self._exchange: GradientExchange | None = None
        self._tuner: Tuner | None = None
        self._plain_step: PlainStep | None = None
        self._takeover: Takeover | None = None
        self._clipping: ClippingWatch | None = None
        self._optimizer_watch: OptimizerWatch | None = None
        self._units: SharedUnits | None = None
        self._between_steps = True
        check_recipes(self.recipes, parameters is not None)
        if options.memory != "fp32" and self.recipes.any("sums"):
            raise SpecError(f"{self._spec_text} adds up integers, and needs memory='fp32'")
        if options.aggregator is not None and not self.recipes.any("sums"):
            raise SpecError(f"an aggregator adds up integers, which {self._spec_text} does not send: use 'homomorphic'")
        self._tensors: Facts = {}
        if parameters is not None:
            self._know(list(parameters))
        self._masks = self.recipes.any("mask")
        if self._masks:
            check_momentum(options.optimizer, self._names)
        if self.recipes.any("in_adam_units"):
            self._units = self._shared_units(list(parameters or ()))

    def _shared_units(self, named: list[tuple[str, torch.Tensor]]) -> SharedUnits | None:
        if self.options.optimizer is None or not named:
            warnings.warn(
                "the recipe adam scales gradients by the second moments of the optimizer, which it does not know, so "
                "that it does what structured does: pass optimizer= (and the model) to have more for the same bytes",
                stacklevel=2,
            )
            return None
        scaled = [(n, p) for n, p in named if p.requires_grad and self._is_in_units(n, p)]
        return SharedUnits(self.options.optimizer, scaled)

    def _is_in_units(self, name: str, parameter: torch.Tensor) -> bool:
        recipe = self.recipes.of_tensor(name, parameter.numel())
        return recipe.in_adam_units and not parameter.is_complex()

    def _know(self, named: list[tuple[str, torch.Tensor]]) -> None:
        self._tensors = describe(named)
        check_dtypes(named)
        for name, parameter in named:
            self._names[id(parameter)] = name
            self.recipes.of(name)
        warn_of_idle_patterns(self.recipes.by_pattern, (name for name, _ in named))
        self.recipes.know_model([(n, self.order.arranged(n, p.detach())) for n, p in named if p.requires_grad])
        self._devices = {p.device for _, p in named}
        self._on_gpu = all(device.type == "cuda" for device in self._devices)

    @property
    def steps(self) -> int:
        """The number of steps, those of a loaded checkpoint among them."""
        return self.ledger.steps

    # ── the connection to the other ranks ──

    @property
    def exchange(self) -> GradientExchange:
        """The exchange with the other ranks; the first use connects to them, so all ranks must come to it."""
        self.connect()
        assert self._exchange is not None
        return self._exchange

    @property
    def tuner(self) -> Tuner:
        """What learns from the steps; the first use connects."""
        self.connect()
        assert self._tuner is not None
        return self._tuner

    @property
    def link(self) -> Link:
        """The link among all ranks; the first use connects."""
        self.connect()
        assert self._link is not None
        return self._link

    @property
    def given_group(self) -> dist.ProcessGroup:
        """The process group of the training."""
        group = self._group or dist.group.WORLD
        assert group is not None
        return group

    def connect(self, link: Link | None = None) -> None:
        """Connect to the other ranks now: all ranks call it, or take their first step.

        By default that makes a process group of our own beside the training's; a `link` can be given in its place.
        """
        if self._exchange is None:
            self._link = link or Link.beside(self._group, self.options.timeout)
            try:
                self._exchange = self._connected(self._link)
            except BaseException:
                if link is None:
                    _close_if_idle(self._link)
                self._link = None
                raise
            weakref.finalize(self, self._exchange.close)
            if link is None:
                give_back = weakref.finalize(self, _give_back, self._exchange, self._links())
                give_back.atexit = False  # torch ends all groups then

    def _connected(self, link: Link) -> GradientExchange:
        options, of_all = self.options, link
        facts = {"spec": self._spec_text, "aggregate": options.aggregate}
        if self.recipes.any("in_adam_units"):  # ranks that have units compare them, and would wait for one without
            facts["optimizer="] = "not given" if self._units is None else "given"
        link.agree(facts, self._tensors)
        host = None
        if options.aggregate == HIERARCHICAL:
            host, link = _by_host(link)
        sums = None
        if options.aggregator is not None:
            sums = aggregator_sums(link, options.aggregator, options.aggregator_fallback, options.timeout)
        is_open = options.aggregate in ("auto", HIERARCHICAL)
        exchange = GradientExchange(
            MessageCoder(self.recipes, self.memories, self.ledger, link.rank, link.world, self.probe),
            link,
            ALL_GATHER if is_open else options.aggregate,
            host,
            sums,
            None if options.grad_scaler is None else options.grad_scaler.get_scale,
        )
        answers = of_all.gather_short(bytes([self._on_gpu, self._can_go_unattended(link)]))
        if all(answer[0] for answer in answers):
            exchange.use_long_messages()
        if all(answer[1] for answer in answers):
            exchange.wait_for_nothing()
        is_open &= not self.recipes.sums_all
        under_adam = isinstance(options.optimizer, ADAMS)
        self._tuner = Tuner(of_all, exchange, self._target_error, is_open, under_adam)
        self._plain_step = PlainStep(of_all, exchange)
        return exchange

    def _can_go_unattended(self, link: Link) -> bool:
        """Tell whether messages of this rank can be made, sent and averaged on a GPU without the host."""
        alike = len(self._devices) == 1 and link.follows_stream and self.options.aggregate != HIERARCHICAL
        return (
            alike
            and self._has_all
            and self.memories.errors.dtype == torch.float32  # ranks may differ in that
            and all(device.type == link.device.type and programs.can_run(device) for device in self._devices)
        )

    def name_of(self, parameter: torch.Tensor) -> str:
        """Return a parameter's name; without a model, parameters are numbered as they first appear."""
        return self._names.setdefault(id(parameter), f"parameter{len(self._names)}")

    def learn_order(self, name: str, parameter: torch.Tensor) -> None:
        """Take note of how a parameter lies in memory, between two steps; its memories follow."""
        before = self.order.learn(name, parameter, self._goes_by_rows(name, parameter))
        if before is not None:
            if self._exchange is not None:
                self._exchange.settle()
            self.memories.rearrange(name, lambda memory: self.order.moved(name, memory, before))
            if self._units is not None:
                self._units.rearrange(name, lambda factor: self.order.moved(name, factor, before))
            self.recipes.rearrange(name, self.order.arranged(name, parameter.detach()).shape)

    def _goes_by_rows(self, name: str, parameter: torch.Tensor) -> bool:
        """Tell whether the codec of a parameter uses its shape."""
        entries = parameter.numel() * (2 if parameter.is_complex() else 1)
        return self.recipes.of_tensor(name, entries).codec.converter.by_rows

    # ── one step ──

    def submit(
        self, key: Hashable, tensors: list[tuple[str, torch.Tensor]], missing: Collection[str] = (),
        lasting: bool = False,
    ) -> None:  # fmt: skip
        """Begin to average the tensors, in place; those that are `missing` have no gradient on this rank.

        They are not to be touched before the step is finished. Those that are `lasting` lie in the same place in every
        step.
        """
        if self._takeover is not None:
            factors = self._by_name(self._takeover.factors())
            self.memories.take_over_momentum(
                {name: f._replace(parameter=self.order.arranged(name, f.parameter)) for name, f in factors.items()}
            )
        if self._clipping is not None:
            self._clipping.submitted(tensors)
        self._dense_bytes += sum(4 * tensor.numel() for _, tensor in tensors)
        if not self.probe.active:
            rivals = self.tuner.rivals
            if rivals or (self._monitor is not None and self._monitor.due(self.steps + 1)):
                self.probe.begin(rivals)
        if self._goes_directly:
            self.plain_step.start(tensors, missing, self.tuner.halves)
            return
        if self._units is not None:
            self._renew_units(self._units)
            self._units.scale(tensors)
        self.exchange.submit(key, tensors, missing, lasting)

    def _renew_units(self, units: SharedUnits) -> None:
        """Let units follow the optimizer before the first gradient of a step, and memories follow the units."""
        if self._between_steps and units.due(self.steps):
            exchange = self.exchange
            exchange.use(exchange.aggregate)  # the last step is over, and all memories are by parameter
            for name, factor in units.renew(self.link, self.order.arranged).items():
                self.memories.rearrange(name, factor.mul)
        self._between_steps = False

    def check_sparse(self, name: str, parameter: torch.Tensor) -> None:
        """Raise GradwireError unless sparse gradients of this parameter can be averaged."""
        self.sparse.check(name, self._takeover is not None and id(parameter) in self._takeover.factors())

    def submit_sparse(self, name: str, gradient: torch.Tensor) -> None:
        """Begin to average a gradient in torch's sparse layout; `sparse.finish` returns its mean."""
        self._dense_bytes += self.sparse.start(name, gradient, self.given_group, self.link)

    def finish_step(self) -> set[str]:
        """Wait until all tensors are means; return the names of those that any rank has sent."""
        touched = self.plain_step.finish() if self._goes_directly else self.exchange.finish_step()
        if self._units is not None:
            self._units.unscale()
            self._between_steps = True
        self._step_done()
        return touched

    @property
    def _goes_directly(self) -> bool:
        """Whether this step goes without the exchange thread; with hosts that share memories it does not."""
        return self.plain and self.exchange.host is None

    def _step_done(self) -> None:
        if self._clipping is not None:
            self._clipping.step_done()
        errors, rival_errors = self.probe.take()
        if errors is not None:
            self._errors = errors
        if self._monitor is not None and self._monitor.due(self.steps):
            self._monitor.write(self.steps, self.stats(), self._errors)
        self.tuner.step_done(rival_errors)

    def abandon_step(self, error: BaseException | None = None) -> None:
        """Give up the step under way, because of an error: memories are as they were before it."""
        if self._exchange is not None:
            self._exchange.abandon_step(error)
        if self._plain_step is not None:
            self._plain_step.abandon()
        if self._units is not None:
            self._units.abandon_step()
            self._between_steps = True
        self.sparse.abandon()

    # ── steps without compression ──

    @property
    def plain_step(self) -> PlainStep:
        """The step under way, if it is `plain`."""
        self.connect()
        assert self._plain_step is not None
        return self._plain_step

    @property
    def plain(self) -> bool:
        """Whether this step uses plain all-reduce: because it is the fastest here, or because it is being measured."""
        return self.tuner.plain

    def started_plainly(
        self, future: torch.futures.Future[torch.Tensor], buffer: torch.Tensor, sent: torch.Tensor
    ) -> None:
        """Take note of a part of a plain step: a buffer whose all-reduce was started, on itself or on a copy."""
        self._dense_bytes += buffer.nbytes
        self.plain_step.started(future, buffer, sent)

    def finish_plain_step(self) -> None:
        """End a step whose tensors the framework averages itself."""
        self.plain_step.finish()
        self._step_done()

    # ── what users see ──

    def log_to(self, monitor: Monitor) -> None:
        """Write figures to this monitor from now on."""
        self._monitor = monitor

    def stats(self) -> dict[str, float]:
        """Return the totals of this rank since it was attached or loaded; `ratio` is fp32 bytes over frame bytes."""
        if self._exchange is None:
            figures = {**self.ledger.stats(), "wire_bytes_sent": 0, "wire_bytes_received": 0}
        else:
            figures = self._exchange.stats()
            if self._link is not None and self._link is not self._exchange.link:  # that joins one rank of each host
                figures["wire_bytes_sent"] += self._link.bytes_sent
                figures["wire_bytes_received"] += self._link.bytes_received
        return {
            "steps": self.steps - self._steps_before,
            **figures,
            "dense_bytes": self._dense_bytes,
            "ratio": self._dense_bytes / figures["frame_bytes"] if figures["frame_bytes"] else 1.0,
            **({"nmse": nmse(self._errors.values())} if self._errors else {}),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's error memory, by parameter name."""
        if self._exchange is None:
            state = {"steps": self.steps, KEY: self.recipes.state_dict(), **self.memories.state_dict()}
        else:
            state = self._exchange.state_dict()
        if self._units is None:
            return self.order.of_saved_state(state)
        return self.order.of_saved_state(self._units.without_units(state)) | self._units.state_dict()

    @contextmanager
    def together(self, call: str) -> Iterator[dist.ProcessGroup]:
        """Begin the block when all ranks are in this call of the user's, as `Link.together` does.

        It gets the process group that its collectives are to use: ours, so that they wait for a peer as long as an
        exchange does, and not as long as the training's group would. Without connections of ours, before the first
        step and after `disconnect`, it is the training's.
        """
        link = None if self._link is None or self._link.closed else self._link
        try:
            with nullcontext() if link is None else link.together(call):
                yield self.given_group if link is None else link.group
        except AggregateError as error:
            self.abandon_step(error)
            raise

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state; all ranks call it. One that does not fit is a CheckpointError, and changes nothing.

        Under `auto` a run that resumes begins with the first candidate again, whichever had been chosen.
        """
        if isinstance(state, Mapping) and "anchor" in state:
            raise CheckpointError("the state is of a LocalSGD, whose memories are of updates and not of gradients")
        equivalent = () if self._target_error is None else auto.RECIPE_NAMES
        shapes = {name: self.order.own_shape(name, shape) for name, shape in self.recipes.shapes.items()}
        names = set(self._names.values())
        saved_units = None if self._units is None else self._units.read_state(state)
        self.exchange.load_state_dict(state, names, equivalent, self.order.of_loaded_memory, shapes)
        if self._units is not None:
            self._units.load(saved_units or {})
        self._steps_before = self.steps
        self.tuner.loaded()

    # ── beginning and end ──

    def open(self) -> None:
        """Take over the optimizer's momentum, where a recipe masks it."""
        if self._masks and self._takeover is None:
            assert self.options.optimizer is not None
            self._takeover = Takeover(self.options.optimizer)
            masking = next(recipe.name for recipe in self.recipes.by_pattern.values() if recipe.mask)
            self._clipping = ClippingWatch(self.options.optimizer, self._names, masking)
            velocities = self._by_name(self._takeover.take_buffers())
            self.memories.adopt_velocities({n: self.order.arranged(n, v).contiguous() for n, v in velocities.items()})
        selects = [recipe for recipe in self.recipes.by_pattern.values() if recipe.codec.converter.selects]
        if selects and self._optimizer_watch is None:
            self._optimizer_watch = OptimizerWatch(frozenset(self._names), selects[0])

    def close(self) -> None:
        """Give the optimizer its momentum back, which starts from zero."""
        if self._takeover is not None:
            self._takeover.release()
            self._takeover = None
            if self._clipping is not None:
                self._clipping.end()
                self._clipping = None
            self.memories.take_over_momentum({})
        if self._optimizer_watch is not None:
            self._optimizer_watch.end()
            self._optimizer_watch = None

    def disconnect(self) -> None:
        """End the exchange, on all ranks. Figures and memories can still be read."""
        self.close()
        if self._exchange is not None:
            with suppress(AggregateError):  # the last step was not waited for, and nothing follows it
                self._exchange.settle()
            self._exchange.close()
            for link in self._links():
                link.close()

    def _links(self) -> list[Link]:
        """Return all links that were made for this exchange."""
        assert self._exchange is not None
        links = {self._link, self._exchange.link, self._exchange.host}
        return [link for link in links if link is not None]

    def _by_name(self, by_id: dict[int, Any]) -> dict[str, Any]:
        return {self._names[i]: value for i, value in by_id.items()}


def _give_back(exchange: GradientExchange, links: list[Link]) -> None:
    """End an exchange that nobody holds any more, and its process groups.

    Not those that NCCL serves: their ranks end together, and garbage is not collected at the same time on all.
    """
    exchange.close()
    for link in links:
        if not link.takes_gpu:
            link.close()


def _close_if_idle(link: Link) -> None:
    """Give back the group of a connection that has failed, unless that would wait for other ranks."""
    if not link.takes_gpu and not link.waits_for_peers:
        link.close()


def _by_host(link: Link) -> tuple[Link, Link]:
    """Return the link among the ranks of this host, and the one among the ranks of all hosts with this local rank.

    Hosts have equally many ranks, numbered in turn, as torchrun numbers them.
    """
    per_host = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    if not per_host or link.world % per_host:
        raise SpecError(
            f"aggregate='hierarchical' needs equally many ranks on every host, and LOCAL_WORLD_SIZE to say how many "
            f"(torchrun sets it); here it is {per_host or 'not set'}, with {link.world} ranks in all"
        )
    first = link.rank - link.rank % per_host
    host = Link.among(range(first, first + per_host), link, "host")
    return host, Link.among(range(link.rank % per_host, link.world, per_host), link, "across hosts")
