"""The mean of gradients in every step, exchanged beside the backward pass: what DDP and DataParallel share.

`submit` hands over tensors as soon as they are there, `finish_step` waits until all of them are means. In between a
thread (`exchange_thread.py`) takes them, a chunk at a time, through one of these exchanges.

All-reduce:      plain, without frames; what is left in error memories is sent along.
All-gather:      1. encode; 2. all-gather; 3. decode and average all ranks' frames.
Scatter-reduce:  1. encode a shard for each rank; 2. all-to-all; 3. decode and average the own shard in fp32, encode the
                 mean with an error memory of its own; 4. send it to all; 5. decode all shards, the own one too.
Hierarchical:    1. reduce-scatter in fp32 among the ranks of a host; 2. all-gather or scatter-reduce of the own shard
                 among the hosts; 3. all-gather in fp32 on the host.
Summed:          what a recipe can have added up on its way, whatever the aggregation (`sum_exchange.py`).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from gradwire.aggregate.exchanges.shard_memory import ShardMemory
from gradwire.aggregate.messages import present_tensors
from gradwire.aggregate.messages.host_copies import HostCopies
from gradwire.aggregate.messages.mean import Mean, unusable
from gradwire.aggregate.messages.tensor_parts import Named, Part, Piece, fingerprint, messages, owners, shards
from gradwire.aggregate.sums.sum_exchange import Summed
from gradwire.aggregate.sums.word_sums import ProcessGroupSums, WordSums
from gradwire.aggregate.transport.all_gather import AllGather
from gradwire.aggregate.transport.all_to_all import AllToAll
from gradwire.aggregate.transport.exchange_thread import Exchange, ExchangeThread, Pause
from gradwire.aggregate.transport.link import Link
from gradwire.aggregate.transport.message_prefix import Subject
from gradwire.catalogue.recipe import Recipe
from gradwire.catalogue.spec_by_name import recipe_of_tensor
from gradwire.errors import AggregateError, FrameError

ALL_GATHER, SCATTER_REDUCE, ALL_REDUCE = "all_gather", "scatter_reduce", "all_reduce"


class Reducer:
    """`link` joins all ranks that average; with a `host`, the link among those of one, it joins one rank of each."""

    def __init__(
        self, mean: Mean, link: Link, aggregate: str = ALL_GATHER, host: Link | None = None,
        sums: WordSums | None = None,
    ):  # fmt: skip
        self.mean, self.link, self.aggregate, self.host = mean, link, aggregate, host
        mean.rank, mean.world = link.rank, link.world
        self.wait_s = 0.0  # that the training stood still for the exchange
        self.shards = ShardMemory()
        self._all_gather, self._all_to_all = AllGather(link), AllToAll(link)
        self.summed = Summed(mean, sums or ProcessGroupSums(link), link.world)
        self._thread = ExchangeThread()
        self._staging = HostCopies()
        self._touched: set[str] = set()  # tensors that any rank sent in this step
        self._missing: set[str] = set()
        self._flushed: set[str] = set()  # tensors whose memories are on their way, whole
        self._broken: AggregateError | None = None  # why the link cannot be used any more
        self.messages = 0  # sent since the last `use`
        self._owners = owners(mean.sizes, link.world)
        self._host_owners = owners(mean.sizes, host.world) if host else {}
        self.scale: Callable[[], float] | None = None  # of the loss

    # ── in the training's thread ──

    @property
    def world(self) -> int:
        return self.link.world * (self.host.world if self.host else 1)

    def submit(self, key: Hashable, tensors: Named, missing: Collection[str] = ()) -> None:
        """Average the tensors, in place. Those that are `missing` have no gradient on this rank, and are zero."""
        if self._broken is not None:  # ranks are not in step, and Gloo ends the process when blocks of other sizes come
            raise AggregateError(f"an exchange has failed before: {self._broken}") from self._broken
        ready = self._staging.submitted(tensors)
        self._missing.update(missing)
        for i, parts in enumerate(self._messages(tensors)):
            self._thread.submit(functools.partial(self._job, (key, i), parts, ready))
            self.messages += 1

    def _messages(self, tensors: Named) -> Iterator[list[Part]]:
        """What is added up on its way travels with its like alone."""
        alike: dict[Recipe | None, list[tuple[str, torch.Tensor]]] = {}
        for name, tensor in tensors:
            recipe = recipe_of_tensor(name, tensor.numel(), self.mean.recipes)
            if tensor.numel():
                alike.setdefault(recipe if recipe.sums else None, []).append((name, tensor))
        for group in alike.values():
            yield from messages(group, self.mean.recipes)

    def finish_step(self) -> set[str]:
        """Wait for all tensors of the step. Memories are committed, or rolled back. Which tensors any rank sent."""
        start = time.perf_counter()
        self._thread.submit(self._last_job)
        try:
            self._thread.drain()
        except BaseException as error:
            self.abandon_step(error)
            raise
        self.wait_s += time.perf_counter() - start
        touched, self._touched = self._touched, set()
        return touched

    def abandon_step(self, error: BaseException | None = None) -> None:
        if error is not None:
            self.link.give_up(error)
        if isinstance(error, AggregateError):
            self._broken = self._broken or error
        self.mean.abandon_step()
        self.shards.memory.rollback()
        self._start_anew()

    def use(self, aggregate: str) -> None:
        """From the next step on; or another recipe is used, whose messages have other lengths."""
        if self.aggregate == SCATTER_REDUCE != aggregate:
            self._join(self.shards.state_dict(1.0))
            self.shards = ShardMemory()
        self.aggregate, self.messages = aggregate, 0
        self._all_gather, self._all_to_all = AllGather(self.link), AllToAll(self.link)

    def close(self) -> None:
        self._thread.close()
        self.summed.sums.close()

    # ── in the wire thread ──

    def _job(self, key: Hashable, parts: list[Part], ready: torch.cuda.Event | None) -> Exchange:
        self.follow_scale()
        parts = self._staging.staged(parts, ready)
        if self.host is not None:
            return self._hierarchical(self.host, key, parts)
        return self._among_all(key, parts)

    def _among_all(self, key: Hashable, parts: list[Part], last: bool = True) -> Exchange:
        if parts and self.mean.own_recipe(parts[0]).sums and self.aggregate != ALL_REDUCE:
            missing = self._missing if self.host is None else ()  # another rank of the host may have a gradient
            return self.summed.job(key, parts, missing, self._present, self._touch)
        ways = {ALL_GATHER: self._gather, SCATTER_REDUCE: self._scatter, ALL_REDUCE: self._reduce}
        return ways[self.aggregate](key, parts, last)

    def follow_scale(self) -> None:
        """Memories are of gradients with the loss's scale of now; exact for the powers of two that a GradScaler has."""
        scale = self.mean.scale if self.scale is None else self.scale()
        if scale != self.mean.scale:
            self.shards.rescale(scale / self.mean.scale)
            self.mean.rescale(scale)

    def _last_job(self) -> Exchange:
        """All others are done when this one goes on."""
        yield Pause(lambda: False)
        mean = self.mean
        for name, tensor in self._staging.tensors.items():
            masked = recipe_of_tensor(name, tensor.numel(), mean.recipes).mask  # had its momentum before the exchange
            if name in mean.factors and not masked and name not in self._missing - self._touched:
                tensor.copy_(mean.accelerated(name, tensor))
        self._staging.put_back()
        self.shards.end_step(mean.finite)
        finite = mean.finite
        mean.end_step()
        self.link.at_step(mean.steps)
        for name in self._flushed if finite else ():
            mean.residual.forget(name)
        self._start_anew()

    def _start_anew(self) -> None:
        self._staging.clear()
        self._missing = set()
        self._flushed = set()

    def _reduce(self, key: Hashable, parts: list[Part], last: bool) -> Exchange:
        flat = torch.cat([part.entries.reshape(-1) for part in parts]) if len(parts) > 1 else parts[0].entries
        values = flat.view(-1).split([part.size for part in parts])
        for part, own in zip(parts, values, strict=True):
            if part.name in self.mean.residual.memory:
                before, after = self.mean.residual.buffers(part.name, part.tensor)
                own.add_(part.of(before).view(-1))
                part.of(after).zero_()
                self._flushed.add(part.name)
        flat.mul_(1 / self.link.world)  # before the sum, which might be too large for fp16
        moved = flat.to(self.link.device)
        self.mean.frame_bytes += moved.nbytes
        work = self.link.all_reduce(moved)
        yield Pause(work.is_completed if last else None)
        self.link.wait(work)
        flat.copy_(moved) if moved is not flat else None
        for part, own in zip(parts, values, strict=True):
            if len(parts) > 1:
                part.entries.copy_(own.view(part.entries.shape))
            self._touch(part)
        if self._flushed:
            self.mean.finite &= bool(flat.isfinite().all())

    def _gather(self, key: Hashable, parts: list[Part], last: bool) -> Exchange:
        pieces = self.mean.divide(parts)
        subject = self._subject(pieces)
        block, length = self._encode(key, pieces)
        ticket = self._all_gather.start(key, subject, block, length)
        yield Pause((lambda: self._all_gather.ready(ticket)) if last else None)
        self._average(list(enumerate(self._all_gather.finish(ticket))), pieces)

    def _scatter(self, key: Hashable, parts: list[Part], last: bool) -> Exchange:
        owned = [self.mean.divide(shard) for shard in shards(parts, self.link.world, self._owners)]
        subject = self._subject([piece for pieces in owned for piece in pieces])
        encoded = [self._encode((key, rank), pieces) for rank, pieces in enumerate(owned)]
        exchange = self._all_to_all.start(key, subject, [b for b, _ in encoded], [n for _, n in encoded])
        yield Pause(None)
        own = [self.shards.apart(piece) for piece in owned[self.link.rank]]
        sent = self._average(list(enumerate(self._all_to_all.finish(exchange))), own)
        given = only(own, sent)
        block, length = self.mean.encode(
            (key, "sum"), given, present_tensors.pack(sent), attrgetter("entries"), self.shards.memory, "sum:"
        )
        ticket = self._all_gather.start(key, subject, block, length)
        yield Pause((lambda: self._all_gather.ready(ticket)) if last else None)
        for rank, message in enumerate(self._all_gather.finish(ticket)):
            self._average([(rank, message)], owned[rank])

    def _subject(self, pieces: Sequence[Piece]) -> Subject:
        note = present_tensors.most_bytes(sum(len(piece.parts) for piece in pieces))
        return Subject(self.mean.steps, fingerprint(pieces), note + self.mean.most_bytes(pieces))

    def _hierarchical(self, host: Link, key: Hashable, parts: list[Part]) -> Exchange:
        cuts = shards(parts, host.world, self._host_owners)
        own = cuts[host.rank]
        longest = max(sum(part.size for part in cut) for cut in cuts)
        flat = torch.zeros(host.world, longest + 1)  # the last entry of each: whether something was not finite
        for row, cut in zip(flat, cuts, strict=True):
            _lay_out(row, cut)
        summed, work = host.reduce_scatter(flat.view(-1).to(host.device))
        yield Pause(None)
        host.wait(work)
        _take(summed.cpu() / host.world, own)
        yield from self._among_all(key, own, last=False)
        row = torch.zeros(longest + 1)
        _lay_out(row, own)
        row[-1] = 0 if self.mean.finite else 1
        gathered, work = host.all_gather(row)
        yield Pause(work.is_completed)
        host.wait(work)
        for arrived, cut in zip(gathered.cpu().view(host.world, longest + 1), cuts, strict=True):
            _take(arrived, cut)
            self.mean.finite &= not arrived[-1]
        for part in parts:
            self._touch(part)

    def _touch(self, part: Part) -> None:
        """It has a mean, of which others do not say who contributed: a gradient, unless nobody had one."""
        if part.name not in self._missing or bool(part.entries.any()):
            self._touched.add(part.name)

    # ── tensors that are not there ──

    def _encode(self, key: Hashable, pieces: Sequence[Piece]) -> tuple[torch.Tensor, int]:
        """The pieces without the tensors that have no gradient."""
        present = [self._present(part) for piece in pieces for part in piece.parts]
        return self.mean.encode(key, only(pieces, present), present_tensors.pack(present))

    def _present(self, part: Part) -> bool:
        if part.name in self._missing and self.host is None:  # another rank of the host may have a gradient
            return False
        if part.name in self.mean.factors or not present_tensors.is_zero(part.entries):
            return True
        if not part.whole and part.name in self.mean.residual.memory:  # other parts of it may be there
            before, after = self.mean.residual.buffers(part.name, part.tensor)
            part.of(after).copy_(part.of(before))
        return False

    def _average(self, arrived: Sequence[tuple[int, np.ndarray]], pieces: Sequence[Piece]) -> list[bool]:
        """The pieces become the mean of the messages; which parts were in any of them."""
        parts = [part for piece in pieces for part in piece.parts]
        opened = []
        for rank, message in arrived:
            try:
                opened.append((rank, *present_tensors.unpack(message, len(parts))))
            except FrameError as error:
                raise unusable(rank, error) from error
        if all(all(present) for _, present, _ in opened):
            sent = [True] * len(parts)
            self.mean.average(pieces, [(rank, frames) for rank, _, frames in opened])
        else:
            sent = [False] * len(parts)
            for rank, present, frames in opened:
                found = self._opened(rank, frames, only(pieces, present), 1 / len(arrived))
                for i in (i for i, here in enumerate(present) if here):
                    own = parts[i].entries
                    values = next(found).view(own.shape)
                    own.add_(values) if sent[i] else own.copy_(values)  # as if all ranks had sent all parts
                    sent[i] = True
            for part, here in zip(parts, sent, strict=True):
                if not here:
                    part.entries.zero_()
        self._touched.update(part.name for part, here in zip(parts, sent, strict=True) if here)
        return sent

    def _opened(self, rank: int, frames: np.ndarray, pieces: list[Piece], weight: float) -> Iterator[torch.Tensor]:
        """What a message says of each part, weighted."""
        wide = [torch.promote_types(piece.parts[0].tensor.dtype, torch.float32) for piece in pieces]
        targets = [torch.empty(sum(piece.sizes), dtype=dtype) for piece, dtype in zip(pieces, wide, strict=True)]
        self.mean.decode(rank, frames, pieces, targets, weight, accumulate=False)
        for piece, target in zip(pieces, targets, strict=True):
            yield from target.split(piece.sizes)

    # ── what is kept ──

    def stats(self) -> dict[str, float]:
        own = {
            **self.mean.stats(),
            "wire_bytes_sent": self.link.bytes_sent + self.summed.sums.bytes_sent,
            "wire_bytes_received": self.link.bytes_received + self.summed.sums.bytes_received,
            "wait_s": self.wait_s,
        }
        if any(recipe.sums for recipe in self.mean.recipes.values()):
            own["repairs"] = self.summed.repairs
        if self.host is not None:
            own |= {"host_bytes_sent": self.host.bytes_sent, "host_bytes_received": self.host.bytes_received}
        return own

    def state_dict(self) -> dict[str, Any]:
        """Memories of this rank, so that the mean over all ranks is what has not reached the parameters yet."""
        state = self.mean.state_dict()
        if self.host is not None:  # each of its ranks remembers for its own shard, on behalf of all
            mean, own = self.mean, state["memory"]
            kept = (
                name for name, shape in mean.shapes.items() if recipe_of_tensor(name, shape.numel(), mean.recipes).decay
            )
            state["memory"] = {name: own.get(name, torch.zeros(mean.shapes[name])) * self.host.world for name in kept}
        memory, grids = self.shards.state_dict(self.mean.scale), self.summed.state_dict()
        return {**state, **({"shards": memory} if memory else {}), **({"grids": grids} if grids else {})}

    def load_state_dict(self, state: dict[str, Any], names: set[str]) -> None:
        self.mean.load_state_dict(state, names)
        self.summed.load_state_dict(state.get("grids", {}))
        self.link.at_step(self.mean.steps)
        shards_of = state.get("shards", {})
        if self.aggregate == SCATTER_REDUCE:
            self.shards.load_state_dict(shards_of)
        else:
            self._join(shards_of)
        if self.host is not None:
            self._share_on_host(self.host)

    def _join(self, shards_of: Mapping[str, torch.Tensor]) -> None:
        """The rank sends for itself what it had to send for all."""
        for name, memory in shards_of.items():
            own = self.mean.residual.memory.setdefault(name, torch.zeros(memory.shape))
            own.add_(memory, alpha=self.link.world)

    def _share_on_host(self, host: Link) -> None:
        """Each rank remembers for its own shard what the ranks of the host have left on average, and nothing else."""
        mean = self.mean
        for name, shape in mean.shapes.items():
            if not recipe_of_tensor(name, shape.numel(), mean.recipes).decay:
                continue
            on_host = mean.residual.memory.pop(name, torch.zeros(shape)).to(host.device)
            host.wait(host.all_reduce(on_host))
            own, on_host = torch.zeros(shape), on_host.cpu() / host.world
            parts = [part for message in messages([(name, own)], mean.recipes) for part in message]
            for part in shards(parts, host.world, self._host_owners)[host.rank]:
                part.of(own).copy_(part.of(on_host))
            mean.residual.memory[name] = own


def only(pieces: Sequence[Piece], present: Sequence[bool]) -> list[Piece]:
    """Without the parts that are not there."""
    if all(present):
        return list(pieces)
    flags = iter(present)
    given = []
    for piece in pieces:
        parts = [part for part, here in zip(piece.parts, flags, strict=False) if here]
        if parts:
            given.append(Piece(piece.recipe, piece.codec, parts))
    return given


def _lay_out(row: torch.Tensor, parts: list[Part]) -> None:
    at = 0
    for part in parts:
        row[at : at + part.size] = part.entries.view(-1)
        at += part.size


def _take(row: torch.Tensor, parts: list[Part]) -> None:
    at = 0
    for part in parts:
        own = part.entries
        own.copy_(row[at : at + part.size].view(own.shape))
        at += part.size
