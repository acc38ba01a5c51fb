"""What one worker remembers between steps: what it did not send, and the momentum that it accumulates itself.

Both memories are kept by parameter name, in units of the present loss scale, and are provisional within a step: at its
end all ranks commit them or, if a gradient was not finite anywhere, all roll them back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from gradwire.correct.error_memory_by_parameter import ErrorMemory
from gradwire.correct.momentum import Factor, Velocity
from gradwire.correct.saved_memories import SavedMemories


class WorkerMemories:
    """The error memory and the velocities of one worker, which are committed and rolled back together.

    During a step they are used by the thread that encodes; everything else is for the training's thread, between two
    steps. State that is saved is free of the loss scale.
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.errors, self.velocity = ErrorMemory(dtype), Velocity()
        self.scale = 1.0  # of the loss, and with it of gradients and memories
        self._factors: dict[str, Factor] = {}  # of the parameters whose momentum is accumulated here
        self._sent: dict[str, torch.Tensor] = {}

    # ── momentum ──

    def take_over_momentum(self, factors: Mapping[str, Factor]) -> None:
        """Accumulate the momentum of these parameters from now on, and of no others."""
        self._factors = dict(factors)

    def adopt_velocities(self, velocities: Mapping[str, torch.Tensor]) -> None:
        """Go on from velocities that an optimizer has accumulated so far."""
        self.velocity.adopt(velocities)

    def has_momentum(self, name: str) -> bool:
        """Return whether the momentum of this parameter is accumulated here."""
        return name in self._factors

    def factor(self, name: str) -> Factor | None:
        """Return how the momentum of a parameter is accumulated here, if it is."""
        return self._factors.get(name)

    def accelerated(self, name: str, gradient: torch.Tensor, entries: slice | None = None) -> torch.Tensor:
        """Return the velocity that the gradient adds to, or the gradient itself where momentum is the optimizer's.

        With `entries` it is returned for these alone, flat.
        """
        factor = self._factors.get(name)
        if factor is not None:
            return self.velocity.push(name, gradient, factor, entries)
        return gradient if entries is None else gradient.reshape(-1)[entries]

    def note_sent(self, name: str, sent: torch.Tensor, lo: int) -> None:
        """Take note of which entries from `lo` on were sent: their momentum must not push a second time."""
        if name in self._factors:
            self.velocity.mask(name, sent, lo)
        else:
            self._sent[name] = sent

    def note_sent_at(self, name: str, positions: torch.Tensor, lo: int, size: int) -> None:
        """Do what `note_sent` does, for the entries at these positions among `size` of them from `lo` on."""
        if name in self._factors:
            self.velocity.clear(name, positions + lo)
        else:
            self._sent[name] = torch.zeros(size, dtype=torch.bool, device="cpu").index_fill_(0, positions, True)

    def take_sent(self) -> dict[str, torch.Tensor]:
        """Return which entries were sent in this step, of tensors whose momentum the optimizer keeps."""
        sent, self._sent = self._sent, {}
        return sent

    # ── the end of a step ──

    def commit(self) -> None:
        """What was written in this step counts from now on."""
        self.errors.commit()
        self.velocity.commit()
        self._sent.clear()

    def rollback(self) -> None:
        """Everything is as it was before this step."""
        self.errors.rollback()
        self.velocity.rollback()
        self._sent.clear()

    def rescale(self, scale: float) -> None:
        """Follow a new loss scale, by which gradients come multiplied from now on."""
        if scale != self.scale:
            self.errors.rescale(scale / self.scale)
            self.velocity.rescale(scale / self.scale)
            self.scale = scale

    def rearrange(self, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Put the entries of a parameter's memories in another order, between two steps."""
        memory = self.errors.memory.get(name)
        if memory is not None:
            self.errors.replace(name, change(memory))
        self.velocity.rearrange(name, change)

    # ── what is saved ──

    def state_dict(self) -> dict[str, Any]:
        """Return both memories by parameter name, without the loss scale."""
        memory = {name: e / self.scale for name, e in self.errors.memory.items()}
        velocity = {name: v.cpu() / self.scale for name, v in self.velocity.memory.items()}
        return {"memory": memory, **({"velocity": velocity} if velocity else {})}

    def load(self, saved: SavedMemories) -> None:
        """Take over what was saved, in place of all that there is."""
        self.errors.load(saved.memory)
        self.velocity.load(saved.velocity)
        self._sent.clear()
        self.scale = 1.0
