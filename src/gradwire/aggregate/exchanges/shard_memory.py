"""What the means of this rank's shards have left out, in scatter-reduce: an error memory of its own.

Shards are known by a parameter's name and the range of its entries, which are the same in every step.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from gradwire.aggregate.messages.tensor_parts import Part, Piece
from gradwire.correct.error_memory import Residual


class ShardMemory:
    def __init__(self) -> None:
        self.memory = Residual()
        self._known: dict[str, Part] = {}  # by the key in the memory; without the entries
        self._loaded: dict[str, torch.Tensor] = {}  # by name, whole, until a step tells which shards are ours

    def apart(self, piece: Piece) -> Piece:
        """The same parts as tensors of their own, in fp32 at least, under names that tell which entries they are."""
        own = []
        for part in piece.parts:
            dtype = torch.promote_types(part.tensor.dtype, torch.float32)
            if part.key not in self._known:
                self._known[part.key] = Part(part.name, torch.empty(part.tensor.shape, device="meta"), part.lo, part.hi)
                if part.name in self._loaded:
                    own_range = self._loaded[part.name].reshape(-1)[part.lo : part.hi]
                    self.memory.memory[part.key] = own_range.clone()
            own.append(Part(part.key, torch.empty(part.size, dtype=dtype), 0, part.size))
        return Piece(piece.recipe, piece.codec, own)

    def rescale(self, factor: float) -> None:
        self.memory.rescale(factor)
        for memory in self._loaded.values():
            memory.mul_(factor)

    def end_step(self, finite: bool) -> None:
        self.memory.commit() if finite else self.memory.rollback()
        if self._loaded:
            for part in self._known.values():
                self._loaded.pop(part.name, None)

    def state_dict(self, scale: float) -> dict[str, torch.Tensor]:
        """By parameter name, with zeros where the shards of other ranks are: the sum over all ranks is the whole."""
        state = {name: memory / scale for name, memory in self._loaded.items()}
        for key, shard in self.memory.memory.items():
            part = self._known[key]
            whole = state.setdefault(part.name, torch.zeros(part.tensor.shape))
            whole.view(-1)[part.lo : part.hi] = shard / scale
        return state

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        self.memory, self._known = Residual(), {}
        self._loaded = {name: memory.detach().to("cpu", torch.float32, copy=True) for name, memory in state.items()}
