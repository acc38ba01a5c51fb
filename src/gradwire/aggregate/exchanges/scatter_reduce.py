"""Scatter-reduce of frames: for many ranks, since what a rank sends and receives hardly grows with their number.

1. encode: every rank makes one message for each rank, of the shard of every tensor which that rank owns;
2. all-to-all: every owner gets the frames of its shards from all ranks;
3. the owner adds them up in rank order, and encodes the mean with an error memory of its own;
4. all-gather: every rank gets the frames of all means;
5. every rank decodes all shards, its own too, so that the result is bit-identical everywhere.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from gradwire.aggregate.exchanges.shard_owner_memory import ShardMemory
from gradwire.aggregate.messages import present_tensors
from gradwire.aggregate.messages.frame_plan import only_present
from gradwire.aggregate.messages.partial_messages import PartialMessages
from gradwire.aggregate.messages.tensor_parts import TensorPart, owners_of_small_tensors, shards_for_ranks
from gradwire.aggregate.transport.all_gather import AllGather
from gradwire.aggregate.transport.all_to_all import AllToAll
from gradwire.aggregate.transport.exchange_thread import Exchange, Pause
from gradwire.aggregate.transport.link import Link


class ScatterReduceExchange:
    """Averages tensors shard by shard: each shard has an owner, who sends the mean to all.

    `memory` holds what the means of this rank's shards have left out.
    """

    def __init__(self, messages: PartialMessages, link: Link):
        self.messages, self.link = messages, link
        self.memory = ShardMemory()
        self._to_owners, self._to_all = AllToAll(link), AllGather(link)
        self._owners = owners_of_small_tensors(messages.coder.recipes.sizes, link.world)

    def run(self, key: Hashable, parts: list[TensorPart], last: bool = True) -> Exchange:
        """Replace the parts by their means over all ranks of the link."""
        messages, coder = self.messages, self.messages.coder
        shards, plans_of_all = coder.plan_shards(parts, self._cut)
        subject = messages.subject(plans_of_all)
        encoded = [messages.encode((key, owner), plans, self.link.device) for owner, plans in enumerate(shards)]
        ticket = self._to_owners.start(key, subject, [block for block, _ in encoded], [n for _, n in encoded])
        yield Pause(None, lambda: self._to_owners.arrived(ticket))

        means = [self.memory.apart(plan) for plan in shards[self.link.rank]]
        sent = messages.average(list(enumerate(self._to_owners.finish(ticket))), means)
        block, length = coder.encode_means(
            (key, "sum"), only_present(means, sent), present_tensors.pack(sent), self.memory.errors, self.link.device
        )
        ticket = self._to_all.start(key, subject, block, length)
        yield Pause((lambda: self._to_all.ready(ticket)) if last else None)

        for owner, message in enumerate(self._to_all.finish(ticket)):
            messages.average([(owner, message)], shards[owner])

    def _cut(self, parts: Sequence[TensorPart]) -> list[list[TensorPart]]:
        return shards_for_ranks(parts, self.link.world, self._owners)

    def forget_lengths(self) -> None:
        """Agree on the lengths of messages anew: another recipe is used from now on."""
        self._to_owners, self._to_all = AllToAll(self.link), AllGather(self.link)

    def take_memory(self) -> dict[str, torch.Tensor]:
        """Give up the memory of this rank's shards: another exchange sends what it holds."""
        memory, self.memory = self.memory.state_dict(1.0), ShardMemory()
        return memory
