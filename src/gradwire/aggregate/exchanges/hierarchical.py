"""Hierarchical exchange: in full precision among the ranks of a host, through frames between hosts.

1. reduce-scatter in fp32 among the ranks of this host: each has the host's mean of its own shard;
2. another exchange, of that shard, among the ranks of all hosts that own the same shard;
3. all-gather in fp32 among the ranks of this host.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

from gradwire.aggregate.messages.message_coder import MessageCoder
from gradwire.aggregate.messages.step_tensors import StepTensors
from gradwire.aggregate.messages.tensor_parts import (
    TensorPart,
    lay_out,
    owners_of_small_tensors,
    shards_for_ranks,
    split_into_messages,
    take_from,
)
from gradwire.aggregate.transport.exchange_thread import Exchange, Pause
from gradwire.aggregate.transport.link import Link

Run = Callable[[Hashable, list[TensorPart], bool], Exchange]


class HierarchicalExchange:
    """Averages tensors on a host, then between hosts by another exchange, `between_hosts`."""

    def __init__(self, coder: MessageCoder, host: Link, tensors: StepTensors, between_hosts: Run):
        self.coder, self.host, self.tensors, self.between_hosts = coder, host, tensors, between_hosts
        self._owners = owners_of_small_tensors(coder.recipes.sizes, host.world)

    def run(self, key: Hashable, parts: list[TensorPart]) -> Exchange:
        """Replace the parts by their means over all ranks of all hosts."""
        host = self.host
        shards = shards_for_ranks(parts, host.world, self._owners)
        own_shard = shards[host.rank]
        longest = max(sum(part.size for part in shard) for shard in shards)
        # The last entry of each row tells whether something was not finite.
        rows = torch.zeros(host.world, longest + 1, dtype=torch.float32, device="cpu")
        for row, shard in zip(rows, shards, strict=True):
            lay_out(row, shard)
        summed, work = host.reduce_scatter(rows.view(-1).to(host.device))
        yield Pause(None, work.is_completed)
        host.wait(work)
        take_from(summed.cpu() / host.world, own_shard)

        yield from self.between_hosts(key, own_shard, False)

        row = torch.zeros(longest + 1, dtype=torch.float32, device="cpu")
        lay_out(row, own_shard)
        row[-1] = 0 if self.coder.ledger.finite else 1
        gathered, work = host.all_gather(row)
        yield Pause(work.is_completed)
        host.wait(work)
        for arrived, shard in zip(gathered.cpu().view(host.world, longest + 1), shards, strict=True):
            take_from(arrived, shard)
            self.coder.ledger.note_finite(not arrived[-1])
        for part in parts:
            self.tensors.note_mean(part)

    # ── memories: each rank of a host remembers for its own shard, on behalf of all ranks of the host ──

    def on_behalf_of_host(self, memory: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return what to save of this rank's memory, so that the mean over all ranks is what was not sent yet."""
        shapes, names = self.coder.recipes.shapes, self.coder.recipes.remembered()
        zeros = {name: torch.zeros(shapes[name], dtype=torch.float32, device="cpu") for name in names}
        return {name: memory.get(name, zero) * self.host.world for name, zero in zeros.items()}

    def share_memories(self) -> None:
        """Let each rank remember for its own shard what the ranks of the host have left on average, and no more.

        All ranks of the host call it, when each has loaded its memory from a checkpoint.
        """
        recipes, errors = self.coder.recipes, self.coder.memories.errors
        for name in recipes.remembered():
            shape = recipes.shapes[name]
            loaded = errors.memory.get(name, torch.zeros(shape, dtype=torch.float32, device="cpu"))
            on_host = loaded.to(self.host.device, copy=True)
            self.host.wait(self.host.all_reduce(on_host))
            on_host = on_host.cpu() / self.host.world
            shard_memory = torch.zeros(shape, dtype=torch.float32, device="cpu")
            messages = split_into_messages([(name, shard_memory)], recipes.by_pattern)
            parts = [part for message in messages for part in message]
            for part in shards_for_ranks(parts, self.host.world, self._owners)[self.host.rank]:
                part.of(shard_memory).copy_(part.of(on_host))
            errors.replace(name, shard_memory)
