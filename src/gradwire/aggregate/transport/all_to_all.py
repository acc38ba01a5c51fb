"""All-to-all of messages whose lengths differ, in one round: every rank has one for every rank.

1. A receiver makes room for each sender's message: somewhat more than the last one between the two needed. Both know
   how much that is, so no sizes have to be exchanged first.
2. Over Gloo a sender sends no more than its message. NCCL wants both to name the same length, so the message is padded.
3. What does not fit into the room follows between these two ranks alone, since both know of it.

The very first time there is no last message to go by, and the lengths are exchanged on their own.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch

from gradwire.aggregate.peers.diagnosis import Work
from gradwire.aggregate.transport.link import Link
from gradwire.aggregate.transport.message_prefix import PREFIX, ByteArray, Subject, capacity_for, length_of, padded


@dataclass
class PendingMessages:
    """The messages of one exchange that is under way."""

    key: Hashable
    subject: Subject
    blocks: list[torch.Tensor]  # this rank's messages, one to each rank
    capacities_out: list[int]  # bytes that each rank has made room for
    sizes_in: list[int]  # bytes of room for the message of each rank; 0 for this one
    received: torch.Tensor
    work: Work


class _Over:
    """A collective that there was no need for."""

    def is_completed(self) -> bool:
        return True

    def wait(self, timeout: timedelta = timedelta()) -> object:
        return None


class AllToAll:
    """Sends one message from every rank to every rank, in one round.

    It promises that messages arrive whole, that each is about the subject that this rank expects (AggregateError names
    the rank whose message is not), and that no rank can make another one take more memory than its subject allows.

    Collectives are started by `start` and `finish` alone, never in a callback, so that their order is the order of
    these calls; all ranks make them in the same order, from one thread at a time. `ready` starts none. A key names a
    series of similar exchanges, such as those of a bucket; buffers and room are kept by key. What `finish` returns lies
    in such a buffer.
    """

    def __init__(self, link: Link):
        self.link = link
        self._capacities: dict[Hashable, tuple[list[int], list[int]]] = {}
        self._buffers: dict[Hashable, torch.Tensor] = {}

    def start(
        self, key: Hashable, subject: Subject, blocks: Sequence[torch.Tensor], lengths: Sequence[int]
    ) -> PendingMessages:
        """Start to send blocks[r][: 16 + lengths[r]] to rank r; the prefix is written into the first sixteen bytes.

        All messages that ranks send to the same rank are about the same subject.
        """
        for block, length in zip(blocks, lengths, strict=True):
            subject.seal(block, length)
        messages = [block[: PREFIX + length] for block, length in zip(blocks, lengths, strict=True)]
        if self.link.world == 1:  # there is nobody to send to
            return PendingMessages(key, subject, messages, [0], [0], messages[0][:0], _Over())
        if key not in self._capacities:
            arriving = self._exchange_lengths(subject, [len(message) for message in messages])
            self._capacities[key] = self._room(map(len, messages)), self._room(arriving)
        capacities_out, capacities_in = self._capacities[key]
        parts = [
            message[:room] if self.link.exact_lengths else padded(block, room)
            for message, block, room in zip(messages, blocks, capacities_out, strict=True)
        ]
        parts[self.link.rank] = parts[self.link.rank][:0]  # this rank's own message need not travel
        sizes_in = [0 if r == self.link.rank else room for r, room in enumerate(capacities_in)]
        received, work = self.link.all_to_all(parts, sizes_in, self._buffer(key, sum(sizes_in)))
        return PendingMessages(key, subject, messages, capacities_out, sizes_in, received, work)

    def _exchange_lengths(self, subject: Subject, lengths: list[int]) -> list[int]:
        one_each = [1] * self.link.world
        room = torch.empty(self.link.world, dtype=torch.int64, device=self.link.device)
        leaving = list(torch.tensor(lengths, dtype=torch.int64, device="cpu").split(1))
        arriving, work = self.link.all_to_all(leaving, one_each, room)
        self.link.wait(work)
        self.link.count_received(8 * (self.link.world - 1))
        announced: list[int] = arriving.tolist()
        for rank, length in enumerate(announced):
            subject.check_length(rank, length - PREFIX)
        return announced

    def _room(self, lengths: Iterable[int]) -> list[int]:
        return [capacity_for(n, self.link.exact_lengths) for n in lengths]

    def _buffer(self, key: Hashable, size: int) -> torch.Tensor:
        buffer = self._buffers.get(key)
        if buffer is None or len(buffer) < size:
            # Messages that a GPU decodes are copied to it from here.
            pinned = self.link.device.type == "cpu" and torch.cuda.is_initialized()
            buffer = torch.empty(size + size // 8, dtype=torch.uint8, device=self.link.device, pin_memory=pinned)
            self._buffers[key] = buffer
        return buffer[:size]

    def arrived(self, pending: PendingMessages) -> bool:
        """Tell whether `finish` would not wait, unless for a rest."""
        return pending.work.is_completed()

    def ready(self, pending: PendingMessages) -> bool:
        """Tell whether `finish` would neither wait nor send a rest, which has a fixed place in the order."""
        if not self.arrived(pending):
            return False
        out = zip(pending.blocks, pending.capacities_out, strict=True)
        fits = all(len(block) <= room for r, (block, room) in enumerate(out) if r != self.link.rank)
        blocks = self._split(pending)
        heads = _first_bytes(blocks)
        return fits and all(length_of(head) <= len(block) for head, block in zip(heads, blocks, strict=True))

    def finish(self, pending: PendingMessages) -> list[torch.Tensor]:
        """Wait for the messages to this rank, in rank order, its own among them.

        They are where the link has its messages, this rank's own where it was made, and valid until the next `start`
        with this key.
        """
        self.link.wait(pending.work)
        blocks = self._split(pending)
        heads = _first_bytes(blocks)
        for rank, head in enumerate(heads):
            pending.subject.check(rank, head)
        lengths = [length_of(head) for head in heads]
        self._capacities[pending.key] = self._room(map(len, pending.blocks)), self._room(lengths)
        arrived = (
            min(n, size) if self.link.exact_lengths else size for n, size in zip(lengths, pending.sizes_in, strict=True)
        )
        self.link.count_received(sum(arrived))
        self._add_rests(pending, blocks, lengths)
        return [block[PREFIX:length] for block, length in zip(blocks, lengths, strict=True)]

    def finish_in_host_memory(self, pending: PendingMessages) -> list[ByteArray]:
        """Do what `finish` does, and return arrays in the host's memory."""
        return [message.cpu().numpy() for message in self.finish(pending)]

    def _split(self, pending: PendingMessages) -> list[torch.Tensor]:
        blocks = list(torch.split(pending.received, pending.sizes_in))
        blocks[self.link.rank] = pending.blocks[self.link.rank]
        return blocks

    def _add_rests(self, pending: PendingMessages, blocks: list[torch.Tensor], lengths: list[int]) -> None:
        """Send and receive what did not fit into the room, and complete the blocks with it."""
        device = self.link.device
        out = enumerate(zip(pending.blocks, pending.capacities_out, strict=True))
        sent = {r: block[room:].to(device) for r, (block, room) in out if r != self.link.rank and len(block) > room}
        received = {
            r: torch.empty(length - len(block), dtype=torch.uint8, device=device)
            for r, (block, length) in enumerate(zip(blocks, lengths, strict=True))
            if length > len(block)
        }
        if sent or received:
            self.link.send_and_receive(sent, received)
        for r, rest in received.items():
            blocks[r] = torch.cat([blocks[r], rest])


def _first_bytes(blocks: Sequence[torch.Tensor]) -> list[ByteArray]:
    """Return the prefixes of all blocks in the host's memory; of those on a GPU by one copy."""
    away = [block[:PREFIX] for block in blocks if not block.is_cpu]
    copied = iter(torch.stack(away).cpu().numpy() if away else ())
    return [block[:PREFIX].numpy() if block.is_cpu else next(copied) for block in blocks]
