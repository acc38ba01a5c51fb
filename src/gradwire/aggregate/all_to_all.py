"""All-to-all of messages whose lengths differ, in one round: every rank has one for every rank.

As in all_gather.py, a block has a capacity that sender and receiver both know from the last time: each pair has its
own, a little above the last message between them. The rest of a message that does not fit follows from one to the
other alone, since both know of it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
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
    blocks: list[torch.Tensor]  # this rank's messages, one to each rank
    capacities_out: list[int]  # to each rank
    capacities_in: list[int]  # from each rank
    received: torch.Tensor
    work: dist.Work


class AllToAll:
    def __init__(self, link: Link):
        self.link = link
        self._capacities: dict[Hashable, tuple[list[int], list[int]]] = {}

    def start(self, key: Hashable, subject: Subject, blocks: Sequence[torch.Tensor], lengths: Sequence[int]) -> Ticket:
        """Send blocks[r][:16+lengths[r]] to rank r; the first sixteen bytes are left for us.

        All messages that ranks send to the same rank are about the same subject.
        """
        for block, length in zip(blocks, lengths, strict=True):
            subject.seal(block, length)
        used = [PREFIX + length for length in lengths]
        if key not in self._capacities:
            out = torch.tensor(used)
            one_each = [1] * self.link.world
            arriving, work = self.link.all_to_all(out, one_each, one_each)
            self.link.wait(work)
            for rank, announced in enumerate(arriving.tolist()):
                subject.check_length(rank, announced - PREFIX)
            self._capacities[key] = _capacities(used), _capacities(arriving.tolist())
        to, of = self._capacities[key]
        sent = torch.cat([padded(block, capacity) for block, capacity in zip(blocks, to, strict=True)])
        received, work = self.link.all_to_all(sent, to, of)
        messages = [block[:n] for block, n in zip(blocks, used, strict=True)]
        return Ticket(key, subject, messages, to, of, received, work)

    def ready(self, ticket: Ticket) -> bool:
        """Whether `finish` would neither wait nor have to send a rest, whose place in the order is fixed."""
        if self.link.device.type != "cpu" or not ticket.work.is_completed():
            return False
        fits = all(len(b) <= c for b, c in zip(ticket.blocks, ticket.capacities_out, strict=True))
        return fits and all(length_of(b) <= len(b) for b in self._split(ticket))

    def _split(self, ticket: Ticket) -> list[np.ndarray]:
        return [block.numpy() for block in ticket.received.cpu().split(ticket.capacities_in)]

    def finish(self, ticket: Ticket) -> list[np.ndarray]:
        """The messages to this rank, in rank order, its own among them."""
        self.link.wait(ticket.work)
        blocks = self._split(ticket)
        for rank, block in enumerate(blocks):
            ticket.subject.check(rank, block)
        lengths = [length_of(block) for block in blocks]
        self._capacities[ticket.key] = _capacities([len(b) for b in ticket.blocks]), _capacities(lengths)
        self._add_rests(ticket, blocks, lengths)
        return [block[PREFIX:length] for block, length in zip(blocks, lengths, strict=True)]

    def _add_rests(self, ticket: Ticket, blocks: list[np.ndarray], lengths: list[int]) -> None:
        own, device = self.link.rank, self.link.device
        to = zip(ticket.blocks, ticket.capacities_out, strict=True)
        sent = {r: block[capacity:].to(device) for r, (block, capacity) in enumerate(to) if len(block) > capacity}
        of = zip(lengths, ticket.capacities_in, strict=True)
        received = {
            r: torch.empty(length - capacity, dtype=torch.uint8, device=device)
            for r, (length, capacity) in enumerate(of)
            if length > capacity
        }
        if own in sent:
            received[own].copy_(sent[own])
        elsewhere = {r: block for r, block in received.items() if r != own}
        self.link.send_and_receive({r: block for r, block in sent.items() if r != own}, elsewhere)
        for r, rest in received.items():
            blocks[r] = np.concatenate([blocks[r], rest.cpu().numpy()])


def _capacities(lengths: Sequence[int]) -> list[int]:
    return [capacity_for(n) for n in lengths]
