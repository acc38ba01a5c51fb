"""All-gather of frames: for few ranks, since every rank receives the frames of all others.

1. encode: every rank makes one message of its gradients;
2. all-gather: every rank gets the messages of all ranks;
3. decode: every rank adds up all messages in rank order, and has the mean.
"""

from __future__ import annotations

from collections.abc import Hashable

from gradwire.aggregate.exchanges.unattended import UnattendedExchange
from gradwire.aggregate.messages.partial_messages import PartialMessages
from gradwire.aggregate.messages.tensor_parts import TensorPart
from gradwire.aggregate.transport.all_gather import AllGather
from gradwire.aggregate.transport.exchange_thread import Exchange, Pause
from gradwire.aggregate.transport.link import Link


class AllGatherExchange:
    """Averages tensors through an all-gather of all ranks' frames."""

    def __init__(self, messages: PartialMessages, link: Link):
        self.messages, self.transport = messages, AllGather(link)
        self._unattended: UnattendedExchange | None = None

    def use_unattended(self, exchange: UnattendedExchange) -> None:
        """Let messages go by this exchange, if it takes them; all ranks call it, or none."""
        self._unattended = exchange

    def forget_lengths(self) -> None:
        """Agree on the lengths of messages anew: another recipe is used from now on."""
        self.transport = AllGather(self.transport.link)

    def run(self, key: Hashable, parts: list[TensorPart], last: bool = True) -> Exchange:
        """Replace the parts by their means over all ranks of the link."""
        plans = self.messages.coder.plan(parts)
        subject = self.messages.subject(plans)
        if self._unattended is not None and last and self._unattended.takes(key, plans, subject):
            yield from self._unattended.run(key, plans, subject)
            return
        everything = self._unattended is not None and self._unattended.owes(key, subject)
        block, length = self.messages.encode(key, plans, self.transport.link.device, everything)
        ticket = self.transport.start(key, subject, block, length)
        yield Pause((lambda: self.transport.ready(ticket)) if last else None)
        arrived = self.transport.finish(ticket)
        if self._unattended is not None:
            self._unattended.learn(key, subject, [len(message) for message in arrived])
        self.messages.average(list(enumerate(arrived)), plans)
