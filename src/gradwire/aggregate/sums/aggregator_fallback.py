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

import torch

from gradwire.aggregate.sums.aggregator_client import InNetwork, Operation
from gradwire.aggregate.sums.word_sums import PendingAllReduce, ProcessGroupSums, copied_to
from gradwire.aggregate.transport.link import Link
from gradwire.errors import AggregateError

_CPU = torch.device("cpu")
_DONE = struct.Struct("<Q")  # how many operations a rank has done


@dataclass
class PendingSum:
    """A sum that was started, with the words that it may have to be started with again."""

    number: int  # counts from 0
    or_words: torch.Tensor
    add_words: torch.Tensor
    at_aggregator: Operation | None = None
    over_link: PendingAllReduce | None = None  # after the aggregator was lost


class AggregatorSums:
    """Sums words at an aggregator (`word_sums.WordSums` has the contract).

    With a link, which is used for nothing else, the process group takes over when the aggregator is lost: no sum is
    lost or counted twice. Without one, the loss is an AggregateError. It never goes back to an aggregator.
    """

    def __init__(self, aggregator: InNetwork, link: Link | None):
        self.aggregator, self.link = aggregator, link
        self._over_link: ProcessGroupSums | None = None
        self._kept: deque[PendingSum] = deque()  # those under way, and the last one before
        self._started = 0

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent, to the aggregator and over the link."""
        return self.aggregator.bytes_sent + (self.link.bytes_sent if self.link else 0)

    @property
    def bytes_received(self) -> int:
        """Bytes that this rank has received, from the aggregator and over the link."""
        return self.aggregator.bytes_received + (self.link.bytes_received if self.link else 0)

    def start(self, or_words: torch.Tensor, add_words: torch.Tensor) -> PendingSum:
        """Start to OR and to add the words of all ranks; to the aggregator they go from the CPU."""
        if self._over_link is None:
            or_words, add_words = (copied_to(w, _CPU) if w.is_cuda else w for w in (or_words, add_words))
        pending = PendingSum(self._started, or_words, add_words)
        self._started += 1
        if self._over_link is not None:
            pending.over_link = self._over_link.start(or_words, add_words)
            return pending
        pending.at_aggregator = self.aggregator.start(or_words, add_words)
        if self.link is not None:
            self._kept.append(pending)
        return pending

    def finish(self, pending: PendingSum) -> tuple[torch.Tensor, torch.Tensor]:
        """Wait for the ORed and the added words, by whichever way they come."""
        if pending.over_link is None:
            assert pending.at_aggregator is not None
            try:
                summed = self.aggregator.finish(pending.at_aggregator)
            except AggregateError as error:
                if self.link is None:
                    raise
                self._fall_back(error, self.link)
            else:
                while self._kept and self._kept[0].number < pending.number:
                    self._kept.popleft()
                return summed
        assert self._over_link is not None
        assert pending.over_link is not None
        return self._over_link.finish(pending.over_link)

    def _fall_back(self, error: AggregateError, link: Link) -> None:
        """Go on over the link with the first sum that not all ranks have."""
        warnings.warn(f"going on over the process group: {error}", RuntimeWarning, stacklevel=2)
        self.aggregator.close()
        done = self.aggregator.operations
        first = min(_DONE.unpack(count)[0] for count in link.gather_short(_DONE.pack(done)))
        self._over_link = ProcessGroupSums(link)
        for pending in self._kept:
            if pending.number >= first:
                again = self._over_link.start(pending.or_words, pending.add_words)
                if pending.number < done:  # this rank had the sum; others had not
                    self._over_link.finish(again)
                else:
                    pending.over_link = again
        self._kept.clear()

    def close(self) -> None:
        """Leave the aggregator, and close the link."""
        if self._over_link is None:
            self.aggregator.close()
        if self.link is not None:
            self.link.close()
