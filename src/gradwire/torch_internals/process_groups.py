"""What torch.distributed does not tell about process groups, or offers only with conditions that do not suit us."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from gradwire.torch_internals.versions import gone


def default_store() -> dist.Store | None:
    """Return the store where the default process group met; None without one.

    Relies on `distributed_c10d._get_default_store`, the same in torch 2.8 to 2.15. Without it nobody can say which
    ranks have not attached, nor from which address this one reaches the others; groups get the names that torch gives.
    """
    try:
        store: dist.Store = distributed_c10d._get_default_store()
    except (AttributeError, RuntimeError, ValueError):  # it is gone, or there is no process group
        return None
    return store


def backends_of(group: dist.ProcessGroup) -> str:
    """Return the backend that a group has for each kind of device, such as "cpu:gloo,cuda:nccl".

    torch.distributed answers for the groups that it has made itself. Those that others have put together, as torchft
    does, are asked themselves: that relies on `ProcessGroup._device_types` and `_get_backend`, the same in torch 2.8 to
    2.15. Without them it raises a GradwireError: what a group can carry would have to be guessed.
    """
    try:
        return dist.get_backend_config(group)
    except (TypeError, ValueError):  # it is not in torch's list
        try:
            return ",".join(f"{device.type}:{group._get_backend(device).name()}" for device in group._device_types)
        except AttributeError as error:
            raise gone("ProcessGroup._device_types") from error


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> datetime.timedelta:
    """Return how long collectives of the group on this device wait for a peer.

    Relies on `ProcessGroup._get_backend`, and on `_timeout` of its options, the same in torch 2.8 to 2.15. Without them
    it raises a GradwireError: every wait is bounded by this time.
    """
    try:
        timeout: datetime.timedelta = group._get_backend(device).options._timeout
    except AttributeError as error:
        raise gone("ProcessGroup._get_backend(device).options._timeout") from error
    return timeout


def new_group(name: str, ranks: Sequence[int], timeout: datetime.timedelta, backend: str) -> dist.ProcessGroup:
    """Make a process group under a name that is the caller's, who sees to it that no two groups get the same.

    The ranks of the group call it, and nobody else has to. torch.distributed.new_group can do that, too, but names the
    group after a number that a rank counts by itself: of the groups that it is in (to torch 2.13), or of those that it
    has made or was asked to make (in torch 2.15). Wherever the training has groups of some ranks, these numbers differ,
    and ranks then wait for each other under different names. In 2.15 a group of some ranks also changes the number from
    which the names of all later groups of the training are made, on its own ranks alone.

    Relies on `distributed_c10d._new_process_group_helper` and `distributed_c10d._world.pg_group_ranks`, used as
    torch.distributed.new_group itself uses them in torch 2.8 to 2.15. Without them, a group of all ranks is made by
    torch.distributed.new_group, and one of some ranks raises a GradwireError.
    """
    store, world = default_store(), getattr(distributed_c10d, "_world", None)
    helper = getattr(distributed_c10d, "_new_process_group_helper", None)
    if store is None or helper is None or not hasattr(world, "pg_group_ranks"):
        if len(ranks) == dist.get_world_size():
            group: dist.ProcessGroup = dist.new_group(list(ranks), timeout, backend)  # under torch's own name
            return group
        raise gone("torch.distributed.distributed_c10d._new_process_group_helper")
    everyone = dist.group.WORLD
    assert everyone is not None and world is not None
    group, _ = helper(
        len(ranks), ranks.index(dist.get_rank()), list(ranks), dist.Backend(backend), store, name,
        timeout=timeout, device_id=everyone.bound_device_id,
    )  # fmt: skip
    world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    return group
