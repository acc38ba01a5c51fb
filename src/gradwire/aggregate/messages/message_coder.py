"""The messages of one rank in every step: its tensors with all corrections to frames, and the frames of all to means.

This is where `correct → convert → compress` is put together for DDP, DataParallel and LocalSGD. The stateless part is
in `frame_coding.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from gradwire import codecs
from gradwire.aggregate.messages import present_tensors
from gradwire.aggregate.messages.device_messages import DeviceMessages, is_on_device
from gradwire.aggregate.messages.device_momentum import MomentumOfMessages
from gradwire.aggregate.messages.error_probe import ErrorProbe
from gradwire.aggregate.messages.frame_coding import (
    MemorySlot,
    Scratch,
    decode_frames,
    encode_frame,
    frame_seed,
    most_frame_bytes,
)
from gradwire.aggregate.messages.frame_plan import FramePlan
from gradwire.aggregate.messages.known_plans import Cut, KnownPlans, ShardPlans
from gradwire.aggregate.messages.model_recipes import ModelRecipes
from gradwire.aggregate.messages.step_ledger import StepLedger
from gradwire.aggregate.messages.tensor_parts import TensorPart
from gradwire.aggregate.transport.message_prefix import PREFIX
from gradwire.catalogue.saved_recipes import KEY
from gradwire.correct.error_memory_by_parameter import ErrorMemory
from gradwire.correct.saved_memories import SavedMemories
from gradwire.correct.worker_memories import WorkerMemories
from gradwire.gpu import MessageLayout, Outcome

HOST = torch.device("cpu")
LOOKED_AT = (torch.float32, torch.float16, torch.bfloat16)  # dtypes whose zeros the GPU finds


class UnattendedMessage(NamedTuple):
    """A message that is being made on a GPU, and what it is made of."""

    key: Hashable
    plans: Sequence[FramePlan]
    stamp: int
    encoded: MessageLayout
    values: Sequence[Sequence[torch.Tensor]]
    slots: Sequence[Sequence[MemorySlot]]


class MessageCoder:
    """Codes the messages of one rank, with the recipes, memories, ledger and probe that it is given.

    `encode` and `decode` are called by one thread at a time: the exchange thread, or the training's where there is
    none. What they write to the memories counts after `end_step` only. Tensors are replaced by means in place.
    """

    def __init__(
        self, recipes: ModelRecipes, memories: WorkerMemories, ledger: StepLedger, rank: int, world: int,
        probe: ErrorProbe | None = None,
    ):  # fmt: skip
        self.recipes, self.memories, self.ledger = recipes, memories, ledger
        self.rank, self.world = rank, world
        self.probe = probe or ErrorProbe()
        self._blocks: dict[Hashable, torch.Tensor] = {}
        self._scratch = Scratch()
        self._on_device, self.known = DeviceMessages(), KnownPlans(recipes)
        self.momentum = MomentumOfMessages(memories)

    def plan(self, parts: Sequence[TensorPart]) -> list[FramePlan]:
        """Return the frames that these parts are sent in at this step."""
        return self.known.of_parts(parts, self.ledger.steps)

    def plan_shards(self, parts: Sequence[TensorPart], cut: Cut) -> ShardPlans:
        """Return the frames of the shards that `cut` makes of these parts, at this step; it is the same in all."""
        return self.known.of_shards(parts, cut, self.ledger.steps)

    # ── encoding ──

    def encode(
        self, key: Hashable, plans: Sequence[FramePlan], note: bytes = b"", to: torch.device = HOST
    ) -> tuple[torch.Tensor, int]:
        """Return a block with room for a prefix, then the note and the frames; and the length of both without prefix.

        Gradients are clipped and accelerated, and this rank's error memory is added and updated. The block belongs to
        the key: the next message with the same key is written over this one. It is on the device `to` if it could be
        made on a GPU, and else in the host's memory.
        """
        if not self.probe.active and not self._masks_what_is_rounded and self._is_on_device(plans):
            found = self._encode_on_device(key, plans, note, to, self.corrected, self.memories.errors)
            if found is not None:
                return found
        return self._encode_block(key, plans, note, self.corrected, self._encode_gradients)

    def encode_means(
        self, key: Hashable, plans: Sequence[FramePlan], note: bytes, memory: ErrorMemory, to: torch.device = HOST
    ) -> tuple[torch.Tensor, int]:
        """Return a block as `encode` does, with frames of the means of the shards that this rank owns.

        Means are neither clipped nor accelerated, and `memory` is their own error memory.
        """
        if self._is_on_device(plans):
            found = self._encode_on_device(key, plans, note, to, lambda part: part.entries, memory, "sum:")
            if found is not None:
                return found

        def encode(plan: FramePlan, means: list[torch.Tensor], out: torch.Tensor) -> int:
            return encode_frame(plan, means, _slots(plan, memory), self._seed(plan, "sum:"), out, self._scratch)

        return self._encode_block(key, plans, note, lambda part: part.entries, encode)

    def _encode_on_device(
        self, key: Hashable, plans: Sequence[FramePlan], note: bytes, to: torch.device,
        values_of: Callable[[TensorPart], torch.Tensor], errors: ErrorMemory, purpose: str = "",
    ) -> tuple[torch.Tensor, int] | None:  # fmt: skip
        """Return what `_encode_block` does, made on the GPU; None if that is left to the host."""
        with self.ledger.encoding():
            if values_of == self.corrected:
                values = self._values(plans)
            else:
                values = [[values_of(part).contiguous() for part in plan.parts] for plan in plans]
            slots = [_slots(plan, errors) for plan in plans]
            seeds = [self._seed(plan, purpose) for plan in plans]
            found = self._on_device.encode(key, plans, values, slots, seeds, note, to)
            if found is None:
                return None
            self.ledger.count_frame_bytes(found[1])
            if not purpose:
                self._note_sent(plans, values, slots)
        return found

    def _note_sent(
        self, plans: Sequence[FramePlan], values: Sequence[Sequence[torch.Tensor]],
        slots: Sequence[Sequence[MemorySlot]],
    ) -> None:  # fmt: skip
        """Mask the momentum of what was sent, where recipes ask for that."""
        self.momentum.note_sent(
            [
                (part, tensor, slot, plan.recipe.decay)
                for plan, tensors, memory in zip(plans, values, slots, strict=True)
                if plan.recipe.mask
                for part, tensor, slot in zip(plan.parts, tensors, memory, strict=True)
            ]
        )

    def _values(self, plans: Sequence[FramePlan]) -> Sequence[Sequence[torch.Tensor]]:
        """Return what is sent of all parts, beside the error memory."""
        return self._all_corrected(plans) if self._corrects else self.known.fact("entries", plans, _entries)

    def _all_corrected(self, plans: Sequence[FramePlan]) -> list[list[torch.Tensor]]:
        """Return what `corrected` does of all parts, with a launch for all velocities together."""
        values = [[part.tensor for part in plan.parts] for plan in plans]
        if self.recipes.any("clip"):
            values = [
                [clipped(part, self.recipes, self.memories.scale, self.world) for part in plan.parts] for plan in plans
            ]
        masked = self.known.fact("masked", plans, self._masked)
        names = [plans[i].parts[j].name for i, j in masked]
        pushed = self.momentum.accelerated([(n, values[i][j]) for n, (i, j) in zip(names, masked, strict=True)])
        for (i, j), velocity in zip(masked, pushed, strict=True):
            values[i][j] = velocity
        return [
            [part.of(tensor).contiguous() for part, tensor in zip(plan.parts, tensors, strict=True)]
            for plan, tensors in zip(plans, values, strict=True)
        ]

    def _masked(self, plans: Sequence[FramePlan]) -> list[tuple[int, int]]:
        """Return the indices (plan, part) of what is sent with its momentum."""
        return [
            (i, j)
            for i, plan in enumerate(plans)
            for j, part in enumerate(plan.parts)
            if self.recipes.of_part(part).mask
        ]

    # ── messages that nobody waits for (exchanges/unattended.py) ──

    def can_go_unattended(self, plans: Sequence[FramePlan]) -> bool:
        """Tell whether messages of these plans can be made and averaged without the host: the same on all ranks.

        What does not fit into a message waits in the error memory, which all recipes need for that.
        """
        return (
            self.known.fact("remembers", plans, _remembers)
            and self._is_on_device(plans)
            and self.memories.errors.dtype == torch.float32
            and not (self.recipes.any("clip") or self.probe.has_rivals)
        )

    def encode_unattended(
        self, key: Hashable, plans: Sequence[FramePlan], block: torch.Tensor, stamp: int, everything: bool = False
    ) -> UnattendedMessage:
        """Begin to write this rank's message to the block, on the block's device; the host waits for nothing.

        With `everything` memories of tensors without a gradient are sent, too.
        """
        with self.ledger.encoding():
            values = self._values(plans)
            slots = [_slots(plan, self.memories.errors) for plan in plans]
            seeds = [self._seed(plan) for plan in plans]
            encoded = self._on_device.encode_unattended(key, plans, values, slots, seeds, block, stamp, everything)
        if self.probe.active:  # of this rank alone, maybe: the others need not know
            for plan, tensors, memory, length in zip(plans, values, slots, encoded.frame_lengths(), strict=True):
                self.probe.measure_memory(plan, tensors, memory, length)
        return UnattendedMessage(key, plans, stamp, encoded, values, slots)

    def average_unattended(self, message: UnattendedMessage, blocks: Sequence[torch.Tensor]) -> Outcome:
        """Begin to replace the tensors by the mean of the messages in the blocks of all ranks; one is this rank's."""
        with self.ledger.decoding():
            outcome = self._on_device.average_unattended(
                message.key, message.encoded, message.plans, blocks, message.stamp
            )
            self._note_sent(message.plans, message.values, message.slots)  # nothing, if the message waits
        return outcome

    def which_are_zero(self, parts: Sequence[TensorPart]) -> list[bool]:
        """Return for each part whether it is zero everywhere; of parts on a GPU by one look at all of them."""
        if parts and all(part.tensor.is_cuda and part.tensor.dtype in LOOKED_AT for part in parts):
            return self._on_device.which_are_zero([part.entries for part in parts])
        return [present_tensors.is_zero(part.entries) for part in parts]

    def _encode_block(
        self, key: Hashable, plans: Sequence[FramePlan], note: bytes,
        values_of: Callable[[TensorPart], torch.Tensor],
        encode: Callable[[FramePlan, list[torch.Tensor], torch.Tensor], int],
    ) -> tuple[torch.Tensor, int]:  # fmt: skip
        with self.ledger.encoding():
            values = [[values_of(part) for part in plan.parts] for plan in plans]
            start = PREFIX + len(note)
            most = sum(p.codec.max_frame_bytes(t) for p, tensors in zip(plans, values, strict=True) for t in tensors)
            block = self._block(key, start + most)
            if note:
                block.numpy()[PREFIX:start] = np.frombuffer(note, dtype=np.uint8)
            end = start
            for plan, tensors in zip(plans, values, strict=True):
                end += encode(plan, tensors, block[end:])
            self.ledger.count_frame_bytes(end - start)
        return block, end - PREFIX

    def _block(self, key: Hashable, size: int) -> torch.Tensor:
        block = self._blocks.get(key)
        if block is None or len(block) < size:
            block = self._blocks[key] = torch.empty(size + size // 16 + 1024, dtype=torch.uint8, device="cpu")
        return block

    def _encode_gradients(self, plan: FramePlan, gradients: list[torch.Tensor], out: torch.Tensor) -> int:
        memory = _slots(plan, self.memories.errors)
        length = encode_frame(plan, gradients, memory, self._seed(plan), out, self._scratch)
        self.probe.measure(plan, gradients, memory, out[:length])
        if plan.recipe.mask:
            self._note_sent_in_frame(plan, out[:length])
        return length

    def _note_sent_in_frame(self, plan: FramePlan, frame: torch.Tensor) -> None:
        positions = codecs.nonzero_positions(frame)
        ends = np.cumsum(plan.sizes)
        borders = np.searchsorted(positions.numpy(), ends)
        for part, end, upto, many in zip(plan.parts, ends, borders, np.diff(borders, prepend=0), strict=True):
            start = int(end) - part.size
            self.memories.note_sent_at(part.name, positions[upto - many : upto] - start, part.lo, part.size)

    def _seed(self, plan: FramePlan, purpose: str = "") -> int:
        return frame_seed(self.ledger.steps, f"{purpose}{self.rank}", plan.key)

    def corrected(self, part: TensorPart) -> torch.Tensor:
        """Return the part's entries, clipped, or the velocity that they add to, as its recipe asks."""
        tensor = clipped(part, self.recipes, self.memories.scale, self.world)
        if not self.recipes.of_part(part).mask:
            return part.of(tensor)
        entries = None if part.whole else slice(part.lo, part.hi)
        return self.memories.accelerated(part.name, tensor, entries).view(part.shape)

    # ── decoding ──

    def decode(
        self, sender: int, frames: np.ndarray, plans: Sequence[FramePlan], targets: Sequence[torch.Tensor],
        weight: float, accumulate: bool,
    ) -> None:  # fmt: skip
        """Add a rank's frames, times `weight`, to the targets, or put them there."""
        with self.ledger.decoding():
            self.ledger.note_finite(decode_frames(sender, frames, plans, targets, weight, accumulate))

    def average_on_device(
        self, plans: Sequence[FramePlan], messages: Sequence[torch.Tensor], present: Sequence[Sequence[bool]],
        weight: float,
    ) -> bool:  # fmt: skip
        """Replace the tensors by the sum of these frames, each times `weight`; False if the host has to do that.

        `present` tells for each message which parts it carries; what none carries becomes zero.
        """
        with self.ledger.decoding():
            if not messages or not self._is_on_device(plans):
                return False
            return self._on_device.add_up(plans, messages, present, weight)

    @property
    def _corrects(self) -> bool:
        """Whether some recipe sends anything else than the gradient and the error memory."""
        return self.recipes.any("mask") or self.recipes.any("clip")

    @property
    def _masks_what_is_rounded(self) -> bool:
        """Whether masks are needed of what was sent, and memories that are rounded do not tell (`sent_of`)."""
        return self.memories.errors.dtype != torch.float32 and self.recipes.any("mask")

    def _is_on_device(self, plans: Sequence[FramePlan]) -> bool:
        return self.known.fact("is on a device", plans, is_on_device)

    def average(
        self, plans: Sequence[FramePlan], arrived: Sequence[tuple[int, np.ndarray]], weight: float | None = None
    ) -> None:
        """Replace the tensors by the mean of the frames that these ranks sent, added up in this order.

        With a `weight`, by their sum, each frame times the weight.
        """
        weight = 1 / max(len(arrived), 1) if weight is None else weight
        parts = sum(len(plan.parts) for plan in plans)
        messages = [_as_tensor(frames) for _, frames in arrived]
        if self.average_on_device(plans, messages, [[True] * parts] * len(arrived), weight):
            return
        targets = [plan.target() for plan in plans]
        for i, (sender, frames) in enumerate(arrived):
            self.decode(sender, frames, plans, targets, weight, accumulate=i > 0)
        for plan, target in zip(plans, targets, strict=True):
            if arrived:
                plan.put(target)

    # ── the end of a step ──

    def end_step(self) -> None:
        """Commit the memories if all ranks sent finite numbers, or roll them back; the next step begins."""
        self.ledger.count_step()
        self.commit()

    def commit(self) -> None:
        """Do what `end_step` does for a step that was counted already."""
        self.memories.commit() if self.ledger.finite else self.memories.rollback()
        self.ledger.begin_step()

    def abandon_step(self) -> None:
        """Roll back the memories of a step that failed."""
        self.memories.rollback()
        self.ledger.abandon_step()

    # ── what is saved ──

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps, the recipes, and this rank's memories, by parameter name."""
        return {"steps": self.ledger.steps, KEY: self.recipes.state_dict(), **self.memories.state_dict()}

    def load(self, saved: SavedMemories) -> None:
        """Go on from saved memories, which were checked."""
        self.memories.load(saved)
        self.ledger.resume_at(saved.steps)


def encode_frames(
    plans: Sequence[FramePlan], recipes: ModelRecipes, errors: ErrorMemory, step: int, sender: int
) -> bytes:
    """Return the frames of one update that is sent by itself, as Flower's clients do, and update the error memory.

    It counts from `errors.commit()` on.
    """
    values = [[part.of(clipped(part, recipes, 1.0, 1)) for part in plan.parts] for plan in plans]
    out = torch.empty(most_frame_bytes(plans), dtype=torch.uint8, device="cpu")
    end, scratch = 0, Scratch()
    for plan, tensors in zip(plans, values, strict=True):
        seed = frame_seed(step, str(sender), plan.key)
        end += encode_frame(plan, tensors, _slots(plan, errors), seed, out[end:], scratch)
    return out[:end].numpy().tobytes()


def clipped(part: TensorPart, recipes: ModelRecipes, scale: float, world: int) -> torch.Tensor:
    """Return the part's tensor, scaled down to its share of the norm that the recipe allows to the whole model.

    A tensor's share of the norm goes by its size, and each of `world` ranks has its share of the mean's.
    """
    tensor, limit = part.tensor, recipes.of(part.name).clip
    if limit:
        limit = limit * scale * (tensor.numel() / recipes.total / world) ** 0.5
        norm = float(tensor.float().norm())
        tensor = tensor * (limit / norm) if norm > limit else tensor
    return tensor


def _entries(plans: Sequence[FramePlan]) -> list[list[torch.Tensor]]:
    return [[part.entries for part in plan.parts] for plan in plans]


def _remembers(plans: Sequence[FramePlan]) -> bool:
    return all(plan.recipe.decay for plan in plans)


def _slots(plan: FramePlan, memory: ErrorMemory) -> list[MemorySlot]:
    """Return the error memory of each part, or nothing if the recipe has none."""
    if not plan.recipe.decay:
        return []
    buffers = [memory.buffers(part.name, part.tensor) for part in plan.parts]
    return [MemorySlot(p.of(before), p.of(after)) for p, (before, after) in zip(plan.parts, buffers, strict=True)]


def _as_tensor(frames: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(frames) if frames.flags.writeable else torch.from_numpy(frames.copy())
