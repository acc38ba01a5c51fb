"""What the means of this rank's shards have left out, in scatter-reduce: an error memory of its own.

Shards are known by a parameter's name and the range of its entries, which are the same in every step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from gradwire.aggregate.messages.frame_plan import FramePlan
from gradwire.aggregate.messages.tensor_parts import TensorPart
from gradwire.correct.error_memory_by_parameter import ErrorMemory


class ShardMemory:
    """The error memory of the owner of shards, provisional within a step like every error memory.

    `errors` keeps it by the key of each shard. What a checkpoint brought is kept by parameter name, whole, until the
    next step tells which shards belong to this rank.
    """

    def __init__(self) -> None:
        self.errors = ErrorMemory()
        self._shards: dict[str, TensorPart] = {}  # by key; without the entries
        self._loaded: dict[str, torch.Tensor] = {}  # by parameter name

    def apart(self, plan: FramePlan) -> FramePlan:
        """Return a plan with the same shards as tensors of their own, in fp32 at least, named by their keys.

        They lie where the shards do, if these have that dtype.
        """
        shards = []
        for part in plan.parts:
            dtype = torch.promote_types(part.tensor.dtype, torch.float32)
            if part.key not in self._shards:
                placeholder = torch.empty(part.tensor.shape, dtype=torch.float32, device="meta")
                self._shards[part.key] = replace(part, tensor=placeholder)
                if part.name in self._loaded:
                    loaded = self._loaded[part.name].reshape(-1)[part.lo : part.hi]
                    self.errors.replace(part.key, loaded.view(_own_shape(part)).clone())
            # What this rank had in a shard has been sent by the time when the mean is made, in its place if it fits.
            fits = part.tensor.dtype == dtype
            own = part.entries.view(_own_shape(part)) if fits else part.entries.new_empty(_own_shape(part), dtype=dtype)
            shards.append(TensorPart(part.key, own, 0, part.size))
        return FramePlan(plan.recipe, plan.codec, shards)

    def rescale(self, factor: float) -> None:
        """Follow a loss scale that has become `factor` times larger."""
        self.errors.rescale(factor)
        for memory in self._loaded.values():
            memory.mul_(factor)

    def end_step(self, finite: bool) -> None:
        """Commit what was written in this step, or roll it back."""
        self.errors.commit() if finite else self.errors.rollback()
        if self._loaded:
            for part in self._shards.values():
                self._loaded.pop(part.name, None)

    def abandon_step(self) -> None:
        """Roll back a step that failed midway; shards that it did not get to are still as they were loaded."""
        self.errors.rollback()

    def state_dict(self, scale: float) -> dict[str, torch.Tensor]:
        """Return it by parameter name, with zeros where the shards of other ranks are: the sum over ranks is whole.

        It is divided by the loss scale.
        """
        state = {name: memory / scale for name, memory in self._loaded.items()}
        for key, shard in self.errors.memory.items():
            part = self._shards[key]
            whole = state.setdefault(part.name, torch.zeros(part.tensor.shape, dtype=torch.float32, device="cpu"))
            whole.view(-1)[part.lo : part.hi] = (shard / scale).view(-1)
        return state

    def load(self, shards: Mapping[str, torch.Tensor]) -> None:
        """Take over what was saved, which nobody else writes to, in place of what is there."""
        self.errors, self._shards = ErrorMemory(), {}
        self._loaded = dict(shards)


def _own_shape(shard: TensorPart) -> tuple[int, ...]:
    """Return the shape in which the mean of a shard is coded: with rows where the codec makes use of them."""
    return shard.shape if shard.by_rows else (shard.size,)
