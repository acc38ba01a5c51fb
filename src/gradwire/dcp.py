"""Error memory in checkpoints of torch.distributed.checkpoint, written by all ranks, read by any number of them:

    dcp.save({"model": model_state, "gradwire": gradwire.dcp.shard(handle)}, checkpoint_id=folder)

    dcp.load({"model": model_state}, checkpoint_id=folder)
    gradwire.dcp.load(handle, folder)

DCP takes equal keys of several ranks for copies and keeps one, so that every rank's tensors have its number in their
keys. Beside them stands a note, from which `load` knows whether all parts are there, of the same save and undamaged:
DCP writes its list of contents last, but overwrites the files of an older checkpoint in the same folder before.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist

from gradwire.checkpoints.rank_states import AllRanks, Path, batches, exchanged, leaves, mean, place, put, with_shards
from gradwire.errors import CheckpointError

FORMAT = "gradwire shard 1"


class HasAllRanks(Protocol):
    """What `attach` returns, or any other object that can give the states of all ranks."""

    @property
    def all_ranks(self) -> AllRanks:
        """The states of all ranks in one."""


def shard(handle: HasAllRanks) -> dict[str, Any]:
    """Return this rank's part of the state dict that `dcp.save` gets. All ranks must call it."""
    ranks = handle.all_ranks
    with ranks.together("gradwire.dcp.shard(handle)") as group:
        save = exchanged(secrets.token_hex(8), group)[0]
    kept: dict[str, Any] = {}
    note: dict[str, Any] = {
        "format": FORMAT,
        "save": save,
        "members": _members(ranks.group),
        "tensors": [],  # [path, shape, dtype, checksum]
        "values": [],  # [path, what is no tensor]
    }
    for path, leaf in leaves(ranks.handle.state_dict()):
        if isinstance(leaf, torch.Tensor):
            put(kept, path, leaf)
            dtype = str(leaf.dtype).removeprefix("torch.")
            note["tensors"].append([path, list(leaf.shape), dtype, _checksum(leaf)])
        else:
            note["values"].append([path, leaf])
    return {f"rank{_own_number()}": {**kept, "note": json.dumps(note)}}


def load(
    handle: HasAllRanks,
    checkpoint_id: str | os.PathLike[str] | None = None,
    *,
    key: str = "gradwire",
    storage_reader: Any = None,
) -> None:
    """Load what was saved as `{key: shard(handle)}`. All ranks must call it.

    On another number of workers every rank gets the mean of the saved memories; each reads and averages a share of
    them. `key` has dots where dicts were nested; `storage_reader` is for checkpoints that are not in a folder.
    """
    ranks = handle.all_ranks
    with ranks.together("gradwire.dcp.load(handle, …)") as group:
        state = _state_for_this_rank(_Saved(key, checkpoint_id, storage_reader, group), group)
    ranks.handle.load_state_dict(state)


def _state_for_this_rank(saved: _Saved, group: dist.ProcessGroup | None) -> dict[str, Any]:
    """Return what this rank had saved, or the mean of all if there were other ranks then."""
    own = _own_number()
    if own in saved.notes and saved.notes[own]["members"] == _members(group):
        return saved.state_of(own)
    if len({tuple(note["members"]) for note in saved.notes.values()}) == 1:
        return saved.mean()
    raise CheckpointError(
        f"{saved.name} was saved by several process groups, and this rank is in another one: "
        f"load it with the same number of ranks in the same groups"
    )


