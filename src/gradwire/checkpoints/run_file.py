"""Checkpoints of a run: one file with all it takes to go on as if it had never stopped.

Beside model, optimizer and position, that is every worker's error memory and row memory (gradwire.backward): what was
not sent or not counted yet would otherwise be lost. The file is an ordinary `torch.save` archive
(`torch.load(file)["model"]` works).
"""

from __future__ import annotations

import hashlib
import itertools
import os
import socket
import zipfile
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gradwire.checkpoints.rank_states import combined
from gradwire.errors import CheckpointError

FORMAT = "gradwire checkpoint 1"
_counter = itertools.count()  # of the files that this process has begun


@dataclass
class Checkpoint:
    """All that a run needs to go on: settings, position, model, optimizer, and the state of every worker."""

    settings: dict[str, Any]  # those that shape the run: task, codec, seed, batch size, …
    step: int  # steps done since the start of the run
    epoch: int
    step_in_epoch: int
    model: dict[str, torch.Tensor]
    optimizer: dict[str, Any]
    # One of each for every worker, in rank order:
    rng: list[torch.Tensor]
    error_memory: list[dict[str, Any]]
    row_memory: list[dict[str, torch.Tensor]] = field(default_factory=list)  # older files have none

    @property
    def workers(self) -> int:
        """How many workers the run had."""
        return len(self.error_memory)

    def error_memory_for(self, rank: int, workers: int) -> dict[str, Any]:
        """The worker's own memory; on another number of workers, each starts from the mean of all.

        The gradient is a mean over workers, so what is still to be sent stays the same in total.
        """
        if workers == self.workers:
            return self.error_memory[rank]
        return combined(self.error_memory)

    def row_memory_for(self, rank: int, workers: int) -> dict[str, torch.Tensor]:
        """The worker's own; on another number of workers it starts empty, since rows belong to one worker's batch."""
        return self.row_memory[rank] if workers == len(self.row_memory) else {}


def save(path: Path, checkpoint: Checkpoint) -> None:
    """Write the file whole or not at all: a crash at any moment leaves the previous one as it was."""
    write_whole(path, {"format": FORMAT, **{f.name: getattr(checkpoint, f.name) for f in fields(checkpoint)}})


def write_whole(path: Path, content: dict[str, Any]) -> None:
    """torch.save to a file beside it, which takes its place when it is on the disk."""
    _remove_remains(path)
    temporary = path.parent / f"{_beginning(path)}{os.getpid()}-{next(_counter)}"
    try:
        with open(temporary, "xb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # torch's writer raises the latter, on a full disk for instance
        raise CheckpointError(f"cannot write the checkpoint {path}: {_reason(error)}") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
    _sync_folder(path.parent)


def _beginning(path: Path) -> str:
    """Return how the names of temporary files of this path begin; the number of the process follows.

    Other machines may write to the same folder, and processes there have numbers of their own.
    """
    return f".{path.name}.gradwire-{socket.gethostname()}-"


def _remove_remains(path: Path) -> None:
    """Remove temporary files that processes left which were killed while they saved."""
    beginning = _beginning(path)
    with suppress(OSError):  # if there is no such folder, saving will say so
        for name in os.listdir(path.parent):
            number = name.removeprefix(beginning).partition("-")[0] if name.startswith(beginning) else ""
            if number.isdecimal() and not _is_alive(int(number)):
                (path.parent / name).unlink(missing_ok=True)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is somebody else's
        return True
    return True


def _reason(error: BaseException) -> str:
    """Return why writing failed, in a line: what the system said, if that is known."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def load(path: Path) -> Checkpoint:
    """Read a checkpoint; nothing in the file is run, whoever wrote it."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()  # torch.load does not look at the archive's checksums
        if damaged:
            raise CheckpointError(f"{path} is damaged (checksum of {damaged}): resume from another one")
        content = torch.load(path, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"cannot read the checkpoint {path}: {error.strerror or error}") from error
    except Exception as error:  # a damaged archive can raise nearly anything
        raise CheckpointError(f"{path} is damaged or not a checkpoint: resume from another one") from error
    if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
        raise CheckpointError(f"{path} is not a checkpoint of this version of gradwire ({FORMAT!r})")
    try:
        loaded = Checkpoint(**content)
    except TypeError as error:
        raise CheckpointError(f"{path} is incomplete: {error}") from error
    memories = (loaded.error_memory, loaded.row_memory)
    if not isinstance(loaded.settings, dict) or not all(isinstance(memory, list) for memory in memories):
        raise CheckpointError(f"{path} was not written by gradwire train")
    return loaded


def digest(model: nn.Module) -> str:
    """SHA-256 of all parameters, names included: equal digests mean equal parameters, bit for bit."""
    sha = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        sha.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}\n".encode())
        sha.update(parameter.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


def _sync_folder(folder: Path) -> None:
    """After this the new name survives a power failure too; systems that cannot sync a folder need not."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError:
        pass
    finally:
        os.close(descriptor)
