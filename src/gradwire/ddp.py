"""Compressed gradients for DistributedDataParallel, in one line:

    handle = gradwire.ddp.attach(ddp_model, "co3")

Every bucket that DDP hands us (`State.reduce`) is encoded and exchanged in a thread while backward goes on; the last
bucket's call waits for all of them (`aggregate/exchanges/` has the steps). After it the error memories are committed,
or, if any rank sent a NaN or an infinity (GradScaler relies on them), rolled back on all ranks.
"""

# No `from __future__ import annotations` here: DDP checks the annotations of its hooks at run time.
import functools
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradwire.aggregate.messages import present_tensors
from gradwire.catalogue.spec_by_name import Spec
from gradwire.checkpoints.rank_states import refuse_pickling
from gradwire.correct.complex_pairs import as_reals
from gradwire.engine.bucket_order import BucketOrder
from gradwire.engine.gradients import Gradients
from gradwire.engine.handle import Handle
from gradwire.engine.one_process import IdleHandle, is_alone, processes
from gradwire.engine.options import Options, Scaler
from gradwire.engine.parameter_watch import ParameterWatch, named_parameters
from gradwire.engine.plain_buckets import PlainBuckets
from gradwire.errors import GradwireError
from gradwire.torch_internals.modules import compiled_model, hooks_of, reduces_in_python
from gradwire.torch_internals.tensors import memory_of

PYTHON_REDUCER = (
    'torch._dynamo.config.optimize_ddp = "python_reducer" lets no hook have buckets: set it to True before the model '
    "is wrapped in DistributedDataParallel"
)


