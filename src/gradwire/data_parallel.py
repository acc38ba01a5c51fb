"""DataParallel: the fast path, in place of DistributedDataParallel.

    model = gradwire.DataParallel(model, "co3")       # then train as ever; model.gradwire.stats()

1. Rank 0's parameters and buffers are broadcast once.
2. A hook on every parameter tells when its gradient is accumulated. Small ones wait for their neighbours; then the
   exchange begins, in a thread, in place on `p.grad`: there are no buckets and no copies to and from them.
3. When the backward pass is over, a callback of the autograd engine hands over what has no gradient on this rank, and
   waits until all gradients are means.

All ranks must begin exchanges in the same order, so parameters are handed over in that of rank 0's first backward pass,
whatever happens first in a later one.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.aggregate.transport.link import Link
from gradwire.catalogue.spec_by_name import Spec
from gradwire.correct.complex_pairs import as_reals
from gradwire.engine.gradients import Gradients
from gradwire.engine.handle import Handle
from gradwire.engine.options import Options, Scaler
from gradwire.engine.parameter_watch import ParameterWatch, named_parameters
from gradwire.engine.sparse_gradients import no_rows, parameters_with_sparse_gradients
from gradwire.errors import AggregateError, GradwireError
from gradwire.torch_internals.autograd import call_after_backward, in_backward
from gradwire.torch_internals.tensors import entries_of, leaves_of

TOGETHER = 2**18  # entries: smaller parameters travel with others until there are so many
BROADCAST = 2**24  # bytes at a time


class DataParallelHandle(Handle):
    """The handle of a DataParallel model: `model.gradwire`."""

    def __init__(self, gradients: Gradients):
        super().__init__(gradients)
        self.hooks: list[Any] = []  # on the parameters, as long as their gradients are averaged

    def detach(self) -> None:
        """Stop averaging gradients: `model.module` is as it was before, and can be wrapped again."""
        _remove(self.hooks)
        super().detach()


class DataParallel(nn.Module):
    """A model whose gradients are averaged over all ranks, compressed. `spec` and the options are those of
    `gradwire.ddp.attach`; `model.gradwire` is its handle, and `model.module` the model itself.

    Parameters and buffers are rank 0's at first. Later each rank has buffers of its own, such as the statistics of
    batch normalization.
    """

    def __init__(
        self,
        module: nn.Module,
        spec: Spec = "co3",
        *,
        optimizer: torch.optim.Optimizer | None = None,
        grad_scaler: Scaler | None = None,
        process_group: dist.ProcessGroup | None = None,
        aggregate: str = "auto",
        timeout: float | None = None,
        aggregator: str | None = None,
        aggregator_fallback: bool = False,
        memory: str = "fp32",
    ):
        super().__init__()
        _check(module)
        self.module = module
        options = Options(optimizer, grad_scaler, aggregate, timeout, aggregator, aggregator_fallback, memory)
        self.gradwire = DataParallelHandle(Gradients(spec, named_parameters(module), process_group, options))
        trained = {name: p for name, p in named_parameters(module) if p.requires_grad}
        sparse = parameters_with_sparse_gradients(module)
        self._trained = {name: p for name, p in trained.items() if id(p) not in sparse}
        self._sparse = {name: p for name, p in trained.items() if id(p) in sparse}
        try:
            self._gradients.open()
            for name, parameter in self._sparse.items():
                self._gradients.check_sparse(name, parameter)
            self._gradients.connect()
        except BaseException:
            self._gradients.close()  # which may have taken over the optimizer's momentum
            raise
        _broadcast(self._gradients.link, [*module.parameters(), *module.buffers()])
        self._watch = ParameterWatch(module, trained.values())
        self._sync = True
        self._checked = False  # whether the forward pass has looked for parameters that are not averaged
        self._rearranged = False
        self._arrange(list(reversed(self._trained)))
        self._listen()

    def _listen(self) -> None:
        """The parameters outlive this object: their hooks must not keep it, nor act after it is gone."""
        hooks, own = self.gradwire.hooks, weakref.ref(self)
        for name, parameter in (*self._trained.items(), *self._sparse.items()):
            hooks.append(parameter.register_post_accumulate_grad_hook(functools.partial(_accumulated, own, name)))
            _wrapped[id(parameter)] = self
        weakref.finalize(self, _remove, hooks)

    @property
    def _gradients(self) -> Gradients:
        return self.gradwire.gradients

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Call the model itself; the backward pass of what it returns averages the gradients."""
        if torch.compiler.is_compiling():
            return self.module(*inputs, **options)
        if self._running and not in_backward():
            self._after_failure()
        if torch.is_grad_enabled():
            self._check_parameters()
            self._checked = True
        outputs = self.module(*inputs, **options)
        if self._sync and torch.is_grad_enabled():
            for tensor in leaves_of(outputs):
                if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
                    tensor.register_hook(self._begin)
        return outputs

    def _check_parameters(self) -> None:
        if self.gradwire.hooks:
            self._watch.check(
                "have it in the model, trained, before; or call model.gradwire.detach(), and wrap model.module again"
            )

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether backward passes average gradients, as in DDP: False does what `no_sync` does, until it is True."""
        return self._sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, sync: bool) -> None:
        self._sync = bool(sync)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients are accumulated on each rank, and averaged by the first backward pass after the block."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    # ── one backward pass ──

    def _arrange(self, names: list[str]) -> None:
        """Who travels with whom, in this order."""
        self._units: list[list[str]] = []
        entries = TOGETHER
        for name in names:
            if entries >= TOGETHER:
                self._units.append([])
                entries = 0
            self._units[-1].append(name)
            entries += self._trained[name].numel()
        self._unit_of = {name: i for i, unit in enumerate(self._units) for name in unit}
        self._reset()

    def _reset(self) -> None:
        self._arrived: dict[str, None] = {}  # in the order of this backward pass
        self._left = [len(unit) for unit in self._units]
        self._submitted = 0
        self._missing: dict[str, torch.Tensor] = {}  # where others' gradients go, if there are any
        self._running = self._has_sparse = False

    def _begin(self, *_: object) -> None:
        """The outputs get their gradients first, and in the outermost backward pass: at its end we are called."""
        if self._sync and not self._running:
            if not self._checked:  # because the forward pass was compiled, or was that of `module`
                self._check_parameters()
            self._running, self._checked = True, False
            call_after_backward(self._finish)

    def _accumulated(self, name: str, _: torch.Tensor) -> None:
        if not self._sync:
            return
        self._begin()
        if name in self._arrived:
            raise GradwireError(
                f"the gradient of {name!r} came twice in one backward pass, and may be under way: "
                f"checkpoint with use_reentrant=False"
            )
        if name in self._sparse:
            self._has_sparse = True
            return
        self._arrived[name] = None
        self._left[self._unit_of[name]] -= 1
        while self._submitted < len(self._units) and not self._left[self._submitted]:
            self._submit_next()

    def _submit_next(self) -> None:
        named = []
        for name in self._units[self._submitted]:
            parameter = self._trained[name]
            gradient = parameter.grad
            if gradient is None:
                gradient = self._missing[name] = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
            elif gradient.layout != torch.strided:
                raise GradwireError(
                    f"{name!r} has a sparse gradient on this rank, but is no weight of a sparse embedding alone: build "
                    f"the embedding with sparse=False"
                )
            elif gradient.is_conj() or gradient.is_neg():  # its memory holds other numbers, and is averaged in place
                gradient = self._trained[name].grad = gradient.resolve_conj().resolve_neg()
            named.append((name, as_reals(gradient)))
        self._gradients.submit((self._rearranged, self._submitted), named, [n for n, _ in named if n in self._missing])
        self._submitted += 1

    def _finish(self) -> None:
        """The backward pass is over."""
        if not self._arrived and not self._has_sparse:  # nothing was asked of the parameters, as by torch.autograd.grad
            self._reset()
            return
        try:
            while self._submitted < len(self._units):
                self._submit_next()
            means = self._average_sparse()
            touched = self._gradients.finish_step()
        except BaseException:
            self._abandon()
            raise
        for name, mean in means.items():
            if self._sparse[name].grad is not None or entries_of(mean):
                self._sparse[name].grad = mean
        for name in touched & set(self._missing):
            self._trained[name].grad = self._missing[name]
        if self._rearranged:
            self._reset()
        else:
            self._rearranged = True
            self._arrange(self._order_of_rank_0())

    def _average_sparse(self) -> dict[str, torch.Tensor]:
        """Return the means of sparse gradients: they are few and have no frames, and go out when all others have."""
        for name, parameter in self._sparse.items():
            gradient = no_rows(parameter) if parameter.grad is None else parameter.grad
            self._gradients.submit_sparse(name, gradient if gradient.is_sparse else gradient.to_sparse(1))
        return self._gradients.sparse.finish(self._gradients.link)

    def _order_of_rank_0(self) -> list[str]:
        known = list(self._trained)
        order = [*self._arrived, *(name for name in reversed(known) if name not in self._arrived)]
        numbers = torch.tensor([known.index(name) for name in order], dtype=torch.int64, device="cpu")
        self._gradients.link.broadcast(numbers)
        return [known[i] for i in numbers.tolist()]

    def _after_failure(self) -> None:
        """The last backward pass ended with an error, perhaps on this rank alone."""
        error = None
        if self._submitted:  # whatever came next would meet what the others send of that step
            error = AggregateError(
                f"a backward pass of rank {dist.get_rank()} ended with an error after some of its gradients were sent, "
                f"so that the ranks are no longer in step: make a new DataParallel on all ranks"
            )
        self._gradients.abandon_step(error)
        self._reset()
        if error is not None:
            raise error

    def _abandon(self) -> None:
        self._gradients.abandon_step()
        self._reset()

    def __getstate__(self) -> None:
        raise GradwireError("a gradwire.DataParallel cannot be copied or pickled: take model.module")


_wrapped: weakref.WeakValueDictionary[int, DataParallel] = weakref.WeakValueDictionary()  # by id of parameter


def _accumulated(owner: weakref.ref[DataParallel], name: str, gradient: torch.Tensor) -> None:
    model = owner()
    if model is not None:
        model._accumulated(name, gradient)


def _remove(hooks: list[Any]) -> None:
    while hooks:
        hooks.pop().remove()


def _check(module: nn.Module) -> None:
    if not isinstance(module, nn.Module):
        raise GradwireError(f"model must be a torch.nn.Module, got {type(module).__name__}")
    if any(isinstance(m, DistributedDataParallel | DataParallel) for m in module.modules()):
        raise GradwireError("DataParallel takes the place of DistributedDataParallel: pass the model itself")
    for parameter in module.parameters():
        wrapper = _wrapped.get(id(parameter))
        if wrapper is not None and wrapper.gradwire.hooks:
            raise GradwireError(
                "the model is in a DataParallel already, and gradients would be averaged twice: "
                "call detach() of that one's `gradwire` first"
            )
    if not any(p.requires_grad for p in module.parameters()):
        raise GradwireError("the model has no parameter that is trained (requires_grad)")
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_meta or nn.parameter.is_lazy(tensor):
            raise GradwireError(f"{name!r} has no values yet: give them to the model first (lazy modules: one forward)")


@torch.no_grad()
def _broadcast(link: Link, tensors: list[torch.Tensor]) -> None:
    """All ranks get rank 0's, many small ones at a time."""
    alike: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        alike.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for group in alike.values():
        together: list[torch.Tensor] = []
        for i, tensor in enumerate(group):
            together.append(tensor)
            if i + 1 == len(group) or sum(t.nbytes for t in together) >= BROADCAST:
                flat = torch.cat([t.reshape(-1) for t in together])
                link.broadcast(flat)
                for t, values in zip(together, flat.split([t.numel() for t in together]), strict=True):
                    t.copy_(values.view(t.shape))
                together = []
