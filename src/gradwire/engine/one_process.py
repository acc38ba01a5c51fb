"""A program that was started alone, so that there is nobody to send gradients to: it can be tried all the same."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch.distributed as dist

from gradwire.checkpoints.rank_states import AllRanks, own_part
from gradwire.engine.gradients import Gradients
from gradwire.engine.handle import Handle


def processes() -> int:
    """Return how many processes train together, as far as they have told torch, or a launcher has told them."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    said = os.environ.get("WORLD_SIZE", "1")
    return int(said) if said.isdecimal() else 1


def is_alone(count: int, name: str = "Compress") -> bool:
    """Tell whether there is one process, and warn if so that what has this name does nothing."""
    if count == 1:
        warnings.warn(
            f"there is one process, and nobody to send gradients to: {name} does nothing", UserWarning, stacklevel=3
        )
    return count == 1


class IdleHandle(Handle):
    """What `attach` returns for a model that is not wrapped, because its process is alone: gradients are left alone.

    It has what other handles have, so that a script need not ask. A state that is loaded is handed out again: nothing
    of it was sent, so that a checkpoint of a run in one process loses no error memory.
    """

    def __init__(self, gradients: Gradients):
        super().__init__(gradients)
        self._loaded: dict[str, Any] = {}

    @property
    def recipe(self) -> str:
        """The spec that would be in use."""
        return str(self.gradients.recipes)

    @property
    def aggregate(self) -> str:
        """How frames would meet, as far as that was chosen."""
        return self.gradients.options.aggregate

    def state_dict(self) -> dict[str, Any]:
        """Return the state that was loaded, or one without memories."""
        return self._loaded or super().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the state of a run with more processes."""
        self._loaded = own_part(state)

    @property
    def all_ranks(self) -> AllRanks:
        """The state of the one process that there is."""
        return AllRanks(self)
