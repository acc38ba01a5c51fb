"""Messages that are made and averaged on the GPU where their tensors are, by the kernels of `gradwire.gpu`.

A message for a link of the host's memory is copied there when it is finished, and those of other ranks are copied to
the GPU; with NCCL no byte leaves it. What the kernels cannot do is left to the host's codecs: the methods say so by
returning None or False, with nothing changed that counts.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from gradwire import gpu
from gradwire.aggregate.messages.frame_coding import MemorySlot
from gradwire.aggregate.messages.frame_plan import FramePlan
from gradwire.aggregate.transport.message_prefix import PREFIX
from gradwire.correct.memory_dtype import keep
from gradwire.gpu.presence import NonzeroFinder
from gradwire.gpu.workspace import Workspace


def is_on_device(plans: Sequence[FramePlan]) -> bool:
    """Tell whether kernels make frames of all these plans where their tensors are."""
    tensors = [(plan, part.tensor) for plan in plans for part in plan.parts]
    device = tensors[0][1].device if tensors else torch.device("cpu")
    return bool(tensors) and all(
        tensor.device == device
        and tensor.is_contiguous()
        and (len(plan.parts) == 1 or plan.codec.converter.lists_segments)  # not entries of the whole model
        and gpu.can_encode(plan.codec.converter, tensor.dtype, device)
        for plan, tensor in tensors
    )


class DeviceMessages:
    """Codes messages on one or more GPUs, one after the other, in the thread and on the stream of the caller."""

    def __init__(self) -> None:
        self._coders: dict[torch.device, _DeviceCoder] = {}
        self._blocks: dict[Hashable, torch.Tensor] = {}

    def _coder(self, device: torch.device) -> _DeviceCoder:
        if device not in self._coders:
            self._coders[device] = _DeviceCoder(device)
        return self._coders[device]

    def which_are_zero(self, tensors: Sequence[torch.Tensor]) -> list[bool]:
        """Return for each tensor, all on one device, whether it is zero everywhere."""
        return [not found for found in self._coder(tensors[0].device).finder.find(tensors)]

    def encode(
        self, key: Hashable, plans: Sequence[FramePlan], gradients: Sequence[Sequence[torch.Tensor]],
        memory: Sequence[Sequence[MemorySlot]], seeds: Sequence[int], note: bytes, to: torch.device,
    ) -> tuple[torch.Tensor, int] | None:  # fmt: skip
        """Return a block on the device `to` with room for a prefix, then the note and the frames; and their length.

        The new error memory is written. None says that the host has to encode the message: it holds a NaN or an
        infinity, or is longer than expected.
        """
        wide = [[_in_fp32(slot) for slot in slots] for slots in memory]
        tasks = _frame_tasks(plans, gradients, wide, seeds)
        device = gradients[0][0].device
        coder = self._coder(device)
        out = coder.space.room("message", gpu.room_for(tasks))
        length = coder.encoder.encode(tasks, out).wait()
        if length is None:
            return None
        for slots, written, seed in zip(memory, wide, seeds, strict=True):
            for slot, new in zip(slots, written, strict=True):
                if new is not slot:
                    keep(new.after, slot.after, seed)
        start = PREFIX + len(note)
        block = self._block(key, start + length, to, pinned=device.type == "cuda")
        if note:
            block[PREFIX:start] = torch.frombuffer(bytearray(note), dtype=torch.uint8)
        block[start : start + length].copy_(out[:length])
        return block, len(note) + length

    def _block(self, key: Hashable, size: int, device: torch.device, pinned: bool) -> torch.Tensor:
        block = self._blocks.get(key)
        if block is None or len(block) < size or block.device.type != device.type:
            pinned = pinned and device.type == "cpu"
            block = torch.empty(size + size // 4 + 1024, dtype=torch.uint8, device=device, pin_memory=pinned)
            self._blocks[key] = block
        return block

    def add_up(
        self, plans: Sequence[FramePlan], messages: Sequence[torch.Tensor], present: Sequence[Sequence[bool]],
        weight: float, frame_dtype: torch.dtype | None = None, adds: bool = False,
    ) -> bool:  # fmt: skip
        """Put the sum of these messages, each times `weight`, into the tensors of the plans, or add it to them.

        `frame_dtype` is what was encoded, where sums have another dtype. False says that the host has to do it, from
        the beginning: the tensors hold anything then.
        """
        coder = self._coder(plans[0].parts[0].tensor.device)
        targets = _frame_targets(plans, frame_dtype)
        return coder.decoder.average(targets, coder.here(messages), present, weight, adds).wait()

    # ── messages that nobody waits for ──

    def encode_unattended(
        self, key: Hashable, plans: Sequence[FramePlan], gradients: Sequence[Sequence[torch.Tensor]],
        memory: Sequence[Sequence[MemorySlot]], seeds: Sequence[int], block: torch.Tensor, stamp: int,
        everything: bool,
    ) -> gpu.MessageLayout:  # fmt: skip
        """Write prefix, note and frames to the block, as far as they fit; the new error memory is written, too."""
        tasks = _frame_tasks(plans, gradients, memory, seeds)
        return self._coder(block.device).unattended.encode(key, tasks, block, stamp, everything)

    def average_unattended(
        self, key: Hashable, encoded: gpu.MessageLayout, plans: Sequence[FramePlan], blocks: Sequence[torch.Tensor],
        stamp: int,
    ) -> gpu.Outcome:  # fmt: skip
        """Replace the tensors of the plans by the mean of the messages in these blocks; `encoded` is this rank's."""
        coder = self._coder(blocks[0].device)
        return coder.unattended.average(key, encoded, _frame_targets(plans), blocks, stamp)


