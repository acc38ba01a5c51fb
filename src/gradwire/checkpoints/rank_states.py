"""The states of all ranks as one, for checkpoints: gathered, and given out again to any number of workers.

On the same number of workers every rank gets its own state back, bit for bit. On another, all start from the mean of
the error memories: the gradient is a mean over workers, so that what is still to be sent stays the same in total.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist

from gradwire.errors import CheckpointError, GradwireError

FORMAT = "gradwire memories 1"
BATCH_BYTES = 1 << 28  # of tensors that are on their way, or read, at a time
Path = tuple[str, ...]  # of keys, in nested dicts
Group = dist.ProcessGroup | None  # None: the default group, or a process all by itself


class HasState(Protocol):
    """Anything whose state can be saved and loaded, as PyTorch's own objects do."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what `state_dict` returned."""


class AllRanks:
    """All ranks' states in one: what `handle.all_ranks` is, and what frameworks take that let rank 0 write."""

    def __init__(
        self,
        handle: HasState,
        group: Group = None,
        together: Callable[[str], AbstractContextManager[Group]] | None = None,
    ):
        """`together` begins a block when all ranks are in the call that it names, and raises if one does not come.

        It may give the block another group of the same ranks for its collectives, such as one with another timeout.
        """
        self.handle, self.group, self._together = handle, group, together

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all ranks on rank 0, and an empty dict elsewhere. All ranks must call it.

        If some do not within the timeout of the handle, or one is lost meanwhile, it is an AggregateError.
        """
        state = self.handle.state_dict()
        with self.together("handle.all_ranks.state_dict()") as group:
            return gather(state, group)

    @contextmanager
    def together(self, call: str) -> Iterator[Group]:
        """Begin the block, for what all ranks do in this call, when all are there, if that can be found out.

        It gets the group that its collectives are to use.
        """
        with nullcontext() if self._together is None else self._together(call) as group:
            yield group or self.group

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load this rank's part of what rank 0 saved; on another number of workers, the mean of all parts."""
        self.handle.load_state_dict(own_part(state, self.group))


# ── giving out ──


def own_part(state: Mapping[str, Any], group: Group = None) -> dict[str, Any]:
    """Return this rank's part of a gathered state; a state of a single rank stays as it is."""
    if not isinstance(state, Mapping) or not state:
        raise CheckpointError(
            "there is no state here: all_ranks.state_dict() has it on rank 0 alone; save it there, load it everywhere"
        )
    if "ranks" not in state:
        return dict(state)
    states = state["ranks"]
    is_gathered = isinstance(states, list) and bool(states) and str(state.get("format")) == FORMAT
    if not is_gathered or not all(isinstance(of_rank, Mapping) for of_rank in states):
        raise CheckpointError(f"not a gathered state of this version of gradwire ({FORMAT!r})")
    rank, workers = place(group)
    return dict(states[rank]) if len(states) == workers else combined(states)


