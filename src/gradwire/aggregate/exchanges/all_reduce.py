"""Plain all-reduce, without frames: what `auto` falls back to where compression does not pay.

1. What is left in this rank's error memory is added to its gradient, and sent along;
2. all-reduce;
3. the memories that were sent are forgotten at the end of the step, if all was finite.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch

from gradwire.aggregate.messages.message_coder import MessageCoder
from gradwire.aggregate.messages.step_tensors import StepTensors
from gradwire.aggregate.messages.tensor_parts import TensorPart
from gradwire.aggregate.transport.exchange_thread import Exchange, Pause
from gradwire.aggregate.transport.link import Link


class AllReduceExchange:
    """Averages tensors by the process group's own all-reduce, and flushes error memories on the way."""

    def __init__(self, coder: MessageCoder, link: Link, tensors: StepTensors):
        self.coder, self.link, self.tensors = coder, link, tensors
        self._flushed: set[str] = set()  # tensors whose error memories are on their way, whole

    def run(self, key: Hashable, parts: list[TensorPart], last: bool = True) -> Exchange:
        """Replace the parts by their means over all ranks of the link."""
        flat = torch.cat([part.entries.reshape(-1) for part in parts]) if len(parts) > 1 else parts[0].entries
        values = flat.view(-1).split([part.size for part in parts])
        self._add_memories(parts, values)
        flat.mul_(1 / self.link.world)  # before the sum, which might be too large for fp16
        moved = flat.to(self.link.device)
        self.coder.ledger.count_frame_bytes(moved.nbytes)
        work = self.link.all_reduce(moved)
        yield Pause(work.is_completed if last else None)
        self.link.wait(work)
        if moved is not flat:
            flat.copy_(moved)
        for part, mean in zip(parts, values, strict=True):
            if len(parts) > 1:
                part.entries.copy_(mean.view(part.entries.shape))
            self.tensors.note_mean(part)
        if self._flushed:
            self.coder.ledger.note_finite(bool(flat.isfinite().all()))

    def _add_memories(self, parts: list[TensorPart], values: tuple[torch.Tensor, ...]) -> None:
        errors = self.coder.memories.errors
        for part, entries in zip(parts, values, strict=True):
            if part.name in errors.memory:
                before, after = errors.buffers(part.name, part.tensor)
                entries.add_(part.of(before).view(-1))
                part.of(after).zero_()
                self._flushed.add(part.name)

    def end_step(self, finite: bool) -> None:
        """Forget the memories that were sent along, unless the step was not finite and they were rolled back."""
        for name in self._flushed if finite else ():
            self.coder.memories.errors.forget(name)
        self._flushed = set()
