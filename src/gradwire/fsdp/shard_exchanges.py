"""The two exchanges of FSDP2, through frames: gradients to the owners of their shards, and shards between replicas.

Both replace a collective in its place, in the thread and the order in which FSDP2 calls it.
"""

from __future__ import annotations

import zlib
from collections.abc import Hashable

import torch

from gradwire.aggregate.messages.device_messages import is_on_device
from gradwire.aggregate.messages.frame_coding import join
from gradwire.aggregate.messages.frame_plan import FramePlan
from gradwire.aggregate.transport.all_gather import AllGather
from gradwire.aggregate.transport.all_to_all import AllToAll
from gradwire.aggregate.transport.link import Link
from gradwire.aggregate.transport.message_prefix import PREFIX, Subject
from gradwire.fsdp.shard_frames import ShardFrames, sum_dtype
from gradwire.fsdp.shard_layout import PartPlace, ShardLayout


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
        rows, plans = frames.plan_rows(rows, layout.rows)
        kept = frames.keep(rows[link.rank], plans[link.rank], layout.rows[link.rank])
        messages = []
        for owner, places in enumerate(layout.rows):
            sent = plans[owner] if owner != link.rank else []
            messages.append(frames.encode(owner, sent, places, f"{link.rank}>{owner}", link.device))
        frames.say_whether_finite(messages)
        if frames.memory is not None:
            frames.memory.written(layout.shapes)
        subject = Subject(frames.ledger.steps, _fingerprint(plans, layout))
        lengths = [len(message) - PREFIX for message in messages]
        with frames.ledger.waiting():
            arrived = self.exchange.finish(self.exchange.start(key, subject, messages, lengths))
        _Sum(frames, out, rows.device, layout.rows[link.rank], weight).of(arrived, link.rank, kept)


class ReplicaAllReduce:
    """Sums the gradients of one shard over its replicas, which all use the decoded frames, their own too, and so stay
    bit-identical."""

    def __init__(self, frames: ShardFrames, link: Link):
        self.frames, self.exchange = frames, AllGather(link)

    def __call__(self, key: Hashable, layout: ShardLayout, shard: int, row: torch.Tensor, weight: float) -> None:
        """Replace the row by the sum over replicas, each times `weight`."""
        frames, link = self.frames, self.exchange.link
        places = [place.alone() for place in layout.rows[shard]]
        rows, [plans] = frames.plan_rows(row.unsqueeze(0), [places])
        message = frames.encode(0, plans, places, f"{link.rank}:{shard}", link.device)
        if frames.memory is not None:
            frames.memory.written(layout.shapes)
        subject = Subject(frames.ledger.steps, _fingerprint([plans], layout))
        with frames.ledger.waiting():
            arrived = self.exchange.finish(self.exchange.start(key, subject, message, len(message) - PREFIX))
        _Sum(frames, row, rows.device, layout.rows[shard], weight).of(arrived)


class _Sum:
    """The sum of a row over ranks, in their order and in fp32 at least, on the device where its parts were coded."""

    def __init__(
        self, frames: ShardFrames, row: torch.Tensor, device: torch.device, places: list[PartPlace], weight: float
    ):
        self.frames, self.row, self.places, self.weight = frames, row, places, weight
        dtype = sum_dtype(row.dtype)
        in_place = row.device == device and row.dtype == dtype
        self.sum = row if in_place else torch.empty(len(row), dtype=dtype, device=device)
        if sum(place.row.stop - place.row.start for place in places) < len(row):
            self.sum.zero_()
        self.plans = frames.plan(self.sum, places)

    def of(self, arrived: list[torch.Tensor], own: int | None = None, kept: torch.Tensor | None = None) -> None:
        """Sum up the messages of all ranks; `kept` takes the place of the one of rank `own`."""
        messages = self.frames.open(arrived)
        if kept is not None:
            kept.mul_(self.weight)  # a rounding of its own, as frames have it: torch fuses products and sums at will
        if not (is_on_device(self.plans) and self._on_device(messages, own, kept)):
            self._on_host(messages, own, kept)
        if self.sum is not self.row:
            self.row.copy_(self.sum)

    def _on_device(self, messages: list[torch.Tensor], own: int | None, kept: torch.Tensor | None) -> bool:
        """Return whether kernels could do it."""
        first, rest = messages[:own], messages[len(messages) if own is None else own + 1 :]
        if not self._decode_on_device(first, accumulate=False):
            return False
        if kept is not None:  # with zeros between the parts
            self.sum.add_(kept) if first else self.sum.copy_(kept)
        return self._decode_on_device(rest, accumulate=True)

    def _decode_on_device(self, messages: list[torch.Tensor], accumulate: bool) -> bool:
        return self.frames.decode_on_device(messages, self.plans, self.row.dtype, self.weight, accumulate)

    def _on_host(self, messages: list[torch.Tensor], own: int | None, kept: torch.Tensor | None) -> None:
        targets = [plan.target() for plan in self.plans]
        for rank, message in enumerate(messages):
            if rank == own and kept is not None:
                self._add(kept, targets, accumulate=rank > 0)
            else:
                self.frames.decode(rank, message, self.plans, targets, self.weight, accumulate=rank > 0)
        for plan, target in zip(self.plans, targets, strict=True):
            plan.put(target)

    def _add(self, kept: torch.Tensor, targets: list[torch.Tensor], accumulate: bool) -> None:
        row_of = {place.name: place.row for place in self.places}
        for plan, target in zip(self.plans, targets, strict=True):
            values = join([kept[row_of[name]] for name in plan.names]).view(target.shape)
            target.add_(values) if accumulate else target.copy_(values)


def _fingerprint(rows: list[list[FramePlan]], layout: ShardLayout) -> int:
    """Return a number that differs where ranks have other parameters, or code them differently."""
    recipes = [str(plan.recipe) for plans in rows for plan in plans]
    return zlib.crc32(f"{recipes} {list(layout.shapes.values())}".encode())
