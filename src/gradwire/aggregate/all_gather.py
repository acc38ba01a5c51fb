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

import struct
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from ..errors import AggregateError
from .lost import WAITING, explain
from .roll_call import RollCall

# torch 2.13 renamed it and warns about the old name.
_all_gather_tensor = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

PREFIX = 8  # bytes: the message's length
SLACK, ROUND = 32, 256  # capacity: 1/32 above the longest message, in steps of 256 bytes


@dataclass
class Ticket:
    """An exchange under way."""

    key: Hashable
    block: torch.Tensor  # this rank's whole block, unpadded
    capacity: int
    gathered: torch.Tensor
    work: dist.Work


class AllGather:
    def __init__(self, group: dist.ProcessGroup | None = None):
        group = group or dist.group.WORLD
        if group is None:
            raise AggregateError("no process group: call torch.distributed.init_process_group first")
        self.group: dist.ProcessGroup = group
        self.world, self.rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        self.device = torch.device("cuda") if "nccl" in dist.get_backend(self.group) else torch.device("cpu")
        self.roll_call = RollCall(self.rank, self.world)
        self.names = dist.get_process_group_ranks(self.group)
        self.step = 0
        # By this rank: copies to every peer, padding and lengths included.
        self.bytes_sent = self.bytes_received = 0
        self._capacity: dict[Hashable, int] = {}
        self._blocks: dict[tuple[Hashable, str], torch.Tensor] = {}

    def start(self, key: Hashable, block: torch.Tensor, length: int, fingerprint: Callable[[], int]) -> Ticket:
        """Send block[:8+length], whose first eight bytes are left for us; block needs room for padding.

        The first time with a key, ranks whose `fingerprint()` of what they are about to send differs are told so.
        """
        struct.pack_into("<Q", block.numpy(), 0, length)
        used = PREFIX + length
        if key not in self._capacity:
            self._capacity[key] = _capacity(self._agree(key, used, fingerprint()))
        capacity = self._capacity[key]
        sent = block[:capacity]
        if len(sent) < capacity:
            sent = torch.cat([sent, sent.new_zeros(capacity - len(sent))])
        gathered, work = self._all_gather(sent, key, "first")
        return Ticket(key, block[:used], capacity, gathered, work)

    def _agree(self, key: Hashable, used: int, fingerprint: int) -> int:
        """The longest block of all ranks, which must be about to send the same things."""
        gathered, work = self._all_gather(torch.tensor([used, fingerprint]).view(torch.uint8), key, "lengths")
        self._wait(work)
        lengths, fingerprints = gathered.cpu().view(torch.int64).view(self.world, 2).unbind(1)
        for rank, other in enumerate(fingerprints.tolist()):
            if other != fingerprint:
                raise AggregateError(
                    f"rank {rank} sends other parameters, or with other recipes, than rank {self.rank}: "
                    f"all ranks must have the same model and the same spec"
                )
        return int(lengths.max())

    def ready(self, ticket: Ticket) -> bool:
        """Whether `finish` would neither wait nor start a second round, whose place in the order is fixed."""
        if self.device.type != "cpu" or not ticket.work.is_completed():
            return False
        blocks = ticket.gathered.view(self.world, ticket.capacity).numpy()
        return all(PREFIX + struct.unpack_from("<Q", block)[0] <= ticket.capacity for block in blocks)

    def finish(self, ticket: Ticket) -> list[np.ndarray]:
        """The messages of all ranks, in rank order; valid until the next `start` with the same key."""
        self._wait(ticket.work)
        blocks = ticket.gathered.cpu().view(self.world, ticket.capacity).numpy()
        lengths = [struct.unpack_from("<Q", b)[0] for b in blocks]
        longest = PREFIX + max(lengths)
        self._capacity[ticket.key] = _capacity(longest)
        if longest <= ticket.capacity:
            return [b[PREFIX : PREFIX + n] for b, n in zip(blocks, lengths, strict=True)]
        if longest > 2**40:
            raise AggregateError("a peer announced a message of over 2^40 bytes: its block is damaged")
        rest = torch.zeros(longest - ticket.capacity, dtype=torch.uint8)
        own = ticket.block[ticket.capacity :]
        rest[: len(own)] = own
        gathered, work = self._all_gather(rest, ticket.key, "rest")
        self._wait(work)
        whole = np.concatenate([blocks, gathered.cpu().view(self.world, -1).numpy()], axis=1)
        return [b[PREFIX : PREFIX + n] for b, n in zip(whole, lengths, strict=True)]

    def gather_short(self, message: bytes) -> list[bytes]:
        """The messages of all ranks, which are all equally long."""
        gathered, work = self._all_gather(torch.frombuffer(bytearray(message), dtype=torch.uint8), message[:0], "short")
        self._wait(work)
        return [bytes(m.numpy()) for m in gathered.cpu().view(self.world, len(message))]

    def broadcast(self, tensor: torch.Tensor) -> None:
        """All ranks get rank 0's tensor."""
        sent = tensor.detach().to(self.device, memory_format=torch.contiguous_format)
        try:
            dist.broadcast(sent, src=dist.get_global_rank(self.group, 0), group=self.group)
        except RuntimeError as error:
            raise self._lost(error) from error
        size = sent.numel() * sent.element_size()
        self.bytes_sent += size * _children(self.rank, self.world)
        self.bytes_received += size * (self.rank > 0)
        if sent.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(sent)

    def _all_gather(self, block: torch.Tensor, key: Hashable, part: str) -> tuple[torch.Tensor, dist.Work]:
        block = block.to(self.device)
        size = self.world * len(block)
        buffer = self._blocks.get((key, part))
        if buffer is None or len(buffer) < size:
            buffer = self._blocks[key, part] = torch.empty(size, dtype=torch.uint8, device=self.device)
        self.bytes_sent += (self.world - 1) * len(block)
        self.bytes_received += (self.world - 1) * len(block)
        gathered = buffer[:size]
        try:
            work = _all_gather_tensor(gathered, block, group=self.group, async_op=True)
        except RuntimeError as error:
            raise self._lost(error) from error
        assert work is not None
        return gathered, work

    def _wait(self, work: dist.Work) -> None:
        self.roll_call.at(self.step, WAITING)
        try:
            while not wait_a_while(work):
                if self.roll_call.somebody_failed():
                    raise RuntimeError("another rank has given up")
        except RuntimeError as error:
            raise self._lost(error) from error
        self.roll_call.at(self.step, "computes")

    def _lost(self, error: RuntimeError) -> AggregateError:
        return AggregateError(explain(self.roll_call, error, self.names, timeout_of(self.group)))


def _capacity(longest: int) -> int:
    return -(-(longest + longest // SLACK) // ROUND) * ROUND


def _children(rank: int, world: int) -> int:
    """To how many ranks this one passes a broadcast on: Gloo's binomial tree, in which r has its bits above it."""
    lowest = rank & -rank or world
    return sum(1 for i in range(world.bit_length()) if 1 << i < lowest and rank + (1 << i) < world)


def wait_a_while(work: dist.Work, seconds: float = 0.5) -> bool:
    """Whether it is done."""
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()
    return True


def timeout_of(group: dist.ProcessGroup) -> float:
    try:
        return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    except (AttributeError, RuntimeError):
        return float("nan")
