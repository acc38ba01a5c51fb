"""Compiled programs that are kept for later runs, in a folder that only this user can write to.

Whoever can write to such a folder can run code as this user. So the folder is opened first, what was opened is checked,
and files are opened inside it: nobody can put another folder or a link in its place between the check and the use.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path

UNFINISHED = ".unfinished-"  # how the names of files begin that are being written
FORGOTTEN = 3600.0  # seconds after which such a file belongs to a process that was killed


class ProgramCache:
    """The folder `gradwire/KIND` of the user's cache (XDG_CACHE_HOME, or `.cache` in the home folder).

    `read` and `keep` raise OSError where the folder cannot be used; `strerror` says why. A file is there as a whole or
    not at all, whoever else reads or writes it meanwhile. Any thread of any process may call them.
    """

    def __init__(self, kind: str):
        try:
            base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        except RuntimeError:  # a user without a home, as in some containers
            raise FileNotFoundError(errno.ENOENT, "this user has no home folder") from None
        self.folder = base / "gradwire" / kind

    def read(self, name: str) -> bytes | None:
        """Return what is kept under this name; None if nothing is."""
        with self._opened() as folder:
            try:
                file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
            except FileNotFoundError:
                return None
            with os.fdopen(file, "rb") as opened:
                status = os.fstat(opened.fileno())
                _check_private(status)
                if not stat.S_ISREG(status.st_mode):
                    raise PermissionError(errno.EPERM, f"{name} is no ordinary file")
                return opened.read()

    def keep(self, name: str, content: bytes) -> None:
        """Keep a program under this name, in place of what was there."""
        with self._opened() as folder:
            _remove_forgotten(folder)
            unfinished = UNFINISHED + secrets.token_hex(8)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            try:
                with os.fdopen(os.open(unfinished, flags, 0o600, dir_fd=folder), "wb") as file:
                    file.write(content)
                os.replace(unfinished, name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(unfinished, dir_fd=folder)
                raise

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        """Make the folder if need be, and open it, if nobody else can write to it."""
        if not hasattr(os, "O_DIRECTORY"):
            raise OSError(errno.ENOSYS, "folders cannot be opened on this system")
        self.folder.mkdir(0o700, parents=True, exist_ok=True)
        descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            _check_private(os.fstat(descriptor))
            yield descriptor
        finally:
            os.close(descriptor)


def _check_private(status: os.stat_result) -> None:
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(errno.EPERM, "others can write there, and this program would run what they wrote")


def _remove_forgotten(folder: int) -> None:
    """Remove what killed processes have left unfinished."""
    for name in os.listdir(folder):
        if name.startswith(UNFINISHED):
            with contextlib.suppress(OSError):  # another process removes it, too
                if time.time() - os.stat(name, dir_fd=folder).st_mtime > FORGOTTEN:
                    os.unlink(name, dir_fd=folder)
