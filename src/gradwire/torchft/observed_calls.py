"""What torchft does not tell its process group, though memories depend on it: observed where it is called.

- `Manager.should_commit` says whether a round counts: torchft asks the process group beforehand whether it has failed
  (`errored`), and does not tell it the outcome of the vote.
- `DiLoCo` has fragments of a model that take turns, which may be of equal shapes.
- `LocalSGD` averages parameters, where everything else averages gradients or updates.

And one call is completed. When something fails in the middle of a step (a replica is lost, weights of a peer do not
come), torchft's Manager takes note, answers all other calls of the step at once, and lets the step not count. But the
communication hook of torchft 0.2's DDP asks for a future that these answers do not have, and ends the program.

Relies on `Manager._pg`, on the names of the arguments of `LocalSGD` and `DiLoCo`, and on the hook being
`DistributedDataParallel._comm_hook`, as in torchft 0.2. Where one is gone, importing gradwire.torchft fails.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torchft.ddp import DistributedDataParallel
from torchft.local_sgd import DiLoCo, LocalSGD
from torchft.manager import Manager
from torchft.process_group import ProcessGroupWrapper

from gradwire.torchft.process_group import ProcessGroup


def observe() -> None:
    """Observe torchft from now on; once in a process."""
    Manager.should_commit = _vote_observed(Manager.should_commit)
    LocalSGD.__init__ = _made(LocalSGD.__init__, lambda group, arguments: group.expect_parameters())
    DiLoCo.__init__ = _made(
        DiLoCo.__init__, lambda group, arguments: group.expect_fragments(len(arguments["model_fragments"]))
    )
    DistributedDataParallel._comm_hook = staticmethod(_completed(DistributedDataParallel._comm_hook))


def _group_of(manager: Any) -> ProcessGroup | None:
    """Return gradwire's process group of this manager, also if others of torchft are around it; None without one."""
    group = manager._pg
    while isinstance(group, ProcessGroupWrapper) and not isinstance(group, ProcessGroup):
        group = group._pg
    return group if isinstance(group, ProcessGroup) else None


def _vote_observed(vote: Callable[..., bool]) -> Callable[..., bool]:
    """Return the vote, whose outcome the manager's process group is told."""

    @functools.wraps(vote)
    def should_commit(self: Manager, *arguments: Any, **named: Any) -> bool:
        committed = False
        try:
            committed = vote(self, *arguments, **named)
        finally:  # without an answer the round is undecided, and the other replicas may know better
            group = _group_of(self)
            if group is not None:
                group.end_round(committed)
        return committed

    return should_commit


def _made(init: Callable[..., None], tell: Callable[[ProcessGroup, dict[str, Any]], None]) -> Callable[..., None]:
    """Return a constructor that tells the manager's process group what is made."""
    signature = inspect.signature(init)

    @functools.wraps(init)
    def __init__(self: Any, *arguments: Any, **named: Any) -> None:
        init(self, *arguments, **named)
        given = signature.bind(self, *arguments, **named).arguments
        group = _group_of(given["manager"])
        if group is not None:
            tell(group, given)

    return __init__


def _completed(hook: Callable[..., torch.futures.Future[torch.Tensor]]) -> Callable[..., Any]:
    """Return the hook of torchft's DDP, which also answers in a step that will not count."""

    @functools.wraps(hook)
    def _comm_hook(state: Manager, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if _group_of(state) is None:
            return hook(state, bucket)
        if state.errored() is None:
            try:
                return hook(state, bucket)
            except (AssertionError, AttributeError):
                if state.errored() is None:
                    raise
        answer = torch.futures.Future[torch.Tensor]()
        answer.set_result(bucket.buffer())
        return answer

    return _comm_hook
