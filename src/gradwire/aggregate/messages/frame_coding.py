"""Named tensors to frames and back, without any state: what DDP, LocalSGD, FSDP2 and Flower share.

encode: u = g + γe becomes a frame, and what the frame leaves out goes to the error memory (docs/architecture.md);
decode: every rank adds up the frames of all ranks, its own too, in rank order, so that the result is bit-identical
everywhere.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from gradwire import codecs
from gradwire.aggregate.messages.frame_plan import FramePlan
from gradwire.correct.memory_dtype import keep
from gradwire.errors import AggregateError, FrameError
from gradwire.frame import headers


class MemorySlot(NamedTuple):
    """The error memory of one part: read from `before`, times `factor`, and written to `after`."""

    before: torch.Tensor
    after: torch.Tensor
    factor: float = 1.0


class Scratch:
    """Room for the error memories of one frame, which is kept for the next frame; for one thread at a time.

    Tensors of several megabytes that come and go between others that stay would leave holes that nobody gives back.
    """

    def __init__(self) -> None:
        self._room = torch.empty(0, dtype=torch.float32, device="cpu")

    def take(self, size: int, device: torch.device) -> torch.Tensor:
        """Return a flat fp32 tensor of this size, whose values are undefined; it belongs to the caller until the next
        call."""
        if self._room.numel() < size or self._room.device != device:
            self._room = torch.empty(size, dtype=torch.float32, device=device)
        return self._room[:size]


def frame_seed(step: int, sender: str, key: str) -> int:
    """Return a seed that differs between steps, senders and parameters, and is the same in a repeated run."""
    return (step << 32) + zlib.crc32(f"{sender}:{key}".encode())


def encode_frame(
    plan: FramePlan, gradients: Sequence[torch.Tensor], memory: Sequence[MemorySlot], seed: int, out: torch.Tensor,
    scratch: Scratch,
) -> int:  # fmt: skip
    """Correct, convert, compress: write one frame to the front of `out`, and return its length.

    `gradients` holds the entries of each part of the plan, `memory` a slot for each of them, or nothing where the
    recipe has no error memory.
    """
    decay = plan.recipe.decay
    if len(gradients) == 1 and (not memory or memory[0].before.dtype == torch.float32):
        before, after, factor = memory[0] if memory else (None, None, 1.0)
        return plan.codec.encode_into(
            gradients[0], out, residual=before, residual_out=after, decay=decay * factor, seed=seed,
            part_of=plan.parts[0].tensor.numel(),
        )  # fmt: skip
    segments = plan.sizes if len(gradients) > 1 else ()
    joined = join(gradients)
    if not memory:
        return plan.codec.encode_into(joined, out, seed=seed, segments=segments)
    memories = scratch.take(joined.numel(), memory[0].before.device)
    pieces = memories.split(plan.sizes)
    for slot, piece in zip(memory, pieces, strict=True):
        piece.copy_(slot.before.reshape(-1))
        if slot.factor != 1:
            piece.mul_(slot.factor)
    length = plan.codec.encode_into(joined, out, residual=memories, decay=decay, seed=seed, segments=segments)
    for slot, updated in zip(memory, pieces, strict=True):
        keep(updated, slot.after, seed)
    return length


def most_frame_bytes(plans: Sequence[FramePlan]) -> int:
    """Return the most bytes that the frames of these plans can have, on any rank."""
    return sum(plan.codec.max_frame_bytes(part.entries) for plan in plans for part in plan.parts)


def decode_frames(
    sender: int, frames: np.ndarray, plans: Sequence[FramePlan], targets: Sequence[torch.Tensor], weight: float,
    accumulate: bool,
) -> bool:  # fmt: skip
    """Add a rank's frames, times `weight`, to the targets, or put them there; return whether all were finite.

    A frame that does not fit its plan is an AggregateError that names the sender.
    """
    finite = True
    try:
        split = headers.split_with_headers(memoryview(frames))
        if len(split) != len(plans):
            raise FrameError(f"{len(split)} frames, expected {len(plans)}")
        for (header, frame), plan, target in zip(split, plans, targets, strict=True):
            payload = codecs.payload_of(header, frame)
            expected = sum(plan.sizes)
            if header.elements != expected:
                raise FrameError(f"{header.elements} elements for {', '.join(plan.names)}, expected {expected}")
            finite &= not header.nonfinite
            codecs.decode_payload(header, payload, target, weight, accumulate)
    except FrameError as error:
        raise unusable_message(sender, error) from error
    return finite


def unusable_message(sender: int, error: Exception) -> AggregateError:
    """Return the error that says which rank sent a message that cannot be used, and what to do about it."""
    return AggregateError(
        f"rank {sender} sent what this rank cannot use ({error}): all ranks must have the same model, "
        f"the same spec and the same version of gradwire"
    )


def join(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the tensors end to end, as one flat tensor; a single one is returned as it is."""
    return tensors[0] if len(tensors) == 1 else torch.cat([tensor.reshape(-1) for tensor in tensors])
