"""Words summed by an aggregator as long as it answers, and then over the process group, if the user chose so.

Ranks lose an aggregator at different moments: one may have the sum of an operation that another one still waits for,
but not of the next. So each keeps the words of its last operation; those that have lost the aggregator tell each other
how many operations they have done, and go on together from the first that not all have.
"""

from __future__ import annotations

import struct
import warnings
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from gradwire.aggregate.sums.aggregator_client import InNetwork
from gradwire.aggregate.sums.word_sums import ProcessGroupSums
from gradwire.aggregate.transport.link import Link
from gradwire.errors import AggregateError

_DONE = struct.Struct("<Q")


@dataclass
class PendingSum:
    number: int
    or_words: torch.Tensor
    add_words: torch.Tensor
    under_way: Any  # of the aggregator
    over_link: Any = None  # of the process group, after the aggregator was lost


class AggregatorSums:
    """`link`: of its own, for what sums words when the aggregator is lost; None: that is an error."""

    def __init__(self, aggregator: InNetwork, link: Link | None):
        self.aggregator, self.link = aggregator, link
        self._over_link: ProcessGroupSums | None = None
        self._kept: deque[PendingSum] = deque()  # under way, and the last before
        self._started = 0

    @property
    def bytes_sent(self) -> int:
        return self.aggregator.bytes_sent + (self.link.bytes_sent if self.link else 0)

    @property
    def bytes_received(self) -> int:
        return self.aggregator.bytes_received + (self.link.bytes_received if self.link else 0)

    def start(self, or_words: torch.Tensor, add_words: torch.Tensor) -> PendingSum:
        pending = PendingSum(self._started, or_words, add_words, None)
        self._started += 1
        if self._over_link is not None:
            pending.over_link = self._over_link.start(or_words, add_words)
            return pending
        pending.under_way = self.aggregator.start(or_words, add_words)
        if self.link is not None:
            self._kept.append(pending)
        return pending

    def finish(self, pending: PendingSum) -> tuple[torch.Tensor, torch.Tensor]:
        if pending.over_link is None:
            try:
                summed = self.aggregator.finish(pending.under_way)
            except AggregateError as error:
                if self.link is None:
                    raise
                self._fall_back(error, self.link)
            else:
                while self._kept and self._kept[0].number < pending.number:
                    self._kept.popleft()
                return summed
        assert self._over_link is not None
        return self._over_link.finish(pending.over_link)

    def _fall_back(self, error: AggregateError, link: Link) -> None:
        warnings.warn(f"going on over the process group: {error}", RuntimeWarning, stacklevel=2)
        self.aggregator.close()
        done = self.aggregator.operations
        first = min(_DONE.unpack(other)[0] for other in link.gather_short(_DONE.pack(done)))
        self._over_link = ProcessGroupSums(link)
        for pending in self._kept:
            if pending.number >= first:
                again = self._over_link.start(pending.or_words, pending.add_words)
                if pending.number < done:  # it had the sum; others had not
                    self._over_link.finish(again)
                else:
                    pending.over_link = again
        self._kept.clear()

    def close(self) -> None:
        if self._over_link is None:
            self.aggregator.close()
        if self.link is not None:
            self.link.close()
