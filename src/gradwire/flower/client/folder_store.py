"""A client's state in files, so that it outlives the process."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

from gradwire.checkpoints.whole_file import read_whole, write_whole
from gradwire.errors import CheckpointError, GradwireError
from gradwire.flower.client.store import Content

KEPT_DAYS = 7  # after which a training that no client was asked for counts as over
KEPT_OF_ONE_CLIENT = 1  # days that a client which begins another training keeps what it has of this one


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
            _clear_old_trainings(folder, self.folder.name)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.pt"

    def read(self, name: str) -> Content | None:
        """Return what was written, or None; see `Store`."""
        try:
            content: Content = read_whole(self._path(name))
            return content
        except CheckpointError:  # a damaged file is as good as none
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


def _clear_old_trainings(folder: Path, client: str) -> None:
    """Delete what is left of trainings that seem to be over: nobody else would ever remove it.

    That is what this client has of trainings in which it was not asked for a day, and all of those in which no client
    was asked for a week.
    """
    try:
        trainings = [path for path in folder.iterdir() if len(path.name) == 16 and path.is_dir()]
    except OSError:  # a folder that may not be listed: others keep it tidy
        return
    for training in trainings:
        for part, days in ((training / client, KEPT_OF_ONE_CLIENT), (training, KEPT_DAYS)):
            try:
                files = [path.stat().st_mtime for path in part.rglob("*.pt")]
                newest = max(files, default=part.stat().st_mtime)
            except OSError:  # there is none, another client has just moved a file, or it is another user's
                continue
            if newest < time.time() - days * 86400:
                shutil.rmtree(part, ignore_errors=True)
