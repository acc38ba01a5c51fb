"""A small training whose ranks leave in a given way: what tests/exit_trials.py runs, in forked ranks or by torchrun.

torchrun --nproc-per-node 2 tests/support/exiting_ranks.py '{"wrapper": "ddp.attach, 2 threads", "way": "end"}'
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradwire

STEPS, LONG = 4, 100_000  # steps until a rank leaves; steps of a training that is to be interrupted
READY = "ready"  # a file that a rank makes, with its number, when it may be interrupted

END, EXIT_0, EXIT_3 = "end", "sys.exit(0)", "sys.exit(3)"
RAISE_ALL, RAISE_ONE, CTRL_C = "exception on all ranks", "exception on one rank", "Ctrl-C"
WAYS = (END, EXIT_0, EXIT_3, RAISE_ALL, RAISE_ONE, CTRL_C)


class LeaveError(Exception):
    """What goes wrong in the user's code."""


@dataclass(frozen=True)
class Leaving:
    """How a training ends: the way out, and what the script does last, as in a `finally` clause."""

    wrapper: str
    way: str = END
    destroy: bool = False  # dist.destroy_process_group()
    detach: bool = False  # handle.detach()


@dataclass
class Wrapped:
    """A model, and how its wrapper is taken off again."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    detach: Callable[[], object] = lambda: None


def _ddp(model: nn.Module, spec: str | None = None, **options: str) -> Wrapped:
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.01)
    handle = gradwire.ddp.attach(wrapped, spec, **options) if spec else None
    return Wrapped(wrapped, _sgd(wrapped), handle.detach if handle else lambda: None)


def _data_parallel(model: nn.Module) -> Wrapped:
    wrapped = gradwire.DataParallel(model, "co3", aggregate="all_gather")
    return Wrapped(wrapped, _sgd(wrapped), wrapped.gradwire.detach)


def _local_sgd(model: nn.Module) -> Wrapped:
    optimizer = _sgd(model)
    block = gradwire.LocalSGD(model, optimizer, "co3", sync_every=1)
    block.__enter__()
    return Wrapped(model, optimizer, lambda: block.__exit__(*sys.exc_info()))


def _fsdp(model: nn.Module) -> Wrapped:
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return Wrapped(model, _sgd(model), gradwire.fsdp.attach(model, "co3", memory="bf16").detach)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


PLAIN = "plain DDP"
# Threads of torch, which decide whether gradwire's exchanges have a thread of their own; and how to wrap a model.
WRAPPERS: dict[str, tuple[int, Callable[[nn.Module], Wrapped]]] = {
    PLAIN: (2, _ddp),
    "ddp.attach, 1 thread": (1, lambda model: _ddp(model, "co3", aggregate="all_gather")),
    "ddp.attach, 2 threads": (2, lambda model: _ddp(model, "co3", aggregate="all_gather")),
    "ddp.attach homomorphic": (2, lambda model: _ddp(model, "homomorphic")),
    "ddp.attach scatter_reduce": (2, lambda model: _ddp(model, "co3", aggregate="scatter_reduce")),
    "DataParallel": (2, _data_parallel),
    "LocalSGD": (2, _local_sgd),
    "fsdp.attach": (2, _fsdp),
}


def train(leaving: Leaving, rank: int) -> None:
    """Train, and leave. The process group exists already."""
    threads, wrap = WRAPPERS[leaving.wrapper]
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    first = nn.Linear(32, 64)
    model = nn.Sequential(first, nn.ReLU(), nn.Linear(64, 200), nn.ReLU(), nn.Linear(200, 10))
    wrapped = wrap(model)
    step = 0

    def reached(_: object) -> None:  # the last gradient of a backward pass: the others are under way
        if step == STEPS and (leaving.way == RAISE_ALL or (leaving.way == RAISE_ONE and rank == 0)):
            raise LeaveError("something is wrong in the user's code")

    if leaving.wrapper == "fsdp.attach":
        model.register_full_backward_hook(lambda *_: reached(None))
    else:
        first.weight.register_hook(reached)
    try:
        for step in range(LONG if leaving.way == CTRL_C else STEPS + 1):
            if step == STEPS and leaving.way == CTRL_C:
                open(f"{READY}.{rank}", "w").close()  # from now on it may be interrupted
            wrapped.optimizer.zero_grad()
            wrapped.model(torch.randn(8, 32, dtype=torch.float32, device="cpu")).square().mean().backward()
            wrapped.optimizer.step()
    finally:
        if leaving.detach:
            wrapped.detach()
        if leaving.destroy:
            dist.destroy_process_group()
    if leaving.way == EXIT_0:
        sys.exit(0)
    if leaving.way == EXIT_3:
        sys.exit(3)


def main() -> None:
    """Be one rank that torchrun has started."""
    dist.init_process_group("gloo")
    train(Leaving(**json.loads(sys.argv[1])), dist.get_rank())


if __name__ == "__main__":
    main()
