"""Where a client keeps what has to outlive a message: in Flower's context, or in files."""

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
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Protocol

import torch
from flwr.app import Array, ArrayRecord, Context

from gradwire.checkpoints.run_file import write_whole
from gradwire.errors import CheckpointError, GradwireError

RECORD = "gradwire"  # key in the context's state
KEPT_DAYS = 30  # after which a training that no client was asked for counts as over
Content = dict[str, Any]
_in_simulation = ContextVar("in_simulation", default=False)


class Store(Protocol):
    """What one client keeps of one training, by name: dicts of tensors and plain values.

    `write` and `move` happen completely or not at all, whenever the process is killed, and what they stored is still
    there for the next message. A store never returns what another training or another client has written. One client
    handles one message at a time, so no two threads or processes may use the store of the same client at once.
    Whatever prevents storing, such as a full disk, is raised as a GradwireError.
    """

    def read(self, name: str) -> Content | None:
        """Return what was written, or None if there is nothing, or nothing that can be read."""

    def write(self, name: str, content: Content) -> None:
        """Store a dict under this name, in place of what was there."""

    def move(self, name: str, new: str) -> None:
        """Rename what is stored under `name`, in place of what was under `new`."""

    def drop(self, name: str) -> None:
        """Delete what is stored under this name, if there is anything."""


def store_of(context: Context, training: bytes, folder: str | Path | None) -> Store:
    """Return the store of this client in this training: files, or Flower's context in a simulation without `folder`."""
    if folder is None and (_in_simulation.get() or _under_ray()):
        return ContextStore(context, training)
    return FolderStore(Path(folder).expanduser() if folder else default_folder(), training, client_name(context))


@contextlib.contextmanager
def simulation() -> Iterator[None]:
    """Run the clients of this block as a simulation, which keeps their state in Flower's context.

    Engines that run clients in one process use it. It holds for the thread that enters the block.
    """
    token = _in_simulation.set(True)
    try:
        yield
    finally:
        _in_simulation.reset(token)


def client_name(context: Context) -> str:
    """Return a name that one client has in all messages, and after a restart if it has a partition or a fixed id."""
    partition = context.node_config.get("partition-id")
    return f"node-{context.node_id}" if partition is None else f"partition-{partition}"


def default_folder() -> Path:
    """Return the user's folder for state: `$XDG_STATE_HOME/gradwire` or `~/.local/state/gradwire`."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "gradwire"


def _under_ray() -> bool:
    """Whether this is an actor of Ray, in which Flower's simulation runs clients: they never outlive the server."""
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()


class ContextStore:
    """A store in the state that Flower keeps for a client as long as a run lasts."""

    def __init__(self, context: Context, training: bytes):
        self.state, self.prefix = context.state, training.hex() + " "
        if any(not name.startswith(self.prefix) for name in self._arrays()):
            self.state[RECORD] = ArrayRecord()  # it belongs to another training

    def _arrays(self) -> dict[str, Array]:
        record = self.state.get(RECORD)
        return dict(record) if isinstance(record, ArrayRecord) else {}

    def _put(self, arrays: dict[str, Array]) -> None:
        self.state[RECORD] = ArrayRecord(arrays)

    def read(self, name: str) -> Content | None:
        """Return what was written, or None; see `Store`."""
        array = self._arrays().get(self.prefix + name)
        try:
            return None if array is None else torch.load(io.BytesIO(array.data), weights_only=True)
        except Exception:  # damaged bytes can raise nearly anything, and are as good as none
            return None

    def write(self, name: str, content: Content) -> None:
        """Store a dict as bytes in one array."""
        buffer = io.BytesIO()
        torch.save(content, buffer)
        data = buffer.getvalue()
        self._put(self._arrays() | {self.prefix + name: Array("uint8", (len(data),), "torch", data)})

    def move(self, name: str, new: str) -> None:
        """Rename what is stored under `name`."""
        arrays = self._arrays()
        self._put(arrays | {self.prefix + new: arrays.pop(self.prefix + name)})

    def drop(self, name: str) -> None:
        """Delete what is stored under this name, if there is anything."""
        arrays = self._arrays()
        if arrays.pop(self.prefix + name, None) is not None:
            self._put(arrays)


class FolderStore:
    """A store in files, FOLDER/TRAINING/CLIENT/NAME.pt, that only their owner can read."""

    def __init__(self, folder: Path, training: bytes, client: str):
        self.folder = folder / training.hex() / urllib.parse.quote(client, safe="")
        if not self.folder.is_dir():
            try:
                self.folder.mkdir(0o700, parents=True, exist_ok=True)  # private: the memory tells of the data
            except OSError as error:
                raise GradwireError(
                    f"cannot keep the error memory in {self.folder} ({error.strerror or error}): name a folder that "
                    f"can be written to with compress(…, folder=…) or the variable XDG_STATE_HOME"
                ) from error
            _clear_old_trainings(folder)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.pt"

    def read(self, name: str) -> Content | None:
        """Return what was written, or None; see `Store`."""
        path = self._path(name)
        try:
            with zipfile.ZipFile(path) as archive:
                if archive.testzip():
                    return None
            content: Content = torch.load(path, weights_only=True)
            return content
        except FileNotFoundError:
            return None
        except Exception:  # a damaged file can raise nearly anything, and is as good as none
            return None

    def write(self, name: str, content: Content) -> None:
        """Store a dict in a file that replaces the one before in one step."""
        with self._explain_failures():
            write_whole(self._path(name), content)

    def move(self, name: str, new: str) -> None:
        """Rename a file."""
        with self._explain_failures():
            os.replace(self._path(name), self._path(new))

    def drop(self, name: str) -> None:
        """Delete a file, if there is one."""
        with self._explain_failures():
            self._path(name).unlink(missing_ok=True)

    @contextlib.contextmanager
    def _explain_failures(self) -> Iterator[None]:
        """Raise a GradwireError, which reaches the server's log, if the disk is full or read-only.

        torch.save raises a RuntimeError for that.
        """
        try:
            yield
        except (OSError, RuntimeError, CheckpointError) as error:
            raise GradwireError(f"cannot keep what this client has to remember in {self.folder}: {error}") from error


def _clear_old_trainings(folder: Path) -> None:
    """Delete trainings for which no client was asked in `KEPT_DAYS` days: nobody else would ever remove them."""
    for training in folder.iterdir():
        if len(training.name) != 16 or not training.is_dir():
            continue
        try:
            files = [path.stat().st_mtime for path in training.rglob("*.pt")]
            newest = max(files, default=training.stat().st_mtime)
        except FileNotFoundError:  # another client on this machine has just moved a file: the training is in use
            continue
        if newest < time.time() - KEPT_DAYS * 86400:
            shutil.rmtree(training, ignore_errors=True)