class _DeviceCoder:
    """What one device has."""

    def __init__(self, device: torch.device):
        self.encoder, self.decoder = gpu.MessageEncoder(device), gpu.MessageDecoder(device)
        self.finder, self.space, self.device = NonzeroFinder(device), Workspace(device), device
        self.unattended = gpu.UnattendedMessages(self.encoder, self.decoder)

    def here(self, messages: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the messages on the device; those that were elsewhere are valid until the next call."""
        away = [m for m in messages if m.device != self.device]
        room = self.space.room("arrived", sum(len(m) + 64 for m in away)) if away else None
        at, result = 0, []
        for message in messages:
            if message.device == self.device or room is None:
                result.append(message)
                continue
            result.append(room[at : at + len(message)])
            result[-1].copy_(message, non_blocking=True)
            at += -(-len(message) // 64) * 64 + 64
        return result


def _in_fp32(slot: MemorySlot) -> MemorySlot:
    """Return the slot, or one of fp32 tensors in place of narrower ones: kernels know no other memory."""
    if slot.before.dtype == torch.float32:
        return slot
    return MemorySlot(slot.before.float(), torch.empty_like(slot.after, dtype=torch.float32), slot.factor)


def _frame_tasks(
    plans: Sequence[FramePlan], gradients: Sequence[Sequence[torch.Tensor]], memory: Sequence[Sequence[MemorySlot]],
    seeds: Sequence[int],
) -> list[gpu.FrameTask]:  # fmt: skip
    return [
        gpu.FrameTask(
            plan.codec.converter, _tensor_tasks(tensors, slots),
            tuple(tensors[0].shape) if len(tensors) == 1 else (sum(plan.sizes),), plan.recipe.decay, seed,
        )
        for plan, tensors, slots, seed in zip(plans, gradients, memory, seeds, strict=True)
    ]  # fmt: skip


def _frame_targets(plans: Sequence[FramePlan], dtype: torch.dtype | None = None) -> list[gpu.FrameTarget]:
    return [gpu.FrameTarget(plan.codec.converter, [part.entries for part in plan.parts], dtype) for plan in plans]


def _tensor_tasks(gradients: Sequence[torch.Tensor], slots: Sequence[MemorySlot]) -> list[gpu.TensorTask]:
    if not slots:
        return [gpu.TensorTask(gradient) for gradient in gradients]
    return [
        gpu.TensorTask(gradient, slot.before, slot.after, slot.factor)
        for gradient, slot in zip(gradients, slots, strict=True)
    ]
