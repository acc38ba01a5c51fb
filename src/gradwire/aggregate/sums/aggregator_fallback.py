"""Words summed by an aggregator as long as it answers, and then over the process group, if the user chose so.

Ranks lose an aggregator at different moments: one may have the sum of an operation that another one still waits for,
but not of the next. So each keeps the words of its last operation; those that have lost the aggregator tell each other
how many operations they have done, and go on together from the first that not all have.
"""

from __future__ import annotations

import struct
import threading
import warnings
from collections import deque
from contextlib import nullcontext
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

    A rank that has its last sum may wait for the others somewhere else, in a collective of the training, while they
    wait for it to repeat that sum. So the client's thread, too, notices the loss and goes on over the link; the lock
    keeps it and the thread that calls this object apart.
    """

    def __init__(self, aggregator: InNetwork, link: Link | None):
        self.aggregator, self.link = aggregator, link
        self._lock = threading.Lock()
        self._over_link: ProcessGroupSums | None = None
        self._failure: Exception | None = None  # of the change to the link
        self._kept: deque[PendingSum] = deque()  # those under way, and the last one before
        self._started = 0  # sums that have words: the client counts no others
        self._gpu = torch.cuda.current_device() if link is not None and link.device.type == "cuda" else None
        if link is not None:
            aggregator.when_lost(self._fall_back_between_sums)

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
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if self._over_link is None:
                or_words, add_words = (copied_to(w, _CPU) if w.is_cuda else w for w in (or_words, add_words))
            pending = PendingSum(self._started, or_words, add_words)
            self._started += bool(len(or_words) or len(add_words))
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
                with self._lock:
                    if self._failure is not None:
                        raise self._failure from error
                    if self._over_link is None:
                        self._fall_back(error, self.link)
                self.aggregator.close()
            else:
                with self._lock:
                    while self._kept and self._kept[0].number < pending.number:
                        self._kept.popleft()
                return summed
        assert self._over_link is not None
        assert pending.over_link is not None
        return self._over_link.finish(pending.over_link)

    def _fall_back_between_sums(self, error: Exception) -> None:
        """Do the same in the client's thread, while this rank has no sum under way."""
        assert self.link is not None
        with self._lock, torch.cuda.device(self._gpu) if self._gpu is not None else nullcontext():
            try:
                if self._over_link is None:
                    self._fall_back(error, self.link)
            except Exception as failure:  # it is raised where the next sum is started
                self._failure = failure

    def _fall_back(self, error: Exception, link: Link) -> None:
        """Go on over the link with the first sum that not all ranks have."""
        warnings.warn(f"going on over the process group: {error}", RuntimeWarning, stacklevel=2)
        done = self.aggregator.operations
        first = min(_DONE.unpack(count)[0] for count in link.gather_short(_DONE.pack(done)))
        over_link = ProcessGroupSums(link)
        for pending in self._kept:
            if pending.number >= first:
                again = over_link.start(pending.or_words, pending.add_words)
                if pending.number < done:  # this rank had the sum; others had not
                    over_link.finish(again)
                else:
                    pending.over_link = again
        self._kept.clear()
        self._over_link = over_link

    def close(self) -> None:
        """Leave the aggregator, and close the link."""
        self.aggregator.close()
        if self.link is not None:
            self.link.close()
