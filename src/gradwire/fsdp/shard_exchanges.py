"""The two exchanges of FSDP2, through frames: gradients to the owners of their shards, and shards between replicas.

Both replace a collective in its place, in the thread and the order in which FSDP2 calls it.
"""

from __future__ import annotations

import zlib
from collections.abc import Hashable

import numpy as np
import torch

from gradwire.aggregate.messages.frame_plan import FramePlan
from gradwire.aggregate.transport.all_gather import AllGather
from gradwire.aggregate.transport.all_to_all import AllToAll
from gradwire.aggregate.transport.link import Link
from gradwire.aggregate.transport.message_prefix import PREFIX, Subject
from gradwire.fsdp.shard_frames import HEAD, ShardFrames, sum_dtype
from gradwire.fsdp.shard_layout import ShardLayout


class ShardReduceScatter:
    """1. Every part that another rank owns, plus this rank's error memory of it, becomes frames;
    2. all-to-all of the messages, in one round;
    3. the owner decodes them in rank order and adds its own part, which never left it, in its turn.

    Each message says whether all that its rank sends is finite, so every rank knows that of every rank.
    """

    def __init__(self, frames: ShardFrames, link: Link):
        self.frames, self.exchange = frames, AllToAll(link)

    def __call__(
        self, key: Hashable, layout: ShardLayout, rows: torch.Tensor, out: torch.Tensor, weight: float
    ) -> None:
        """Write to `out` the sum over ranks of this rank's row, each times `weight`; filling becomes zero."""
        frames, link = self.frames, self.exchange.link
        # Native kernels after one copy are faster than plain torch on a GPU, and error memory stays in host memory.
        plans = [frames.plan(row, places) for row, places in zip(rows.cpu(), layout.rows, strict=True)]
        kept = [frames.keep(plan, layout.rows[link.rank]) for plan in plans[link.rank]]
        messages, lengths, room = [], [], frames.room(plans)
        for owner, places in enumerate(layout.rows):
            sent = plans[owner] if owner != link.rank else []
            length = frames.encode(sent, places, f"{link.rank}>{owner}", room[HEAD:])
            lengths.append(HEAD - PREFIX + length)
            messages.append(room[: HEAD + length])
            room = room[HEAD + length :]
        for message in messages:
            message[PREFIX] = frames.ledger.finite
        if frames.memory is not None:
            frames.memory.written(layout.shapes)
        subject = Subject(frames.ledger.steps, _fingerprint(plans, layout))
        with frames.ledger.waiting():
            arrived = self.exchange.finish_in_host_memory(self.exchange.start(key, subject, messages, lengths))
        total = _Sum(frames, out, layout, link.rank, weight)
        for sender, received in enumerate(arrived):
            total.add(kept) if sender == link.rank else total.decode(sender, received)
        total.put()


class ReplicaAllReduce:
    """Sums the gradients of one shard over its replicas, which all use the decoded frames, their own too, and so stay
    bit-identical."""

    def __init__(self, frames: ShardFrames, link: Link):
        self.frames, self.exchange = frames, AllGather(link)

    def __call__(self, key: Hashable, layout: ShardLayout, shard: int, row: torch.Tensor, weight: float) -> None:
        """Replace the row by the sum over replicas, each times `weight`."""
        frames, link = self.frames, self.exchange.link
        places = [place.alone() for place in layout.rows[shard]]
        plans = frames.plan(row.cpu(), places)
        room = frames.room([plans])
        length = frames.encode(plans, places, f"{link.rank}:{shard}", room[HEAD:])
        room[PREFIX] = frames.ledger.finite
        if frames.memory is not None:
            frames.memory.written(layout.shapes)
        subject = Subject(frames.ledger.steps, _fingerprint([plans], layout))
        with frames.ledger.waiting():
            arrived = self.exchange.finish_in_host_memory(
                self.exchange.start(key, subject, room, HEAD - PREFIX + length)
            )
        total = _Sum(frames, row, layout, shard, weight)
        for rank, message in enumerate(arrived):
            total.decode(rank, message)
        total.put()


class _Sum:
    """The sum of a row over ranks, on the CPU and in fp32 at least."""

    def __init__(self, frames: ShardFrames, row: torch.Tensor, layout: ShardLayout, shard: int, weight: float):
        self.frames, self.row, self.weight = frames, row, weight
        dtype = sum_dtype(row.dtype)
        self.sum = row if row.device.type == "cpu" and row.dtype == dtype else torch.empty(len(row), dtype=dtype)
        places = layout.rows[shard]
        if sum(place.row.stop - place.row.start for place in places) < len(row):
            self.sum.zero_()
        self.plans = frames.plan(self.sum, places)
        self.targets = [plan.target() for plan in self.plans]
        self._begun = False

    def decode(self, sender: int, message: np.ndarray) -> None:
        self.frames.decode(sender, message, self.plans, self.targets, self.weight, self._begun)
        self._begun = True

    def add(self, kept: list[torch.Tensor]) -> None:
        for target, values in zip(self.targets, kept, strict=True):
            if self._begun:
                target.view(-1).add_(values, alpha=self.weight)
            else:
                torch.mul(values, self.weight, out=target.view(-1))
        self._begun = True

    def put(self) -> None:
        for plan, target in zip(self.plans, self.targets, strict=True):
            plan.put(target)
        if self.sum is not self.row:
            self.row.copy_(self.sum)


def _fingerprint(rows: list[list[FramePlan]], layout: ShardLayout) -> int:
    """Return a number that differs where ranks have other parameters, or code them differently."""
    recipes = [str(plan.recipe) for plans in rows for plan in plans]
    return zlib.crc32(f"{recipes} {list(layout.shapes.values())}".encode())
