"""Frames of parts of parameters, with error memory: what the two places share where FSDP2 reduces gradients.

A message is one byte, whether all that its rank sends in this exchange is finite, and the frames of the parts that it
goes to the receiver for: one for each large part, one for all small ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from gradwire.aggregate.messages.frame_coding import (
    MemorySlot,
    decode_frames,
    encode_frame,
    frame_seed,
    join,
    most_frame_bytes,
    unusable_message,
)
from gradwire.aggregate.messages.frame_plan import FramePlan
from gradwire.aggregate.messages.model_recipes import ModelRecipes
from gradwire.aggregate.messages.step_ledger import StepLedger
from gradwire.aggregate.messages.tensor_parts import whole_tensors
from gradwire.aggregate.transport.message_prefix import PREFIX
from gradwire.catalogue.spec_by_name import Spec
from gradwire.errors import FrameError
from gradwire.frame import headers
from gradwire.fsdp.part_error_memory import PartErrorMemory
from gradwire.fsdp.shard_layout import PartPlace

FLAG = 1  # byte before the frames
HEAD = PREFIX + FLAG


class ShardFrames:
    """Codes the parts of parameters that this rank sends to the owners of their shards.

    It owns the recipes, the ledger and the error memory (None if there is none). FSDP2 calls it from autograd's thread,
    one module after the other; `end_step` commits what all of them wrote.
    """

    def __init__(self, spec: Spec, sizes: Mapping[str, torch.Size], memory: PartErrorMemory | None):
        self.recipes, self.ledger, self.memory = ModelRecipes(spec), StepLedger(), memory
        self.recipes.know_model((name, torch.empty(size, device="meta")) for name, size in sizes.items())
        self.dense_bytes = 0  # of what was sent, in fp32
        self._block = torch.empty(0, dtype=torch.uint8)

    def plan(self, row: torch.Tensor, places: Sequence[PartPlace]) -> list[FramePlan]:
        """Return the frames of a row of FSDP2's flat buffer."""
        parts = whole_tensors([(place.name, row[place.row]) for place in places])
        return self.recipes.plan_frames(parts, self.ledger.steps)

    def end_step(self, finite: bool) -> None:
        """Commit the error memory, or roll it back if a gradient was not finite on any rank."""
        if self.memory is not None:
            self.memory.commit() if finite else self.memory.rollback()
        self.ledger.end_step()

    def abandon_step(self) -> None:
        """Roll back the error memory of a step that failed."""
        if self.memory is not None:
            self.memory.rollback()
        self.ledger.abandon_step()

    # ── encoding ──

    def room(self, rows: Sequence[list[FramePlan]]) -> torch.Tensor:
        """Return a buffer for the messages of these rows, one after the other; the last exchange is through with it."""
        needed = HEAD * len(rows) + sum(most_frame_bytes(plans) for plans in rows)
        if len(self._block) < needed:
            self._block = torch.empty(needed, dtype=torch.uint8)
        return self._block

    def encode(self, plans: list[FramePlan], places: Sequence[PartPlace], sender: str, out: torch.Tensor) -> int:
        """Write the frames to the front of `out`, and return their length. Takes note of whether they are finite.

        `sender` tells apart the random numbers of different senders and receivers.
        """
        end, place_of = 0, {place.name: place for place in places}
        with self.ledger.encoding():
            for plan in plans:
                seed = frame_seed(self.ledger.steps, sender, plan.names[0])
                gradients = [part.tensor for part in plan.parts]
                length = encode_frame(plan, gradients, self._slots(plan, place_of), seed, out[end:])
                header = headers.read_header(memoryview(out[end : end + length].numpy()))
                self.ledger.note_finite(not header.nonfinite)
                end += length
        self.ledger.count_frame_bytes(end)
        self.dense_bytes += sum(4 * n for plan in plans for n in plan.sizes)
        return end

    def keep(self, plan: FramePlan, places: Sequence[PartPlace]) -> torch.Tensor:
        """Return the entries of a plan that stays on this rank, and needs no frame.

        Error memory of it, from a run on another number of ranks, goes with it at once.
        """
        kept = join([part.tensor for part in plan.parts])
        kept = kept.to(sum_dtype(kept.dtype), copy=True)
        self.ledger.note_finite(bool(torch.isfinite(kept).all()))
        slots = self._slots(plan, {place.name: place for place in places})
        for entries, (before, after, factor) in zip(kept.split(plan.sizes), slots, strict=False):
            entries.add_(before.float(), alpha=plan.recipe.decay * factor)
            after.zero_()
        return kept

    def _slots(self, plan: FramePlan, place_of: dict[str, PartPlace]) -> list[MemorySlot]:
        if self.memory is None or not plan.recipe.decay:
            return []
        places = [place_of[name] for name in plan.names]
        return [MemorySlot(*self.memory.at(place.name, place.memory, place.entries)) for place in places]

    # ── decoding ──

    def decode(
        self, sender: int, message: np.ndarray, plans: list[FramePlan], targets: list[torch.Tensor], weight: float,
        accumulate: bool,
    ) -> None:  # fmt: skip
        """Add a rank's frames, times `weight`, to the targets, or put them there."""
        if not len(message):
            raise unusable_message(sender, FrameError("an empty message"))
        with self.ledger.decoding():
            finite = decode_frames(sender, message[FLAG:], plans, targets, weight, accumulate)
        self.ledger.note_finite(finite and bool(message[0]))


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums: fp32 at least, whatever the gradients are."""
    return torch.promote_types(dtype, torch.float32)
