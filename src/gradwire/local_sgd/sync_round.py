"""One sync of LocalSGD: the mean update of all ranks that took steps, buffers included.

A message is one byte of flags; with BUFFERS, the length of the buffers' part (4 bytes) and that part; and, if its rank
took steps since the last sync (SENT), the frames of the parameters.
"""

from __future__ import annotations

import struct
import warnings
from collections.abc import Sequence

import numpy as np
import torch

from gradwire.aggregate.messages.frame_coding import unusable_message
from gradwire.aggregate.messages.frame_plan import FramePlan, fingerprint
from gradwire.aggregate.messages.host_copies import HostCopies
from gradwire.aggregate.messages.message_coder import MessageCoder
from gradwire.aggregate.messages.tensor_parts import whole_tensors
from gradwire.aggregate.transport.all_gather import AllGather
from gradwire.aggregate.transport.message_prefix import Subject
from gradwire.errors import FrameError, GradwireError
from gradwire.frame import headers
from gradwire.local_sgd.buffers import Buffers

LEFT, SENT, BUFFERS = 1, 2, 4  # flags: the rank has left the `with` block; an update follows; buffers do
_HEAD = struct.Struct("<BI")


class RankUpdate:
    """What a rank sent in a sync: whether it has left the block, and its update and buffers, if there are any."""

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
        """Whether the rank sent an update that is finite."""
        return self.sent and not self.diverged


class SyncRound:
    """One sync: this rank's update and buffers go to all ranks, and become the means of what all of them sent.

    1. `encode` makes this rank's message; 2. `exchange` gathers those of all ranks; 3. `average` replaces the updates
    and the common buffers by means, in rank order. A rank whose training has diverged must not take the others along,
    so its update is left out.
    """

    def __init__(self, coder: MessageCoder, gather: AllGather, buffers: Buffers):
        self.coder, self.gather, self.buffers = coder, gather, buffers

    def run(
        self, updates: dict[str, torch.Tensor], clock: int, *, send: bool, left: bool, with_buffers: bool,
        last: bool = False,
    ) -> list[RankUpdate]:  # fmt: skip
        """Run the whole sync, and return what every rank sent.

        `clock` is the step that schedules go by, and `last` means that no step is to follow.
        """
        host_copies, tensors = HostCopies(self.coder.recipes), list(updates.items())
        parts = host_copies.of_parts(whole_tensors(tensors), host_copies.mark_ready(tensors))
        plans = self.coder.recipes.plan_frames(parts, clock, last)
        block, length = self.encode(plans if send else [], LEFT * left | SENT * send, with_buffers)
        arrived = self.exchange(plans, block, length)
        self.average(plans, arrived)
        host_copies.put_back(wait=True)
        return arrived

    def encode(self, plans: Sequence[FramePlan], flags: int, with_buffers: bool) -> tuple[torch.Tensor, int]:
        """Return a block with this rank's message, and the length of the message."""
        note = bytes([flags])
        if with_buffers:
            coder = self.coder
            part, frame_bytes = self.buffers.encode(coder.ledger.steps << 32 | coder.rank)
            note = _HEAD.pack(flags | BUFFERS, len(part)) + part
            coder.ledger.count_frame_bytes(frame_bytes)
        return self.coder.encode("sync", plans, note)

    def exchange(self, plans: Sequence[FramePlan], block: torch.Tensor, length: int) -> list[RankUpdate]:
        """Send this rank's message to all ranks, and return what every rank sent."""
        subject = Subject(self.coder.ledger.steps, fingerprint(plans))
        ticket = self.gather.start("sync", subject, block, length)
        return [self._read(rank, message) for rank, message in enumerate(self.gather.finish_in_host_memory(ticket))]

    def average(self, plans: Sequence[FramePlan], arrived: Sequence[RankUpdate]) -> None:
        """Replace updates and common buffers by the means of all ranks that have not diverged."""
        for rank, update in enumerate(arrived):
            if update.diverged:
                warnings.warn(f"rank {rank} has a NaN or an infinity: its update is left out", stacklevel=3)
        if all(update.diverged for update in arrived):
            raise GradwireError("all ranks have a NaN or an infinity in their parameters: the training has diverged")
        self.coder.average(plans, [(rank, update.frames) for rank, update in enumerate(arrived) if update.usable])
        self.buffers.average([u.buffers for u in arrived if u.buffers is not None and not u.diverged])

    def _read(self, rank: int, message: np.ndarray) -> RankUpdate:
        try:
            return RankUpdate(message, self.buffers)
        except (FrameError, struct.error, IndexError) as error:
            raise unusable_message(rank, error) from error
