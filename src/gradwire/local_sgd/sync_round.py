"""One sync of LocalSGD: the mean update of all ranks that took steps, buffers included.

A message is one byte of flags; with BUFFERS, the length of the buffers' part (4 bytes) and that part; and, if its rank
took steps since the last sync (SENT), the frames of the parameters.
"""

from __future__ import annotations

import struct
import warnings
from collections.abc import Hashable

import numpy as np
import torch

from gradwire.aggregate.messages.frame_coding import unusable_message
from gradwire.aggregate.messages.frame_plan import fingerprint
from gradwire.aggregate.messages.host_copies import HostCopies
from gradwire.aggregate.messages.message_coder import MessageCoder
from gradwire.aggregate.messages.tensor_parts import whole_tensors
from gradwire.aggregate.transport.all_gather import AllGather
from gradwire.aggregate.transport.exchange_thread import Exchange, ExchangeThread, Pause
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
    """The syncs of this rank, one at a time: `start`, then `finish`, between which other work may be done.

    What a sync takes is laid out in `Sync`. With a `thread`, that works beside the training; otherwise within `finish`.
    """

    def __init__(self, coder: MessageCoder, gather: AllGather, buffers: Buffers, thread: ExchangeThread | None = None):
        self.coder, self.gather, self.buffers = coder, gather, buffers
        self._thread = thread

    def start(
        self, key: Hashable, updates: dict[str, torch.Tensor], clock: int, *, send: bool, left: bool,
        with_buffers: bool, last: bool = False,
    ) -> Sync:  # fmt: skip
        """Begin a sync of these updates, which become means; nobody else touches them until it is finished.

        All ranks start syncs with the same keys in the same order. `clock` is the step that schedules go by, and `last`
        means that no step is to follow.
        """
        note = self._note(LEFT * left | SENT * send, with_buffers)
        sync = Sync(self.coder, self.gather, self.buffers, key, updates, note, clock, send=send, last=last)
        if self._thread is not None:
            self._thread.submit(sync.run)
        return sync

    def finish(self, sync: Sync) -> list[RankUpdate]:
        """Wait until the updates are means, average the common buffers, and return what every rank sent."""
        if self._thread is not None:
            self._thread.drain()
        else:
            for _ in sync.run():
                pass
        sync.check()
        self.buffers.average([u.buffers for u in sync.arrived if u.buffers is not None and not u.diverged])
        return sync.arrived

    def close(self) -> None:
        """End the thread, if there is one; the next sync starts another."""
        if self._thread is not None:
            self._thread.close()

    def _note(self, flags: int, with_buffers: bool) -> bytes:
        """Return what stands before the frames: the flags, and the buffers as they are now."""
        if not with_buffers:
            return bytes([flags])
        coder = self.coder
        part, frame_bytes = self.buffers.encode(coder.ledger.steps << 32 | coder.rank)
        coder.ledger.count_frame_bytes(frame_bytes)
        return _HEAD.pack(flags | BUFFERS, len(part)) + part


class Sync:
    """One sync: this rank's updates go to all ranks, and become the means of what all of them sent.

    `run` 1. makes this rank's message; 2. gathers those of all ranks; 3. replaces the updates by means, in rank order.
    It may do so in another thread than the training's, which calls everything else. A rank whose training has diverged
    must not take the others along, so its update is left out.
    """

    def __init__(
        self, coder: MessageCoder, gather: AllGather, buffers: Buffers, key: Hashable,
        updates: dict[str, torch.Tensor], note: bytes, clock: int, *, send: bool, last: bool,
    ):  # fmt: skip
        self.coder, self.gather, self.buffers = coder, gather, buffers
        self.updates = updates
        self.arrived: list[RankUpdate] = []  # what every rank sent, when all is over
        self._key, self._note, self._clock, self._send, self._last = key, note, clock, send, last
        self._host_copies = HostCopies(coder.recipes)
        self._ready = self._host_copies.mark_ready(list(updates.items()))

    def run(self) -> Exchange:
        """Do all of it, with a pause while messages are under way."""
        parts = self._host_copies.of_parts(whole_tensors(list(self.updates.items())), self._ready)
        plans = self.coder.recipes.plan_frames(parts, self._clock, self._last)
        block, length = self.coder.encode(self._key, plans if self._send else [], self._note)
        subject = Subject(self.coder.ledger.steps, fingerprint(plans))
        ticket = self.gather.start(self._key, subject, block, length)
        yield Pause(lambda: self.gather.ready(ticket))
        messages = self.gather.finish_in_host_memory(ticket)
        arrived = [self._read(rank, message) for rank, message in enumerate(messages)]
        self.coder.average(plans, [(rank, update.frames) for rank, update in enumerate(arrived) if update.usable])
        self._host_copies.put_back(wait=True)
        self.arrived = arrived

    def check(self) -> None:
        """Warn of ranks whose update was left out; GradwireError if that is so of all."""
        for rank, update in enumerate(self.arrived):
            if update.diverged:
                warnings.warn(f"rank {rank} has a NaN or an infinity: its update is left out", stacklevel=3)
        if all(update.diverged for update in self.arrived):
            raise GradwireError("all ranks have a NaN or an infinity in their parameters: the training has diverged")

    def _read(self, rank: int, message: np.ndarray) -> RankUpdate:
        try:
            return RankUpdate(message, self.buffers)
        except (FrameError, struct.error, IndexError) as error:
            raise unusable_message(rank, error) from error
