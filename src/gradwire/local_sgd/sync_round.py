"""One round of LocalSGD: the mean update of all ranks that took steps, buffers included.

A message is one byte of flags; with BUFFERS, the length of the buffers' part (4 bytes) and that part; and, if its rank
took steps since the last round (SENT), the frames of the parameters.
"""

from __future__ import annotations

import struct
import warnings

import numpy as np
import torch

from gradwire.aggregate.messages.host_copies import HostCopies
from gradwire.aggregate.messages.mean import Mean, unusable
from gradwire.aggregate.messages.tensor_parts import fingerprint, whole
from gradwire.aggregate.transport.all_gather import AllGather
from gradwire.aggregate.transport.message_prefix import Subject
from gradwire.errors import FrameError, GradwireError
from gradwire.frame import headers
from gradwire.local_sgd.buffers import Buffers

LEFT, SENT, BUFFERS = 1, 2, 4  # flags: the rank has left the `with` block; an update follows; buffers do
_HEAD = struct.Struct("<BI")


class Message:
    """What a rank sent: whether it has left, and its update, if it took steps."""

    def __init__(self, message: np.ndarray, buffers: Buffers):
        flags = int(message[0])
        self.left, self.sent = bool(flags & LEFT), bool(flags & SENT)
        self.diverged = False  # there is a NaN or an infinity in the update
        self.buffers: dict[str, torch.Tensor] | None = None
        self.frames = message[1:]
        if flags & BUFFERS:
            _, length = _HEAD.unpack_from(message)
            self.buffers, finite = buffers.decode(message[_HEAD.size : _HEAD.size + length].tobytes())
            self.diverged = not finite
            self.frames = message[_HEAD.size + length :]
        if self.sent:
            frames = headers.split(memoryview(self.frames))
            self.diverged |= any(headers.read_header(frame).nonfinite for frame in frames)

    @property
    def usable(self) -> bool:
        return self.sent and not self.diverged


def exchange(
    mean: Mean, gather: AllGather, buffers: Buffers, updates: dict[str, torch.Tensor], send: bool, left: bool,
    with_buffers: bool, flush: bool = False,
) -> list[Message]:  # fmt: skip
    """Replace the updates and the common buffers by the means of what all ranks sent, in rank order.

    A rank whose training has diverged must not take the others along: its update is left out.
    """
    flags = LEFT * left | SENT * send
    note = bytes([flags])
    if with_buffers:
        part, frame_bytes = buffers.encode(mean.steps << 32 | mean.rank)
        note = _HEAD.pack(flags | BUFFERS, len(part)) + part
        mean.frame_bytes += frame_bytes
    staging, tensors = HostCopies(), list(updates.items())
    pieces = mean.divide(staging.staged(whole(tensors), staging.submitted(tensors)), flush)
    block, length = mean.encode("sync", pieces if send else [], note)
    ticket = gather.start("sync", Subject(mean.steps, fingerprint(pieces)), block, length)
    messages = [_read(rank, message, buffers) for rank, message in enumerate(gather.finish(ticket))]
    for rank, message in enumerate(messages):
        if message.diverged:
            warnings.warn(f"rank {rank} has a NaN or an infinity: its update is left out", stacklevel=2)
    if all(message.diverged for message in messages):
        raise GradwireError("all ranks have a NaN or an infinity in their parameters: the training has diverged")
    mean.average(pieces, [(rank, message.frames) for rank, message in enumerate(messages) if message.usable])
    staging.put_back()
    buffers.average([m.buffers for m in messages if m.buffers is not None and not m.diverged])
    return messages


def _read(rank: int, message: np.ndarray, buffers: Buffers) -> Message:
    try:
        return Message(message, buffers)
    except (FrameError, struct.error, IndexError) as error:
        raise unusable(rank, error) from error