class _Saved:
    """What stands in a checkpoint, read as it is needed."""

    def __init__(
        self, key: str, checkpoint_id: str | os.PathLike[str] | None, reader: Any, group: dist.ProcessGroup | None
    ):
        from torch.distributed.checkpoint import FileSystemReader

        if reader is None and checkpoint_id is not None:
            reader = FileSystemReader(checkpoint_id)
        if reader is None:
            raise CheckpointError("load needs the checkpoint's folder, or a storage_reader")
        self.reader = reader
        self.name = str(checkpoint_id or getattr(reader, "checkpoint_id", "the checkpoint"))
        self.key, self.group = key, group
        self.notes = self._read_notes(self._numbers())
        with self._explain_damage():
            self._known = {
                (number, tuple(path)): (torch.empty(shape, dtype=getattr(torch, dtype), device="meta"), checksum)
                for number, note in self.notes.items()
                for path, shape, dtype, checksum in note["tensors"]
            }

    def _numbers(self) -> list[int]:
        """Of the ranks that saved."""
        try:
            contents = list(self.reader.read_metadata().state_dict_metadata)
        except Exception:  # of whatever storage
            contents = None
        without = [str(rank) for rank, found in enumerate(exchanged(contents is None, self.group)) if found]
        if contents is None or without:
            raise CheckpointError(
                f"rank {', '.join(without)} finds no complete checkpoint in {self.name} (a save that was cut short "
                f"leaves none, and all ranks must see the same folder): load another one"
            )
        pattern = re.compile(re.escape(self.key) + r"\.rank(\d+)\.note")
        numbers = [int(match[1]) for match in map(pattern.fullmatch, contents) if match]
        if not numbers:
            others = sorted(name.rsplit(".rank", 1)[0] for name in contents if re.search(r"\.rank\d+\.note$", name))
            hint = f"; did you save it as {others[0]!r}?" if others else ""
            raise CheckpointError(
                f"{self.name} has no error memory under {self.key!r}{hint} (it is saved with "
                f'dcp.save({{"model": …, "{self.key}": gradwire.dcp.shard(handle)}}))'
            )
        return sorted(numbers)

    def _read_notes(self, numbers: list[int]) -> dict[int, dict[str, Any]]:
        read = self._read({self._flat(number, ("note",)): "" for number in numbers})
        with self._explain_damage():
            notes = {number: json.loads(read[self._flat(number, ("note",))]) for number in numbers}
            for number, note in notes.items():
                if note.get("format") != FORMAT:
                    raise CheckpointError(f"{self.name} is of another version of gradwire (this one reads {FORMAT!r})")
                for other in note["members"]:
                    if other not in notes or notes[other]["save"] != note["save"]:
                        raise CheckpointError(
                            f"{self.name} is torn: the parts of ranks {number} and {other} are not of the same save; "
                            f"load another one, and save each into a folder of its own"
                        )
        return notes

    @contextmanager
    def _explain_damage(self) -> Iterator[None]:
        """Raise a CheckpointError if what stands in a note is not what `shard` writes."""
        try:
            yield
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"{self.name} is damaged, or was not written by gradwire: load another one"
            ) from error

    def state_of(self, number: int) -> dict[str, Any]:
        """Of one rank."""
        state = self._values(number)
        for (_, path), tensor in self._tensors([item for item in self._known if item[0] == number]).items():
            put(state, path, tensor)
        return state

    def mean(self) -> dict[str, Any]:
        """Of all ranks. Each rank reads and averages a share, in pieces, so that few are in memory at a time."""
        rank, workers = place(self.group)
        holders: dict[Path, list[int]] = {}
        sizes: dict[Path, int] = {}
        for (number, path), (like, _) in self._known.items():
            holders.setdefault(path, []).append(number)
            sizes[path] = sizes.get(path, 0) + like.numel() * like.element_size()
        state: dict[str, Any] = mean([self._values(number) for number in self.notes])
        for paths in batches(holders, sizes):
            own = paths[rank::workers]
            read = self._tensors([(number, path) for path in own for number in holders[path]])
            means = [(path, mean([read[n, path] for n in holders[path]], len(self.notes))) for path in own]
            for part in exchanged(means, self.group):
                for path, tensor in part:
                    put(state, path, tensor)
        return with_shards(state, len(self.notes))

    def _values(self, number: int) -> dict[str, Any]:
        state: dict[str, Any] = {}
        with self._explain_damage():
            for path, value in self.notes[number]["values"]:
                put(state, tuple(path), value)
        return state

    def _tensors(self, wanted: list[tuple[int, Path]]) -> dict[tuple[int, Path], torch.Tensor]:
        """Checked; all ranks learn what is damaged, so that none waits for another."""
        read = self._read({self._flat(*item): torch.zeros_like(self._known[item][0], device="cpu") for item in wanted})
        tensors = {item: read[self._flat(*item)] for item in wanted}
        damaged = [self._flat(*item) for item, tensor in tensors.items() if not self._is_sound(item, tensor)]
        for found in exchanged(damaged, self.group):
            if found:
                raise CheckpointError(f"{self.name} is damaged (checksum of {found[0]}): load another one")
        return tensors

    def _is_sound(self, item: tuple[int, Path], tensor: Any) -> bool:
        like, checksum = self._known[item]
        is_like = isinstance(tensor, torch.Tensor) and (tensor.dtype, tensor.shape) == (like.dtype, like.shape)
        return is_like and _checksum(tensor) == checksum

    def _read(self, flat: dict[str, Any]) -> dict[str, Any]:
        from torch.distributed.checkpoint import CheckpointException
        from torch.distributed.checkpoint import load as load_state_dict

        try:
            load_state_dict(flat, storage_reader=self.reader, process_group=self.group)
        except (Exception, CheckpointException) as error:  # of any storage; DCP's own is no Exception
            raise CheckpointError(f"{self.name} is damaged or incomplete: load another one") from error
        return flat

    def _flat(self, number: int, path: Path) -> str:
        """As DCP writes the path of nested dicts."""
        return ".".join((self.key, f"rank{number}", *path))


def _checksum(tensor: torch.Tensor) -> str:
    return f"{zlib.crc32(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data):08x}"


def _own_number() -> int:
    """Among all processes: ranks of several groups, each with a model of its own, may save into one checkpoint."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _members(group: dist.ProcessGroup | None) -> list[int]:
    return dist.get_process_group_ranks(group) if dist.is_available() and dist.is_initialized() else [0]
