"""All-gather of messages whose lengths differ, in one round: an all-to-all in which a rank has the same for everyone.

A true all-gather moves as many bytes, but its blocks are all as long as the longest.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import torch

from gradwire.aggregate.transport.all_to_all import AllToAll, PendingMessages
from gradwire.aggregate.transport.link import Link
from gradwire.aggregate.transport.message_prefix import Subject


class AllGather:
    def __init__(self, link: Link):
        self.link = link
        self._to_all = AllToAll(link)

    def start(self, key: Hashable, subject: Subject, block: torch.Tensor, length: int) -> PendingMessages:
        """Send block[:16+length], whose first sixteen bytes are left for us."""
        return self._to_all.start(key, subject, [block] * self.link.world, [length] * self.link.world)

    def ready(self, pending: PendingMessages) -> bool:
        return self._to_all.ready(pending)

    def finish(self, pending: PendingMessages) -> list[np.ndarray]:
        """The messages of all ranks, in rank order; valid until the next `start` with the same key."""
        return self._to_all.finish(pending)
