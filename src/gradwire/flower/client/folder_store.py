"""A client's state in files, so that it outlives the process."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
import urllib.parse
import zipfile
from collections.abc import Iterator
from pathlib import Path

import torch

from gradwire.checkpoints.run_file import write_whole
from gradwire.errors import CheckpointError, GradwireError
from gradwire.flower.client.store import Content

KEPT_DAYS = 30  # after which a training that no client was asked for counts as over


def default_folder() -> Path:
    """Return the user's folder for state: `$XDG_STATE_HOME/gradwire` or `~/.local/state/gradwire`."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "gradwire"


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
