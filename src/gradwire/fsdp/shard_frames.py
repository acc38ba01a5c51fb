"""Frames of parts of parameters, with error memory: what the two places share where FSDP2 reduces gradients.

A message is one byte, whether all that its rank sends in this exchange is finite, and the frames of the parts that it
goes to the receiver for: one for each large part, one for all small ones.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from itertools import chain

import torch

from gradwire.aggregate.messages.device_messages import DeviceMessages, is_on_device
from gradwire.aggregate.messages.frame_coding import (
    MemorySlot,
    Scratch,
    decode_frames,
    encode_frame,
    frame_seed,
    most_frame_bytes,
    unusable_message,
)
from gradwire.aggregate.messages.frame_plan import FramePlan
from gradwire.aggregate.messages.model_recipes import ModelRecipes
from gradwire.aggregate.messages.step_ledger import StepLedger
from gradwire.aggregate.messages.tensor_parts import whole_tensors
from gradwire.aggregate.transport.message_prefix import PREFIX
from gradwire.catalogue.spec_by_name import Spec, warn_of_idle_patterns
from gradwire.errors import FrameError
from gradwire.frame import headers
from gradwire.fsdp.part_error_memory import PartErrorMemory
from gradwire.fsdp.shard_layout import PartPlace

MEMORY_BYTES = 8  # an entry: the error memory before the step and after it
FLAG = 1  # byte before the frames
HEAD = PREFIX + FLAG


class ShardFrames:
    """Codes the parts of parameters that this rank sends to the owners of their shards.

    It owns the recipes, the ledger and the error memory (None if there is none). FSDP2 calls it from autograd's thread,
    one module after the other; `end_step` commits what all of them wrote. Frames are made and decoded where the
    gradients are if there are kernels for them, and the error memory is there, too.
    """

    def __init__(self, spec: Spec, sizes: Mapping[str, torch.Size], memory: PartErrorMemory | None):
        self.recipes, self.ledger, self.memory = ModelRecipes(spec), StepLedger(), memory
        warn_of_idle_patterns(self.recipes.by_pattern, sizes)
        shapes = {name: torch.empty(size, dtype=torch.float32, device="meta") for name, size in sizes.items()}
        self.recipes.know_model(shapes.items())
        self.dense_bytes = 0  # of what was sent, in fp32
        self._blocks: dict[int, torch.Tensor] = {}  # by receiver, for messages that the host makes
        self._scratch, self._on_device = Scratch(), DeviceMessages()
        self._fits: bool | None = None  # whether the error memory has room on the GPU; known from the first step on

    def plan(self, row: torch.Tensor, places: Sequence[PartPlace]) -> list[FramePlan]:
        """Return the frames of a row of FSDP2's flat buffer."""
        parts = whole_tensors([(place.name, self._as_coded(row[place.row], place)) for place in places])
        return self.recipes.plan_frames(parts, self.ledger.steps, joins=True)

    def _as_coded(self, entries: torch.Tensor, place: PartPlace) -> torch.Tensor:
        """Return a part in its shape, if its codec uses that, or else flat."""
        recipe = self.recipes.of_tensor(place.name, entries.numel())
        return entries.view(place.shape) if recipe.codec.converter.by_rows else entries

    def plan_rows(
        self, rows: torch.Tensor, places: Sequence[Sequence[PartPlace]]
    ) -> tuple[torch.Tensor, list[list[FramePlan]]]:
        """Return the rows where they are coded, and the frames of each.

        That is where they are, if kernels do all of it there and the GPU has room for the error memory. Otherwise it is
        on the CPU: its native kernels after one copy are faster than plain torch on a GPU.
        """
        plans = [self.plan(row, of_row) for row, of_row in zip(rows, places, strict=True)]
        if rows.is_cpu or (is_on_device(list(chain(*plans))) and self._memory_fits(rows.device)):
            return rows, plans
        return self.plan_rows(rows.cpu(), places)

    def _memory_fits(self, device: torch.device) -> bool:
        """Tell whether the error memory takes at most half of what the GPU has free at the first step.

        It has the size of the whole model, twice, on every rank: whoever shards a model because it is too large for one
        GPU must not run out of memory by it.
        """
        if self._fits is None:
            needed = MEMORY_BYTES * self.recipes.total if self.memory is not None else 0
            free, _ = torch.cuda.mem_get_info(device)
            self._fits = needed <= free // 2
            if not self._fits:
                warnings.warn(
                    f"gradwire keeps its error memory ({needed / 2**30:.1f} GiB) in the host's memory and codes there, "
                    f"since {device} has {free / 2**30:.1f} GiB free: this is slower; a recipe with decay=0 has none",
                    RuntimeWarning,
                    stacklevel=2,
                )
        return self._fits

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

    def encode(
        self, receiver: int, plans: list[FramePlan], places: Sequence[PartPlace], sender: str, to: torch.device
    ) -> torch.Tensor:
        """Return a message, with room for its prefix; on the device `to` if it was made on a GPU.

        `sender` tells apart the random numbers of different senders and receivers. The message is valid until the next
        one to this receiver. Takes note of whether its frames are finite.
        """
        place_of = {place.name: place for place in places}
        with self.ledger.encoding():
            gradients = [[part.tensor for part in plan.parts] for plan in plans]
            slots = [self._slots(plan, place_of) for plan in plans]
            seeds = [frame_seed(self.ledger.steps, sender, plan.names[0]) for plan in plans]
            found = None
            if is_on_device(plans):
                note = bytes([self.ledger.finite])
                found = self._on_device.encode(receiver, plans, gradients, slots, seeds, note, to)
            if found is not None:
                message = found[0][: PREFIX + found[1]]
            else:
                message = self._encode_on_host(receiver, plans, gradients, slots, seeds)
        self.ledger.count_frame_bytes(len(message) - HEAD)
        self.dense_bytes += sum(4 * n for plan in plans for n in plan.sizes)
        return message

    def _encode_on_host(
        self, receiver: int, plans: list[FramePlan], gradients: list[list[torch.Tensor]],
        slots: list[list[MemorySlot]], seeds: list[int],
    ) -> torch.Tensor:  # fmt: skip
        needed, block = HEAD + most_frame_bytes(plans), self._blocks.get(receiver)
        if block is None or len(block) < needed:
            block = self._blocks[receiver] = torch.empty(needed, dtype=torch.uint8, device="cpu")
        end = HEAD
        for plan, tensors, memory, seed in zip(plans, gradients, slots, seeds, strict=True):
            length = encode_frame(plan, tensors, memory, seed, block[end:], self._scratch)
            header = headers.read_header(memoryview(block[end : end + length].numpy()))
            self.ledger.note_finite(not header.nonfinite)
            end += length
        block[PREFIX] = self.ledger.finite
        return block[:end]

    def say_whether_finite(self, messages: Sequence[torch.Tensor]) -> None:
        """Have all messages of an exchange, when all are encoded, say that not all of them are finite, if so."""
        if not self.ledger.finite:
            for message in messages:
                message[PREFIX] = 0

    def keep(self, row: torch.Tensor, plans: list[FramePlan], places: Sequence[PartPlace]) -> torch.Tensor:
        """Return the row that stays on this rank, and needs no frames, as it is added to the sum.

        Error memory of it, from a run on another number of ranks, goes with it at once.
        """
        kept = row.to(sum_dtype(row.dtype), copy=True)
        self.ledger.note_finite(bool(torch.isfinite(kept).all()))
        place_of = {place.name: place for place in places}
        for plan in plans:
            entries = [kept[place_of[name].row] for name in plan.names]
            for part, (before, after, factor) in zip(entries, self._slots(plan, place_of), strict=False):
                part.add_(before.float() * (plan.recipe.decay * factor))  # rounded twice, on every device
                after.zero_()
        return kept

    def _slots(self, plan: FramePlan, place_of: dict[str, PartPlace]) -> list[MemorySlot]:
        if self.memory is None or not plan.recipe.decay:
            return []
        places = [place_of[name] for name in plan.names]
        device = plan.parts[0].tensor.device
        return [MemorySlot(*self.memory.at(place.name, place.memory, place.entries, device)) for place in places]

    # ── decoding ──

    def open(self, arrived: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the frames of the messages of all ranks, and take note of whether these are finite."""
        for sender, message in enumerate(arrived):
            if not len(message):
                raise unusable_message(sender, FrameError("an empty message"))
        flags = torch.cat([message[:FLAG].to(arrived[0].device) for message in arrived])
        self.ledger.note_finite(bool(flags.all()))
        return [message[FLAG:] for message in arrived]

    def decode(
        self, sender: int, message: torch.Tensor, plans: list[FramePlan], targets: list[torch.Tensor], weight: float,
        accumulate: bool,
    ) -> None:  # fmt: skip
        """Add a rank's frames, times `weight`, to the targets, or put them there."""
        with self.ledger.decoding():
            frames = message.cpu().numpy()
            self.ledger.note_finite(decode_frames(sender, frames, plans, targets, weight, accumulate))

    def decode_on_device(
        self, messages: Sequence[torch.Tensor], plans: list[FramePlan], dtype: torch.dtype, weight: float,
        accumulate: bool,
    ) -> bool:  # fmt: skip
        """Add the frames of ranks, each times `weight`, to the tensors of the plans, or put them there.

        `dtype` is that of what was encoded. False says that the host has to do all of it.
        """
        if not messages:
            return True
        with self.ledger.decoding():
            present = [[True] * sum(len(plan.parts) for plan in plans)] * len(messages)
            return self._on_device.add_up(plans, messages, present, weight, dtype, accumulate)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums: fp32 at least, whatever the gradients are."""
    return torch.promote_types(dtype, torch.float32)
