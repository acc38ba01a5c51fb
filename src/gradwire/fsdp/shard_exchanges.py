"""The two exchanges of FSDP2, through frames: gradients to the owners of their shards, and shards between replicas.

Both replace a collective in its place, in the thread and the order in which FSDP2 calls it.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Hashable

import numpy as np
import torch

from gradwire.aggregate.messages.tensor_parts import Piece
from gradwire.aggregate.transport.all_gather import AllGather
from gradwire.aggregate.transport.all_to_all import AllToAll
from gradwire.aggregate.transport.link import Link
from gradwire.aggregate.transport.message_prefix import PREFIX, Subject
from gradwire.fsdp.shard_frames import HEAD, ShardFrames, summed_in
from gradwire.fsdp.shard_layout import Layout


class ReduceScatter:
    """1. Every part that another rank owns, plus this rank's error memory of it, becomes frames;
    2. all-to-all of the messages, in one round;
    3. the owner decodes them in rank order and adds its own part, which never left it, in its turn.

    Each message says whether all that its rank sends is finite, so every rank knows that of every rank.
    """

    def __init__(self, frames: ShardFrames, link: Link):
        self.frames, self.exchange = frames, AllToAll(link)

    def __call__(self, key: Hashable, layout: Layout, rows: torch.Tensor, out: torch.Tensor, weight: float) -> None:
        """out: the sum over ranks of this rank's row, each times `weight`; filling becomes zero."""
        frames, link = self.frames, self.exchange.link
        # Native kernels after one copy are faster than plain torch on a GPU, and error memory stays in host memory.
        pieces = [frames.divide(row, places) for row, places in zip(rows.cpu(), layout.rows, strict=True)]
        own = [frames.keep(piece, layout.rows[link.rank]) for piece in pieces[link.rank]]
        messages, lengths, room = [], [], frames.room(pieces)
        for rank, places in enumerate(layout.rows):
            sent = pieces[rank] if rank != link.rank else []
            length = frames.encode(sent, places, f"{link.rank}>{rank}", room[HEAD:])
            lengths.append(HEAD - PREFIX + length)
            messages.append(room[: HEAD + length])
            room = room[HEAD + length :]
        for own_message in messages:
            own_message[PREFIX] = frames.mean.finite
        if frames.memory is not None:
            frames.memory.written(layout.shapes)
        subject = Subject(frames.mean.steps, _fingerprint(pieces, layout))
        start = time.perf_counter()
        arrived = self.exchange.finish(self.exchange.start(key, subject, messages, lengths))
        frames.wait_s += time.perf_counter() - start
        total = _Sum(frames, out, layout, link.rank, weight)
        for rank, message in enumerate(arrived):
            total.add(own) if rank == link.rank else total.decode(rank, message)
        total.put()


class AllReduce:
    """Between replicas of one shard. All of them use the decoded frames, their own too, and stay bit-identical."""

    def __init__(self, frames: ShardFrames, link: Link):
        self.frames, self.exchange = frames, AllGather(link)

    def __call__(self, key: Hashable, layout: Layout, shard: int, row: torch.Tensor, weight: float) -> None:
        """row becomes the sum over replicas, each times `weight`."""
        frames, link = self.frames, self.exchange.link
        places = [place.alone() for place in layout.rows[shard]]
        pieces = frames.divide(row.cpu(), places)
        room = frames.room([pieces])
        length = frames.encode(pieces, places, f"{link.rank}:{shard}", room[HEAD:])
        room[PREFIX] = frames.mean.finite
        if frames.memory is not None:
            frames.memory.written(layout.shapes)
        subject = Subject(frames.mean.steps, _fingerprint([pieces], layout))
        start = time.perf_counter()
        arrived = self.exchange.finish(self.exchange.start(key, subject, room, HEAD - PREFIX + length))
        frames.wait_s += time.perf_counter() - start
        total = _Sum(frames, row, layout, shard, weight)
        for rank, message in enumerate(arrived):
            total.decode(rank, message)
        total.put()


class _Sum:
    """A row, on the CPU and in fp32 at least."""

    def __init__(self, frames: ShardFrames, row: torch.Tensor, layout: Layout, shard: int, weight: float):
        self.frames, self.row, self.weight = frames, row, weight
        dtype = summed_in(row.dtype)
        self.sum = row if row.device.type == "cpu" and row.dtype == dtype else torch.empty(len(row), dtype=dtype)
        places = layout.rows[shard]
        if sum(place.row.stop - place.row.start for place in places) < len(row):
            self.sum.zero_()
        self.pieces = frames.divide(self.sum, places)
        self.targets = [piece.target() for piece in self.pieces]
        self._begun = False

    def decode(self, rank: int, message: np.ndarray) -> None:
        self.frames.decode(rank, message, self.pieces, self.targets, self.weight, self._begun)
        self._begun = True

    def add(self, own: list[torch.Tensor]) -> None:
        for target, values in zip(self.targets, own, strict=True):
            if self._begun:
                target.view(-1).add_(values, alpha=self.weight)
            else:
                torch.mul(values, self.weight, out=target.view(-1))
        self._begun = True

    def put(self) -> None:
        for piece, target in zip(self.pieces, self.targets, strict=True):
            piece.put(target)
        if self.sum is not self.row:
            self.row.copy_(self.sum)


def _fingerprint(rows: list[list[Piece]], layout: Layout) -> int:
    """A number that differs where ranks have other parameters, or code them differently."""
    recipes = [str(piece.recipe) for pieces in rows for piece in pieces]
    return zlib.crc32(f"{recipes} {list(layout.shapes.values())}".encode())
