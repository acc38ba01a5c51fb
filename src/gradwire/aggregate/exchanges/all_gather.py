"""All-gather of frames: for few ranks, since every rank receives the frames of all others.

1. encode: every rank makes one message of its gradients;
2. all-gather: every rank gets the messages of all ranks;
3. decode: every rank adds up all messages in rank order, and has the mean.
"""

from __future__ import annotations

from collections.abc import Hashable

from gradwire.aggregate.messages.partial_messages import PartialMessages
from gradwire.aggregate.messages.tensor_parts import TensorPart
from gradwire.aggregate.transport.all_gather import AllGather
from gradwire.aggregate.transport.exchange_thread import Exchange, Pause
from gradwire.aggregate.transport.link import Link


class AllGatherExchange:
    """Averages tensors through an all-gather of all ranks' frames."""

    def __init__(self, messages: PartialMessages, link: Link):
        self.messages, self.transport = messages, AllGather(link)

    def run(self, key: Hashable, parts: list[TensorPart], last: bool = True) -> Exchange:
        """Replace the parts by their means over all ranks of the link."""
        plans = self.messages.coder.plan(parts)
        block, length = self.messages.encode(key, plans, self.transport.link.device)
        ticket = self.transport.start(key, self.messages.subject(plans), block, length)
        yield Pause((lambda: self.transport.ready(ticket)) if last else None)
        self.messages.average(list(enumerate(self.transport.finish(ticket))), plans)
