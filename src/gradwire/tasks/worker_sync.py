"""How the workers of a run keep together: DDP with a hook, or local steps with a sync now and then."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire import ddp
from gradwire.catalogue.parse_recipe import recipe
from gradwire.engine import auto
from gradwire.errors import CheckpointError, SpecError
from gradwire.local_sgd.local_sgd import LocalSGD
from gradwire.tasks.backward_option import split_state
from gradwire.tasks.settings import Settings

# torch 2.13 renamed the option, and warns of the old name.
_OPTIONS = inspect.signature(DistributedDataParallel).parameters
_SYNC_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _OPTIONS else "broadcast_buffers"
OWN_BUFFERS: dict[str, Any] = {_SYNC_BUFFERS: False}


class EveryStep:
    """Gradients are averaged in every step."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, codec: str, settings: Settings):
        # Statistics of batch normalization are not shared while training; evaluation uses those of rank 0.
        self.forward = DistributedDataParallel(model, **OWN_BUFFERS)
        aggregator = settings.aggregator if sums(codec) else None
        self.handle = ddp.attach(
            self.forward, codec, optimizer=optimizer, aggregate=settings.aggregate, aggregator=aggregator,
            aggregator_fallback=settings.aggregator_fallback,
        )  # fmt: skip

    def running(self) -> AbstractContextManager[Any]:
        """Return the context in which training runs; there is nothing to do around it."""
        return nullcontext()

    def common_parameters(self) -> AbstractContextManager[Any]:
        """While it lasts, the model has parameters that are the same on all workers: here they always are."""
        return nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this worker for a checkpoint."""
        return self.handle.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up the state of this worker; CheckpointError if it is of a run with delayed syncs."""
        if "anchor" in state:
            raise CheckpointError("the checkpoint is of a run with --sync-every above 1: go on with that")
        self.handle.load_state_dict(state)


class Delayed:
    """Every worker trains for itself, and updates are averaged now and then."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, codec: str, sync_every: int | None):
        self.forward, self.optimizer = model, optimizer
        self.handle = LocalSGD(model, optimizer, codec, sync_every)

    def running(self) -> AbstractContextManager[Any]:
        """Return the context in which training runs; leaving it syncs a last time."""
        return self.handle

    def common_parameters(self) -> AbstractContextManager[Any]:
        """Return a context in which the model has parameters that are the same on all workers."""
        return self.handle.common_parameters()

    def state_dict(self) -> dict[str, Any]:
        """Between two syncs the workers' models and optimizers differ, so each has its own."""
        local = {"model": split_state(self.forward)[0], "optimizer": self.optimizer.state_dict()}
        return {**self.handle.state_dict(), "local": local}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up the state of this worker; CheckpointError if it is of a run that exchanged every step."""
        if "anchor" not in state:
            raise CheckpointError("the checkpoint is of a run that exchanged every step: leave out --sync-every")
        self.handle.load_state_dict(state)
        self.forward.load_state_dict(state["local"]["model"])
        self.optimizer.load_state_dict(state["local"]["optimizer"])


def parallelize(
    model: nn.Module, optimizer: torch.optim.Optimizer, codec: str, settings: Settings
) -> EveryStep | Delayed:
    """Return how workers keep together: delayed if the recipe or the settings say so, otherwise in every step."""
    sync_every = settings.sync_every
    if auto.parse(codec) is not None:
        if (sync_every or 1) > 1:
            raise SpecError("auto compares steps that all exchange: leave out --sync-every")
        return EveryStep(model, optimizer, codec, settings)
    if (sync_every or 1) > 1 or recipe(codec).delayed:
        return Delayed(model, optimizer, codec, sync_every)
    return EveryStep(model, optimizer, codec, settings)


def sums(codec: str) -> bool:
    """Whether gradients are added up on their way."""
    return auto.parse(codec) is None and recipe(codec).sums


def spelled_out(codec: str) -> str:
    """The spec with every parameter."""
    target = auto.parse(codec)
    return str(recipe(codec)) if target is None else f"auto:error={target:g}"
