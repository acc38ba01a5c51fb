"""Checkpoints of the soak's trainings, written by what `gradwire train` writes its own with.

Either rank 0 writes one file with the memories of all ranks, or each rank writes two files in turn: a rank that is
killed while it saves leaves all ranks with a step that all of them have.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from gradwire.checkpoints.run_file import write_whole
from soaking.training import FSDP, LOCAL_SGD, Trainer

ONE_FILE, FILE_PER_RANK = "one file", "a file for each rank"


def save(folder: Path, trainer: Trainer, mode: str, number: int) -> None:
    """The number-th save of a training."""
    if mode == ONE_FILE:
        memories = trainer.handle.all_ranks.state_dict()
        if trainer.rank == 0:
            write_whole(folder / "all.pt", trainer.state() | {"memories": memories})
    else:
        path = folder / f"rank{trainer.rank}.{'ab'[number % 2]}.pt"
        write_whole(path, trainer.state() | {"memories": trainer.handle.state_dict()})


def load(folder: Path, trainer: Trainer, mode: str, step: int) -> None:
    paths = [folder / "all.pt"] if mode == ONE_FILE else sorted(folder.glob(f"rank{trainer.rank}.?.pt"))
    state = next(state for path in paths if (state := read(path))["step"] == step)
    trainer.load(state, state["memories"])


def read(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True)


def last_common_step(folder: Path, mode: str, world: int) -> int:
    """The last step that all ranks have saved; 0 if there is none. Raises if a file cannot be loaded."""
    steps: list[set[int]] = []
    for rank in range(1 if mode == ONE_FILE else world):
        paths = folder.glob("all.pt" if mode == ONE_FILE else f"rank{rank}.?.pt")
        steps.append({read(path)["step"] for path in paths})
    return max(set.intersection(*steps), default=0)


def foreign_files(folder: Path) -> list[str]:
    """All that a training leaves beside its checkpoints."""
    return sorted(p.name for p in folder.iterdir() if not (p.name == "all.pt" or p.match("rank?.[ab].pt")))


def modes_for(wrapper: str) -> tuple[str, ...]:
    return (FILE_PER_RANK,) if wrapper in (LOCAL_SGD, FSDP) else (ONE_FILE, FILE_PER_RANK)
