"""All-gather of messages whose lengths differ, in one round: an all-to-all in which a rank sends everyone the same.

A true all-gather moves as many bytes, but all of its blocks are as long as the longest.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch

from gradwire.aggregate.transport.all_to_all import AllToAll, PendingMessages
from gradwire.aggregate.transport.link import Link
from gradwire.aggregate.transport.message_prefix import ByteArray, Subject


class AllGather:
    """Gathers one message of every rank on every rank.

    It promises what `AllToAll` does, and is called as that is: by one thread at a time, in the same order on all ranks.
    """

    def __init__(self, link: Link):
        self.link = link
        self._to_all = AllToAll(link)

    def start(self, key: Hashable, subject: Subject, block: torch.Tensor, length: int) -> PendingMessages:
        """Start to send block[: 16 + length] to everyone; the prefix is written into the first sixteen bytes."""
        return self._to_all.start(key, subject, [block] * self.link.world, [length] * self.link.world)

    def ready(self, pending: PendingMessages) -> bool:
        """Tell whether `finish` would neither wait nor start a collective."""
        return self._to_all.ready(pending)

    def finish(self, pending: PendingMessages) -> list[torch.Tensor]:
        """Wait for the messages of all ranks, in rank order; they are valid until the next `start` with this key."""
        return self._to_all.finish(pending)

    def finish_in_host_memory(self, pending: PendingMessages) -> list[ByteArray]:
        """Do what `finish` does, and return arrays in the host's memory."""
        return self._to_all.finish_in_host_memory(pending)
