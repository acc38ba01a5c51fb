"""Where a client keeps what has to outlive a message: Flower's context, or files.

Contents are dicts of tensors and plain values, by name. `write` and `move` happen whole or not at all.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
import time
import urllib.parse
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from flwr.app import Array, ArrayRecord, Context

from gradwire.checkpoints.run_file import write_whole
from gradwire.errors import CheckpointError, GradwireError

RECORD = "gradwire"  # in the context's state
KEPT_DAYS = 30  # for trainings that may go on
Content = dict[str, Any]
in_simulation = False  # set by engines that run clients in one process


class Store(Protocol):
    def read(self, name: str) -> Content | None:
        """None where there is nothing, or nothing that can be read."""

    def write(self, name: str, content: Content) -> None: ...
    def move(self, name: str, new: str) -> None: ...
    def drop(self, name: str) -> None: ...


def store_of(context: Context, training: bytes, folder: str | Path | None) -> Store:
    """That of this client in this training."""
    if folder is None and (in_simulation or _under_ray()):
        return InContext(context, training)
    return InFolder(Path(folder).expanduser() if folder else default_folder(), training, client_name(context))


def client_name(context: Context) -> str:
    """The same for one client in all messages, and after a restart where Flower lets us know."""
    partition = context.node_config.get("partition-id")
    return f"node-{context.node_id}" if partition is None else f"partition-{partition}"


def default_folder() -> Path:
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "gradwire"


def _under_ray() -> bool:
    """Flower's simulation runs clients in Ray's actors; a client cannot be restarted there without the server."""
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()


class InContext:
    """In the state that Flower keeps for a client as long as a run lasts."""

    def __init__(self, context: Context, training: bytes):
        self.state, self.prefix = context.state, training.hex() + " "
        if any(not name.startswith(self.prefix) for name in self._arrays()):
            self.state[RECORD] = ArrayRecord()  # of another training

    def _arrays(self) -> dict[str, Array]:
        record = self.state.get(RECORD)
        return dict(record) if isinstance(record, ArrayRecord) else {}

    def _put(self, arrays: dict[str, Array]) -> None:
        self.state[RECORD] = ArrayRecord(arrays)

    def read(self, name: str) -> Content | None:
        array = self._arrays().get(self.prefix + name)
        try:
            return None if array is None else torch.load(io.BytesIO(array.data), weights_only=True)
        except Exception:  # as of files
            return None

    def write(self, name: str, content: Content) -> None:
        buffer = io.BytesIO()
        torch.save(content, buffer)
        data = buffer.getvalue()
        self._put(self._arrays() | {self.prefix + name: Array("uint8", (len(data),), "torch", data)})

    def move(self, name: str, new: str) -> None:
        arrays = self._arrays()
        self._put(arrays | {self.prefix + new: arrays.pop(self.prefix + name)})

    def drop(self, name: str) -> None:
        arrays = self._arrays()
        if arrays.pop(self.prefix + name, None) is not None:
            self._put(arrays)


class InFolder:
    """In files: FOLDER/TRAINING/CLIENT/NAME.pt."""

    def __init__(self, folder: Path, training: bytes, client: str):
        self.folder = folder / training.hex() / urllib.parse.quote(client, safe="")
        if not self.folder.is_dir():
            try:
                self.folder.mkdir(0o700, parents=True, exist_ok=True)  # of what it learned from its data
            except OSError as error:
                raise GradwireError(
                    f"cannot keep the error memory in {self.folder} ({error.strerror or error}): name a folder that "
                    f"can be written to with compress(…, folder=…) or the variable XDG_STATE_HOME"
                ) from error
            _clear_old_trainings(folder)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.pt"

    def read(self, name: str) -> Content | None:
        path = self._path(name)
        try:
            with zipfile.ZipFile(path) as archive:
                if archive.testzip():
                    return None
            return torch.load(path, weights_only=True)
        except FileNotFoundError:
            return None
        except Exception:  # a damaged file can raise nearly anything, and is as good as none
            return None

    def write(self, name: str, content: Content) -> None:
        with self._told():
            write_whole(self._path(name), content)

    def move(self, name: str, new: str) -> None:
        with self._told():
            os.replace(self._path(name), self._path(new))

    def drop(self, name: str) -> None:
        with self._told():
            self._path(name).unlink(missing_ok=True)

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """A disk that is full or read-only is a reason for the server's log. torch.save has a RuntimeError for it."""
        try:
            yield
        except (OSError, RuntimeError, CheckpointError) as error:
            raise GradwireError(f"cannot keep what this client has to remember in {self.folder}: {error}") from error


def _clear_old_trainings(folder: Path) -> None:
    """Of which no client has been asked for a month: nobody else would ever remove them."""
    for training in folder.iterdir():
        if len(training.name) != 16 or not training.is_dir():
            continue
        try:
            files = [path.stat().st_mtime for path in training.rglob("*.pt")]
            newest = max(files, default=training.stat().st_mtime)
        except FileNotFoundError:  # another client of this machine has moved it just now: somebody is using it
            continue
        if newest < time.time() - KEPT_DAYS * 86400:
            shutil.rmtree(training, ignore_errors=True)
