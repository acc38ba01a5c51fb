"""Files that the commands write for their users: whole, or those of before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from gradwire.checkpoints.replaced_file import replace_file
from gradwire.errors import GradwireError


def write_file(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Have `write` write a file, which replaces the one before in one step; to a pipe or a device as it is.

    GradwireError that says why if that fails.
    """
    try:
        if path.exists() and not path.is_file():
            with path.open("wb") as file:
                write(file)
        else:
            replace_file(path, write)
    except OSError as error:
        raise GradwireError(f"cannot write {path}: {error.strerror or error}") from error
