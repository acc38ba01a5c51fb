"""Puts a file in the place of another one in one step: it is there whole, or the one before is.

The new content goes to a file beside it, which takes its name when it is on the disk. While it is being written it is
locked. The system gives back the locks of a process that is killed, so that the next who writes the same file can tell
what was left over from what is in use: numbers of processes could not, since in a container every run has the same.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

try:
    import fcntl
except ImportError:  # Windows, which does not remove files that are open
    fcntl = None  # type: ignore[assignment]

LONGEST_NAME = 200  # bytes; most file systems take 255, and the names of temporary files are longer than the file's


def replace_file(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Have `write` write the new content of this file; a link stays, and the file that it leads to is replaced.

    OSError if that fails, and for a path that is no ordinary file, such as a device: it would be gone.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        reason = errno.EISDIR if target.is_dir() else errno.EINVAL
        raise OSError(reason, os.strerror(reason) if target.is_dir() else "it is no ordinary file: name another one")
    _remove_remains(target)
    file, temporary = _begin(target)
    lock = os.dup(file.fileno()) if fcntl else None  # is held until the file has its name
    try:
        with file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if lock is not None:
            os.close(lock)
    _sync_folder(target.parent)


def _begin(target: Path) -> tuple[BinaryIO, Path]:
    """Open a temporary file of this target that nobody else removes."""
    while True:
        temporary = target.parent / f"{_beginning(target)}{secrets.token_hex(8)}"
        file = open(temporary, "xb")  # noqa: SIM115
        if _is_free(file.fileno()) is not False and (fcntl is None or os.fstat(file.fileno()).st_nlink):
            return file, temporary
        file.close()  # another process took it for a remain before it was locked


def _beginning(target: Path) -> str:
    """Return how the names of temporary files of this target begin."""
    name = target.name
    if len(os.fsencode(name)) > LONGEST_NAME:
        name = hashlib.sha256(os.fsencode(name)).hexdigest()
    return f".{name}.gradwire-"


def _is_free(descriptor: int) -> bool | None:
    """Lock an open file unless another process has; None where there are no locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # some file systems in networks have none
        return None
    return True


def _remove_remains(target: Path) -> None:
    """Remove temporary files that processes left which were killed while they wrote."""
    beginning = _beginning(target)
    with contextlib.suppress(OSError):  # if there is no such folder, writing will say so
        for name in os.listdir(target.parent):
            if name.startswith(beginning):
                _remove_if_free(target.parent / name)


def _remove_if_free(remain: Path) -> None:
    with contextlib.suppress(OSError):
        descriptor = os.open(remain, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
        try:
            if _is_free(descriptor):
                os.unlink(remain)
        finally:
            os.close(descriptor)


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
