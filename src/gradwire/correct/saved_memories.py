"""The memories of one worker as a checkpoint has them: read and checked as a whole, before anything is taken over."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gradwire.checkpoints.saved_values import count_in, tensors_in
from gradwire.errors import CheckpointError


@dataclass(frozen=True)
class SavedMemories:
    """Copies of what was saved, which whoever loads them may keep."""

    steps: int
    memory: dict[str, torch.Tensor]  # what was not sent, by parameter name
    velocity: dict[str, torch.Tensor]
    shards: dict[str, torch.Tensor]  # what the owner of shards has not sent on behalf of all ranks (scatter-reduce)

    @property
    def remembered(self) -> dict[str, int]:
        """The number of entries of each parameter that has an error memory."""
        return {name: tensor.numel() for name, tensor in (*self.memory.items(), *self.shards.items())}

    @property
    def accelerated(self) -> dict[str, int]:
        """The number of entries of each parameter that has a velocity."""
        return {name: tensor.numel() for name, tensor in self.velocity.items()}

    def arranged(self, change: Callable[[str, torch.Tensor], torch.Tensor]) -> SavedMemories:
        """Return the same memories with each tensor changed, given its parameter's name."""
        memory, velocity, shards = (
            {name: change(name, tensor) for name, tensor in tensors.items()}
            for tensors in (self.memory, self.velocity, self.shards)
        )
        return SavedMemories(self.steps, memory, velocity, shards)


def read_memories(
    state: Any, names: Collection[str], shapes: Mapping[str, torch.Size], dtype: torch.dtype
) -> SavedMemories:
    """Return the memories of a state; CheckpointError if it is none, or not of parameters with these names and shapes.

    Error memory is returned in this dtype.
    """
    if not isinstance(state, Mapping) or "memory" not in state:
        raise CheckpointError("not the state of an error memory: expected what state_dict() has returned")
    return SavedMemories(
        count_in(state, "steps", 0),
        tensors_in(state, "memory", names, shapes, dtype),
        tensors_in(state, "velocity", names, shapes),
        tensors_in(state, "shards", names, shapes),
    )
