"""What sums the words of all ranks: a process group here, an aggregator in `aggregator_fallback.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from gradwire.aggregate.transport.link import Link


class WordSums(Protocol):
    """ORs and adds the int32 words of all ranks, which may be on any device.

    All ranks call `start` with as many words, in the same order, and then `finish` in the order of their starts, from
    one thread. `finish` returns the same words on all ranks. The words that were given are never changed, and the
    caller must not change them until the next sum is finished.
    """

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent, besides those that the training's link counts."""
        ...

    @property
    def bytes_received(self) -> int:
        """Bytes that this rank has received, besides those that the training's link counts."""
        ...

    def start(self, or_words: torch.Tensor, add_words: torch.Tensor) -> Any:
        """Start a sum, and return what `finish` takes."""
        ...

    def finish(self, pending: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Wait for a sum, and return its ORed and its added words, on the device that they travelled from."""
        ...

    def close(self) -> None:
        """Give back connections; nothing else may be called after this."""
        ...


@dataclass
class PendingAllReduce:
    """The all-reduces of one sum, under way."""

    ored: torch.Tensor
    added: torch.Tensor
    works: list[dist.Work]


class ProcessGroupSums:
    """Sums words by all-reduces of a process group. Bytes are counted by the link."""

    bytes_sent = bytes_received = 0

    def __init__(self, link: Link):
        self.link = link

    def start(self, or_words: torch.Tensor, add_words: torch.Tensor) -> PendingAllReduce:
        """Start to OR and to add the words of all ranks."""
        ored, added = or_words, copied_to(add_words, self.link.device)
        works = []
        if len(or_words) and self.link.can_or:
            ored = copied_to(or_words, self.link.device)
            works.append(self.link.all_reduce(ored, dist.ReduceOp.BOR))
        elif len(or_words):
            ored = self._ored_by_shares(or_words)
        if len(add_words):
            works.append(self.link.all_reduce(added))
        return PendingAllReduce(ored, added, works)

    def finish(self, pending: PendingAllReduce) -> tuple[torch.Tensor, torch.Tensor]:
        """Wait for the ORed and the added words, which are on the link's device."""
        for work in pending.works:
            self.link.wait(work)
        return pending.ored, pending.added

    def close(self) -> None:
        """Do nothing: the link is closed by its owner."""

    def _ored_by_shares(self, words: torch.Tensor) -> torch.Tensor:
        """OR without a collective for it, which NCCL lacks: every rank ORs a share of all ranks' words, and gathers."""
        link = self.link
        share = -(-len(words) // link.world)
        padded = torch.zeros(share * link.world, dtype=words.dtype, device=link.device)
        padded[: len(words)] = words.to(link.device)
        arrived, work = link.all_to_all(
            list(torch.split(padded, share)), [share] * link.world, torch.empty_like(padded)
        )
        link.wait(work)
        link.count_received((link.world - 1) * share * words.element_size())
        ored, *others = arrived.view(link.world, share)
        for other in others:
            ored = ored | other
        gathered, work = link.all_gather(ored)
        link.wait(work)
        return gathered[: len(words)]


def copied_to(words: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy of words on a device; from a GPU to the CPU in pinned memory, which torch keeps for later."""
    if words.is_cuda and device.type == "cpu":
        return torch.empty(words.shape, dtype=words.dtype, device="cpu", pin_memory=True).copy_(words)
    return words.to(device, copy=True)
