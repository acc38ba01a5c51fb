"""Files that are written whole or not at all, and read without running anything in them.

Reading one takes memory in proportion to its length: torch stores tensors as they are, and an archive that is packed,
or whose entries lie in each other, could ask for a thousand times as much.

They are ordinary `torch.save` archives. A crash at any moment leaves the file before, and what a killed process left
beside it is removed by the next save of the same file.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import torch

from gradwire.checkpoints.replaced_file import replace_file
from gradwire.errors import CheckpointError


def write_whole(path: Path, content: dict[str, Any]) -> None:
    """torch.save to a file that replaces the one before in one step."""
    try:
        replace_file(path, lambda file: torch.save(content, file))
    except (
        OSError,
        RuntimeError,
        ValueError,
    ) as error:  # torch's writer raises the second, on a full disk for instance
        raise CheckpointError(f"cannot write the checkpoint {path}: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """Return why writing failed, in a line: what the system said, if that is known."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def read_whole(path: Path) -> Any:
    """Return what a file holds. CheckpointError if it cannot be read or is damaged; nothing in it is run."""
    try:
        with zipfile.ZipFile(path) as archive:
            _check_lengths(archive, path)
            damaged = archive.testzip()  # torch.load does not look at the archive's checksums
        if damaged:
            raise CheckpointError(f"{path} is damaged (checksum of {damaged}): resume from another one")
        return torch.load(path, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"cannot read the checkpoint {path}: {error.strerror or error}") from error
    except Exception as error:  # a damaged archive can raise nearly anything
        raise CheckpointError(f"{path} is damaged or not a checkpoint: resume from another one") from error


def _check_lengths(archive: zipfile.ZipFile, path: Path) -> None:
    entries = archive.infolist()
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise CheckpointError(f"{path} is packed, which torch.save does not do: unpack it, or resume from another one")
    if sum(entry.file_size for entry in entries) > path.stat().st_size:
        raise CheckpointError(f"{path} is damaged (more is in it than it is long): resume from another one")
