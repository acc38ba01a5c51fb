"""All-to-all of messages whose lengths differ, in one round: every rank has one for every rank.

1. A receiver makes room for what each sender may send: somewhat more than the last message between the two, so that
   both know how much it is, and no sizes have to be exchanged first.
2. Over Gloo a sender sends no more than its message; NCCL wants both to name the same length, so it is padded.
3. The rest of a message that does not fit follows from one to the other alone, since both know of it.

The very first time there is nothing to go by, and the lengths are exchanged on their own.
Collectives are started by `start` and `finish` alone, never in a callback, so that their order is the
order of these calls, the same on every rank.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from gradwire.aggregate.transport.link import Link
from gradwire.aggregate.transport.message_prefix import PREFIX, Subject, capacity_for, length_of, padded


@dataclass
class PendingMessages:
    """An exchange under way."""

    key: Hashable
    subject: Subject
    blocks: list[torch.Tensor]  # this rank's messages, one to each rank
    capacities_out: list[int]  # to each rank
    sizes_in: list[int]  # from each rank; none from this one
    received: torch.Tensor
    work: dist.Work


class AllToAll:
    def __init__(self, link: Link):
        self.link = link
        self._capacities: dict[Hashable, tuple[list[int], list[int]]] = {}
        self._buffers: dict[Hashable, torch.Tensor] = {}

    def start(
        self, key: Hashable, subject: Subject, blocks: Sequence[torch.Tensor], lengths: Sequence[int]
    ) -> PendingMessages:
        """Send blocks[r][:16+lengths[r]] to rank r; the first sixteen bytes are left for us.

        All messages that ranks send to the same rank are about the same subject.
        """
        for block, length in zip(blocks, lengths, strict=True):
            subject.seal(block, length)
        messages = [block[: PREFIX + length] for block, length in zip(blocks, lengths, strict=True)]
        if key not in self._capacities:
            arriving = self._agree(subject, [len(message) for message in messages])
            self._capacities[key] = self._room(map(len, messages)), self._room(arriving)
        to, of = self._capacities[key]
        parts = [
            message[:room] if self.link.exact_lengths else padded(block, room)
            for message, block, room in zip(messages, blocks, to, strict=True)
        ]
        parts[self.link.rank] = parts[self.link.rank][:0]  # what stays here need not travel
        sizes_in = [0 if r == self.link.rank else room for r, room in enumerate(of)]
        received, work = self.link.all_to_all(parts, sizes_in, self._buffer(key, sum(sizes_in)))
        return PendingMessages(key, subject, messages, to, sizes_in, received, work)

    def _agree(self, subject: Subject, lengths: list[int]) -> list[int]:
        one_each = [1] * self.link.world
        room = torch.empty(self.link.world, dtype=torch.int64, device=self.link.device)
        arriving, work = self.link.all_to_all(list(torch.tensor(lengths).split(1)), one_each, room)
        self.link.wait(work)
        self.link.bytes_received += 8 * (self.link.world - 1)
        for rank, announced in enumerate(arriving.tolist()):
            subject.check_length(rank, announced - PREFIX)
        return arriving.tolist()

    def _room(self, lengths: Sequence[int] | map) -> list[int]:
        return [capacity_for(n, self.link.exact_lengths) for n in lengths]

    def _buffer(self, key: Hashable, size: int) -> torch.Tensor:
        buffer = self._buffers.get(key)
        if buffer is None or len(buffer) < size:
            buffer = torch.empty(size + size // 8, dtype=torch.uint8, device=self.link.device)
            self._buffers[key] = buffer
        return buffer[:size]

    def ready(self, pending: PendingMessages) -> bool:
        """Whether `finish` would neither wait nor have to send a rest, whose place in the order is fixed."""
        if self.link.device.type != "cpu" or not pending.work.is_completed():
            return False
        out = zip(pending.blocks, pending.capacities_out, strict=True)
        fits = all(len(block) <= room for r, (block, room) in enumerate(out) if r != self.link.rank)
        return fits and all(length_of(block) <= len(block) for block in self._split(pending))

    def finish(self, pending: PendingMessages) -> list[np.ndarray]:
        """The messages to this rank, in rank order, its own among them; valid until the next `start` with this key."""
        self.link.wait(pending.work)
        blocks = self._split(pending)
        for rank, block in enumerate(blocks):
            pending.subject.check(rank, block)
        lengths = [length_of(block) for block in blocks]
        self._capacities[pending.key] = self._room(map(len, pending.blocks)), self._room(lengths)
        arrived = (
            min(n, size) if self.link.exact_lengths else size for n, size in zip(lengths, pending.sizes_in, strict=True)
        )
        self.link.bytes_received += sum(arrived)
        self._add_rests(pending, blocks, lengths)
        return [block[PREFIX:length] for block, length in zip(blocks, lengths, strict=True)]

    def _split(self, pending: PendingMessages) -> list[np.ndarray]:
        blocks = [block.numpy() for block in pending.received.cpu().split(pending.sizes_in)]
        blocks[self.link.rank] = pending.blocks[self.link.rank].numpy()
        return blocks

    def _add_rests(self, pending: PendingMessages, blocks: list[np.ndarray], lengths: list[int]) -> None:
        own, device = self.link.rank, self.link.device
        out = enumerate(zip(pending.blocks, pending.capacities_out, strict=True))
        sent = {r: block[room:].to(device) for r, (block, room) in out if r != own and len(block) > room}
        received = {
            r: torch.empty(length - len(block), dtype=torch.uint8, device=device)
            for r, (block, length) in enumerate(zip(blocks, lengths, strict=True))
            if length > len(block)
        }
        self.link.send_and_receive(sent, received)
        for r, rest in received.items():
            blocks[r] = np.concatenate([blocks[r], rest.cpu().numpy()])