def combined(states: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the state that every rank starts from on another number of workers."""
    try:
        return with_shards(mean(states), len(states))
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:  # tensors of other shapes, or none at all
        raise CheckpointError("the states of the ranks in this checkpoint do not fit together: load another") from error


def mean(states: list[Any], workers: int | None = None) -> Any:
    """Average tensors at every depth of nested dicts; one that a rank does not have counts as zero.

    Everything else must be the same in all states, and is taken from the first.
    """
    workers = workers or len(states)
    first = states[0]
    if any(isinstance(state, Mapping) != isinstance(first, Mapping) for state in states):
        raise ValueError("a dict on some ranks, and something else on others")
    if isinstance(first, Mapping):
        keys = dict.fromkeys(key for state in states for key in state)
        return {key: mean([state[key] for state in states if key in state], workers) for key in keys}
    if isinstance(first, torch.Tensor) and first.is_floating_point():
        total = first.to(torch.float64, copy=True)
        for other in states[1:]:
            if other.shape != first.shape:
                raise ValueError("tensors of other shapes on other ranks")
            total += other
        return (total / workers).to(first.dtype)
    if isinstance(first, str) and any(state != first for state in states):
        raise ValueError("other recipes on other ranks")
    return first


def with_shards(state: dict[str, Any], workers: int) -> dict[str, Any]:
    """Move the error memory of shards, in a mean of states, into the memory of whole parameters.

    What the owners of shards (scatter-reduce) still have to send belongs to the mean gradient already, so it counts in
    full. On another number of workers the shards have other owners, so every worker takes it into its own memory.
    """
    state = dict(state)
    memory = dict(state.get("memory", {}))
    for name, shards in state.pop("shards", {}).items():
        whole = workers * shards
        state["memory"] = memory
        memory[name] = memory[name] + whole if name in memory else whole
    return state


# ── gathering ──


def gather(state: Mapping[str, Any], group: Group = None) -> dict[str, Any]:
    """Return the states of all ranks on rank 0 of the group, and an empty dict elsewhere; tensors travel in batches."""
    rank, workers = place(group)
    own = dict(leaves(state))
    ranks: list[dict[str, Any]] = [{} for _ in range(workers if rank == 0 else 0)]
    sizes: dict[Path, int] = {}
    for sizes_of_rank in exchanged({path: _bytes(leaf) for path, leaf in own.items()}, group):
        for path, size in sizes_of_rank.items():
            sizes[path] = max(size, sizes.get(path, 0))
    for paths in batches(sizes, sizes):
        part = {path: own[path] for path in paths if path in own}
        for whole, received in zip(ranks, _gathered(part, group), strict=True):
            for path, leaf in received.items():
                put(whole, path, leaf)
    return {"format": FORMAT, "ranks": ranks} if rank == 0 else {}


def _gathered(value: Any, group: Group) -> list[Any]:
    """Return every rank's value on rank 0, and an empty list elsewhere."""
    rank, workers = place(group)
    if workers == 1:
        return [value]
    found: list[Any] | None = [None] * workers if rank == 0 else None
    dist.gather_object(value, found, dst=dist.get_global_rank(group, 0) if group else 0, group=group)
    return found or []


def exchanged(value: Any, group: Group) -> list[Any]:
    """Return every rank's value, on every rank."""
    workers = place(group)[1]
    found: list[Any] = [value] * workers
    if workers > 1:
        dist.all_gather_object(found, value, group=group)
    return found


def place(group: Group) -> tuple[int, int]:
    """Return the number of this rank in the group, and how many ranks the group has."""
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


# ── nested dicts ──


def leaves(tree: Mapping[str, Any], path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield everything in nested dicts that is not a dict (or is an empty one), with its path."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key), value


def put(tree: dict[str, Any], path: Path, leaf: Any) -> None:
    """Set the leaf at this path of a nested dict, and create the dicts on the way."""
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = leaf


def batches(paths: Iterable[Path], sizes: Mapping[Path, int]) -> Iterator[list[Path]]:
    """Cut paths, in their order, into batches of up to BATCH_BYTES; a larger tensor is a batch of its own."""
    batch: list[Path] = []
    total = 0
    for path in paths:
        if batch and total + sizes[path] > BATCH_BYTES:
            yield batch
            batch, total = [], 0
        batch.append(path)
        total += sizes[path]
    if batch:
        yield batch


def _bytes(leaf: Any) -> int:
    return leaf.numel() * leaf.element_size() if isinstance(leaf, torch.Tensor) else 0


# ── what is not for checkpoints ──


def refuse_pickling(what: str) -> NoReturn:
    """Raise the error that says how to save state instead of pickling the object."""
    raise GradwireError(
        f"{what} belongs to this process, its process group and its model, and cannot be pickled or copied: save "
        f"handle.state_dict() on each rank, or handle.all_ranks.state_dict() for all of them, attach again, and load it"
    )
