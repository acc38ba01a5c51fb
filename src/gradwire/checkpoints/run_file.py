"""Checkpoints of a run: one file with all it takes to go on as if it had never stopped.

Beside model, optimizer and position, that is every worker's error memory and row memory (gradwire.backward): what was
not sent or not counted yet would otherwise be lost. The file is an ordinary `torch.save` archive
(`torch.load(file)["model"]` works).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gradwire.checkpoints.rank_states import combined
from gradwire.checkpoints.saved_values import count_in
from gradwire.checkpoints.whole_file import read_whole, write_whole
from gradwire.errors import CheckpointError

FORMAT = "gradwire checkpoint 1"


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


def load(path: Path) -> Checkpoint:
    """Read a checkpoint; nothing in the file is run, whoever wrote it."""
    content = read_whole(path)
    found = content.pop("format", None) if isinstance(content, dict) else None
    if not isinstance(found, str) or found != FORMAT:
        raise CheckpointError(f"{path} is not a checkpoint of this version of gradwire ({FORMAT!r})")
    try:
        loaded = Checkpoint(**content)
    except TypeError as error:
        raise CheckpointError(f"{path} is incomplete: {error}") from error
    if not _is_complete(loaded):
        raise CheckpointError(f"{path} was not written by gradwire train")
    for key in ("step", "epoch", "step_in_epoch"):
        count_in(content, key)
    return loaded


def _is_complete(loaded: Checkpoint) -> bool:
    """Tell whether all parts are of the kind that `save` writes; the model and its memories check their own parts."""
    of_workers = (loaded.error_memory, loaded.row_memory, loaded.rng)
    return (
        all(isinstance(part, Mapping) for part in (loaded.settings, loaded.model, loaded.optimizer))
        and all(isinstance(part, list) for part in of_workers)
        and all(isinstance(memory, Mapping) for memory in (*loaded.error_memory, *loaded.row_memory))
        and all(isinstance(state, torch.Tensor) for state in loaded.rng)
        and len(loaded.error_memory) == len(loaded.rng) > 0
        and len(loaded.row_memory) in (0, len(loaded.rng))  # older files have none
    )


def digest(model: nn.Module) -> str:
    """SHA-256 of all parameters, names included: equal digests mean equal parameters, bit for bit."""
    sha = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        sha.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}\n".encode())
        sha.update(parameter.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()
