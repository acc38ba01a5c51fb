"""Process groups of gradwire.torchft in threads of one process, over real sockets: replicas without a Manager."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch.distributed import ReduceOp, TCPStore
from torch.distributed.distributed_c10d import AllreduceOptions

from gradwire.torchft import ProcessGroup

EXACT = "topk:p=0.01,values=fp32,mask=off,decay=1"  # what is sent and what is left are integers if gradients are
D = 10_000
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # otherwise Gloo may look up the host's name, for seconds
Result = TypeVar("Result")
_made: list[ProcessGroup] = []


def in_threads(calls: Sequence[Callable[[], Result]]) -> list[Result]:
    """What the calls return, each made in a thread of its own; the first error, when all have ended."""
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
    return [future.result() for future in futures]


class Quorums:
    """Where the replicas meet: a store, with a prefix of its own for each quorum."""

    def __init__(self) -> None:
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._numbers = itertools.count()

    def form(self, groups: Sequence[ProcessGroup]) -> None:
        address = f"127.0.0.1:{self.store.port}/quorum/{next(self._numbers)}"
        calls = [
            lambda rank=rank, group=group: group.configure(address, "replica", rank, len(groups))
            for rank, group in enumerate(groups)
        ]
        in_threads(calls)


def make(spec: str = EXACT, seconds: float = 20, **options: Any) -> ProcessGroup:
    _made.append(ProcessGroup(spec, timeout=timedelta(seconds=seconds), **options))
    return _made[-1]


def shut_down_all() -> None:
    """Shut down all groups that were made since the last call."""
    while _made:
        _made.pop().shutdown()


def allreduce(group: ProcessGroup, tensor: torch.Tensor, operation: Any = ReduceOp.SUM) -> Any:
    options = AllreduceOptions()
    options.reduceOp = operation
    return group.allreduce([tensor], options)


def add_up(groups: Sequence[ProcessGroup], tensors: Sequence[torch.Tensor], operation: Any = ReduceOp.SUM) -> None:
    """Replace the tensors by their sum; the round is still open."""
    in_threads([lambda g=g, t=t: allreduce(g, t, operation).wait() for g, t in zip(groups, tensors, strict=True)])


def vote(groups: Sequence[ProcessGroup], committed: bool = True) -> None:
    """End the round as torchft does."""
    for group in groups:
        assert group.errored() is None
        group.end_round(committed)


def left(group: ProcessGroup) -> torch.Tensor:
    """All that is in the group's error memory, added up by entry."""
    return sum(group.state_dict()["memory"].values(), torch.zeros(D))


class Integers:
    """Gradients of integers, and the sum of those that count."""

    def __init__(self, seed: int):
        self.generator, self.computed = torch.Generator().manual_seed(seed), torch.zeros(D)
        self.last = torch.zeros(D)

    def next(self) -> torch.Tensor:
        self.last = torch.randint(-50, 51, (D,), generator=self.generator).float()
        return self.last.clone()

    def count(self) -> None:
        self.computed += self.last