class State(Gradients):
    """The state of the DDP hook: `State(spec, model)` and `hook` are what `register_comm_hook` takes.

    Without the model, parameters are named by the order in which they first appear.
    Recipes that correct momentum need the optimizer, whose momentum they take over.
    """

    def __init__(
        self,
        spec: Spec,
        model: torch.nn.Module | None = None,
        process_group: dist.ProcessGroup | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        grad_scaler: Scaler | None = None,
        aggregate: str = "auto",
        timeout: float | None = None,
        aggregator: str | None = None,
        aggregator_fallback: bool = False,
        memory: str = "fp32",
    ):
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        if inner is not None and not isinstance(inner, torch.nn.Module):
            raise GradwireError(f"model must be a torch.nn.Module, got {type(inner).__name__}")
        parameters = None if inner is None else named_parameters(inner)
        options = Options(optimizer, grad_scaler, aggregate, timeout, aggregator, aggregator_fallback, memory)
        # If no rank has used a parameter, DDP does not write its mean back: ranks have to say which ones they have.
        self._finds_unused = bool(getattr(model, "find_unused_parameters", False))
        order = BucketOrder()
        for name, parameter in parameters or ():
            order.learn(name, parameter)
        super().__init__(spec, parameters, process_group, options, has_all=not self._finds_unused, order=order)
        for name, parameter in parameters or ():
            self.learn_order(name, parameter)  # again, since it depends on the recipe, too
        self._spec = spec
        self._watch = (
            None if inner is None else ParameterWatch(inner, [p for p in inner.parameters() if p.requires_grad])
        )
        # The memory of each bucket: DDP builds them anew after the first step. An address would not do, since the new
        # ones may get the place of the old ones; a weak reference tells them apart and keeps neither.
        self._buffers: dict[int, tuple[object, int]] = {}  # and the recipes for which its order was learned
        self._pending: list[tuple[torch.Tensor, torch.futures.Future[torch.Tensor]]] = []
        self._plain_buckets: PlainBuckets | None = None
        self._pending_sparse: list[tuple[str, torch.futures.Future[torch.Tensor]]] = []
        self.open()

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket; the call for the last bucket of a step waits for all of them."""
        if isinstance(bucket, tuple):
            raise GradwireError(PYTHON_REDUCER)
        if bucket.is_last():
            self._warn_of_parameters()
        buffer = bucket.buffer()
        # On a GPU the mean may be there only when the stream is that sets the result: the future tells DDP's.
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=[buffer.device] if buffer.is_cuda else None
        )
        try:
            if buffer.layout != torch.strided:
                return self._reduce_sparse(bucket, future)
            if self.plain:
                return self._reduce_plainly(bucket)
            named = self._named(bucket)
            # Momentum that was sent would be lost.
            unused = (
                [name for name, gradient in named if present_tensors.is_zero(gradient)] if self._finds_unused else ()
            )
            self.submit((bucket.index(), buffer.numel()), named, unused, lasting=True)
            self._pending.append((buffer, future))
            if bucket.is_last():
                self._finish()
        except BaseException as error:
            self._pending.clear()
            self._pending_sparse.clear()
            self.abandon_step(error)
            raise
        return future

    def _reduce_sparse(
        self, bucket: dist.GradBucket, future: torch.futures.Future[torch.Tensor]
    ) -> torch.futures.Future[torch.Tensor]:
        """Average the one gradient of a bucket in torch's sparse layout."""
        [parameter] = bucket.parameters()
        name = self.name_of(parameter)
        self.check_sparse(name, parameter)
        self.submit_sparse(name, bucket.buffer())
        self._pending_sparse.append((name, future))
        if bucket.is_last():
            self._finish()
        return future

    def _finish(self) -> None:
        """End the step: all buckets have come."""
        means = self.sparse.finish(self.link)
        if self.plain:
            self.finish_plain_step()
            if self._plain_buckets is not None:  # not where all buckets are sparse
                self._plain_buckets.finish()
        else:
            self.finish_step()
        for averaged, waiting in self._pending:
            waiting.set_result(averaged)
        for name, waiting in self._pending_sparse:
            waiting.set_result(means[name])
        self._pending.clear()
        self._pending_sparse.clear()

    def _warn_of_parameters(self) -> None:
        """Warn once if the model has got parameters that DDP knows nothing of."""
        reasons = self._watch.not_averaged() if self._watch is not None else []
        if reasons:
            self._watch = None
            warnings.warn(
                f"{reasons[0]}: DDP does not average its gradient, so that it drifts apart on the ranks; make a new "
                f"DistributedDataParallel of the model, and attach that",
                stacklevel=2,
            )

    def _named(self, bucket: dist.GradBucket) -> list[tuple[str, torch.Tensor]]:
        """Return names and gradients of a bucket: views of real entries in the order in which they lie there."""
        names = [self.name_of(parameter) for parameter in bucket.parameters()]
        known = memory_of(bucket.buffer()), self.recipes.generation
        if bucket.index() not in self._buffers or self._buffers[bucket.index()] != known:
            self._buffers[bucket.index()] = known
            for name, parameter in zip(names, bucket.parameters(), strict=True):
                self.learn_order(name, parameter)
        gradients = zip(names, _gradients_of(bucket), strict=True)
        return [(name, self.order.in_bucket(name, gradient)) for name, gradient in gradients]

    def _reduce_plainly(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket as DDP does without a hook, and send along what is left in the error memories."""
        if self.plain_step.has_memories:
            self.plain_step.add_memories(self._named(bucket))
        if self._plain_buckets is None:
            self._plain_buckets = PlainBuckets(self.given_group)
        halved = self.tuner.halves and bucket.buffer().dtype == torch.float32
        started = self._plain_buckets.start(bucket, halved)
        self.started_plainly(started.work.get_future(), started.buffer, started.sent)
        if bucket.is_last():
            self._finish()
        return started.mean

    def __reduce__(self) -> Any:
        """Pickle a state that was not used yet by its spec and options, as launchers do that start processes with it.

        A state in use is refused: its memories and its process group belong to this process.
        """
        options = self.options
        if self._names or self._group or options.optimizer or options.grad_scaler:
            refuse_pickling("the state of a hook in use")
        remade = functools.partial(
            State, self._spec, aggregate=options.aggregate, timeout=options.timeout, aggregator=options.aggregator,
            aggregator_fallback=options.aggregator_fallback, memory=options.memory,
        )  # fmt: skip
        return remade, ()


def _gradients_of(bucket: dist.GradBucket) -> list[torch.Tensor]:
    """Return the gradients of a bucket, with the shapes of their parameters, and a last dimension of two if complex.

    DDP hands over complex gradients as reals but counts them as complex, so that those that it lists are too short.
    """
    parameters = bucket.parameters()
    if not parameters[0].is_complex():
        return bucket.gradients()
    entries = as_reals(bucket.buffer()).view(-1)
    pieces = entries.split([2 * parameter.numel() for parameter in parameters])
    return [piece.view(*parameter.shape, 2) for piece, parameter in zip(pieces, parameters, strict=True)]


def hook(state: State, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The DDP communication hook that goes with `State`."""
    return state.reduce(bucket)


class _Slot:
    """Holds the state that a model's hook uses now: DDP takes one hook for life, but the state can be replaced."""

    def __init__(self, group: dist.ProcessGroup):
        self.state: State | None = None
        self._plain_buckets = PlainBuckets(group)

    def use(self, state: State | None) -> None:
        """Let the hook use this state from now on, or plain all-reduce if it is None."""
        self.state = state

    def reduce_plainly(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket as DDP does without a hook."""
        mean = self._plain_buckets.start(bucket).mean
        if bucket.is_last():
            self._plain_buckets.wait()
            self._plain_buckets.finish()
        return mean

    def __reduce__(self) -> Any:
        """Become None in a copy: copies of DDP models have no hooks, and can be attached like any other model."""
        return type(None), ()


def _slot_hook(slot: _Slot, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return slot.reduce_plainly(bucket) if slot.state is None else slot.state.reduce(bucket)


class DDPHandle(Handle):
    """What `attach` returns: the handle of a DDP model."""

    def __init__(self, slot: _Slot, state: State):
        super().__init__(state)
        self._slot, self.state = slot, state

    def detach(self) -> None:
        """Go back to plain all-reduce; the model can be attached again."""
        if self._slot.state is self.state:
            self._slot.use(None)
            super().detach()


def _new_slot(model: DistributedDataParallel) -> _Slot:
    """Give the model our hook; GradwireError if it has another one, since DDP takes one for life."""
    slot = _Slot(model.process_group)
    try:
        model.register_comm_hook(slot, _slot_hook)
    except RuntimeError as error:
        hooks = hooks_of(model)
        named = f" ({hooks[0]})" if hooks else ""
        raise GradwireError(
            f"the model has a communication hook already{named}, and DDP takes one for life: wrap the model anew in "
            f"DistributedDataParallel, without register_comm_hook or mixed_precision="
        ) from error
    object.__setattr__(model, "_gradwire_slot", slot)  # not a parameter, not a module
    return slot


def attach(
    model: DistributedDataParallel,
    spec: Spec = "co3",
    *,
    optimizer: torch.optim.Optimizer | None = None,
    grad_scaler: Scaler | None = None,
    aggregate: str = "auto",
    timeout: float | None = None,
    aggregator: str | None = None,
    aggregator_fallback: bool = False,
    memory: str = "fp32",
) -> Handle:
    """Compress the gradients of a DDP model. `spec` is a recipe, or a dict from name patterns to recipes.

    In a program of one process a model that is not wrapped, as frameworks leave it then, stays as it is: a warning says
    so, and the handle does nothing, so that a script can be tried alone.

    A model that is attached already gets the new recipe in place of the old one, and an empty error memory.

    Recipes that mask momentum (sbc, stc, dgc) take over that of the `optimizer`, an SGD, until they are detached.
    With a `grad_scaler` error memory follows the scale of the loss. `aggregate` says how the mean is made from the
    frames of all ranks: "all_gather", "scatter_reduce", "hierarchical", or "auto" for what is fastest
    (docs/aggregation.md). A peer that does not answer within `timeout` seconds (by default, the timeout of the process
    group) is an AggregateError.

    With the recipe `homomorphic` gradients are added up on their way: over the process group, or by the `aggregator` at
    "host:port" (docs/aggregator.md). With `aggregator_fallback` training goes on over the process group if the
    aggregator does not answer.

    `memory` says how error memory is kept: "fp32" (8 bytes a parameter: two copies, one of them provisional), or "bf16"
    with stochastic rounding, which takes half of that (docs/recipes.md: what it saves; docs/accuracy.md: what it costs)
    """
    model = compiled_model(model)
    if not isinstance(model, DistributedDataParallel):
        if isinstance(model, torch.nn.Module) and is_alone(processes(), "attach"):
            options = Options(optimizer, grad_scaler, aggregate, timeout, aggregator, aggregator_fallback, memory)
            return IdleHandle(Gradients(spec, named_parameters(model), None, options))
        raise GradwireError(f"attach needs a DistributedDataParallel model, got {type(model).__name__}: wrap it first")
    if reduces_in_python(model):
        raise GradwireError(PYTHON_REDUCER)
    slot = getattr(model, "_gradwire_slot", None)
    before = slot.state if slot else None
    if before:
        before.close()  # the next one may take over the same optimizer's momentum
    try:
        state = State(
            spec, model, model.process_group, optimizer,
            grad_scaler=grad_scaler, aggregate=aggregate, timeout=timeout,
            aggregator=aggregator, aggregator_fallback=aggregator_fallback, memory=memory,
        )  # fmt: skip
        state.connect()
    except BaseException:
        if before:
            before.open()
        raise
    if slot is None:
        try:
            slot = _new_slot(model)
        except BaseException:
            state.disconnect()
            raise
    slot.use(state)
    if before:
        before.disconnect()
    return DDPHandle(slot, state)
