"""All-gather of messages whose lengths differ, in one round.

1. Every rank sends a block of the same agreed capacity: the message's length, the message, padding.
2. All ranks see all lengths, and agree from them on the capacity of the next time, a little above the
   longest: no sizes have to be exchanged first.
3. Should a message not fit, all ranks see that too, and gather the rest in a second round.

The very first time there is nothing to agree from, and the lengths are gathered on their own.
Collectives are started by `start` and `finish` alone, never in a callback, so that their order is the
order of these calls, the same on every rank.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from .link import Link
from .message import PREFIX, Subject, capacity_for, length_of, padded


@dataclass
class Ticket:
    """An exchange under way."""

    key: Hashable
    subject: Subject
    block: torch.Tensor  # this rank's whole message, unpadded
    capacity: int
    gathered: torch.Tensor
    work: dist.Work


class AllGather:
    def __init__(self, link: Link):
        self.link = link
        self._capacity: dict[Hashable, int] = {}
        self._blocks: dict[Hashable, torch.Tensor] = {}

    def start(self, key: Hashable, subject: Subject, block: torch.Tensor, length: int) -> Ticket:
        """Send block[:16+length], whose first sixteen bytes are left for us; block needs room for padding."""
        subject.seal(block, length)
        used = PREFIX + length
        if key not in self._capacity:
            lengths = [int.from_bytes(n, "little") for n in self.link.gather_short(used.to_bytes(8, "little"))]
            for rank, announced in enumerate(lengths):
                subject.check_length(rank, announced - PREFIX)
            self._capacity[key] = capacity_for(max(lengths))
        capacity = self._capacity[key]
        buffer = self._blocks.get(key)
        if buffer is None or len(buffer) < self.link.world * capacity:
            size = self.link.world * (capacity + capacity // 8)  # lengths grow a little now and then
            buffer = self._blocks[key] = torch.empty(size, dtype=torch.uint8, device=self.link.device)
        gathered, work = self.link.all_gather(padded(block, capacity), into=buffer)
        return Ticket(key, subject, block[:used], capacity, gathered, work)

    def ready(self, ticket: Ticket) -> bool:
        """Whether `finish` would neither wait nor start a second round, whose place in the order is fixed."""
        if self.link.device.type != "cpu" or not ticket.work.is_completed():
            return False
        return all(length_of(block) <= ticket.capacity for block in self._split(ticket))

    def finish(self, ticket: Ticket) -> list[np.ndarray]:
        """The messages of all ranks, in rank order; valid until the next `start` with the same key."""
        self.link.wait(ticket.work)
        blocks = self._split(ticket)
        for rank, block in enumerate(blocks):
            ticket.subject.check(rank, block)
        lengths = [length_of(block) for block in blocks]
        longest = max(lengths)
        self._capacity[ticket.key] = capacity_for(longest)
        if longest > ticket.capacity:
            rest = padded(ticket.block[ticket.capacity :], longest - ticket.capacity)
            gathered, work = self.link.all_gather(rest)
            self.link.wait(work)
            blocks = np.concatenate([blocks, gathered.cpu().view(self.link.world, -1).numpy()], axis=1)
        return [block[PREFIX:length] for block, length in zip(blocks, lengths, strict=True)]

    def _split(self, ticket: Ticket) -> np.ndarray:
        return ticket.gathered.cpu().view(self.link.world, ticket.capacity).numpy()
