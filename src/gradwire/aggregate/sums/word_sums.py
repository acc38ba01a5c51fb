"""Words of all ranks, ORed and added up: over a process group, or by an aggregator (`aggregator_client.py`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from gradwire.aggregate.transport.link import Link


class WordSums(Protocol):
    """All ranks call `start` with as many words, in the same order. The words given are not to be changed."""

    @property
    def bytes_sent(self) -> int: ...

    @property
    def bytes_received(self) -> int: ...

    def start(self, or_words: torch.Tensor, add_words: torch.Tensor) -> Any: ...

    def finish(self, pending: Any) -> tuple[torch.Tensor, torch.Tensor]: ...

    def close(self) -> None: ...


@dataclass
class PendingAllReduce:
    """All-reduces under way."""

    ored: torch.Tensor
    added: torch.Tensor
    works: list[dist.Work]


class ProcessGroupSums:
    """Bytes are counted by the link."""

    bytes_sent = bytes_received = 0

    def __init__(self, link: Link):
        self.link = link

    def start(self, or_words: torch.Tensor, add_words: torch.Tensor) -> PendingAllReduce:
        ored, added = or_words, add_words.to(self.link.device, copy=True)
        works = []
        if len(or_words) and self.link.can_or:
            ored = or_words.clone()
            works.append(self.link.all_reduce(ored, dist.ReduceOp.BOR))
        elif len(or_words):
            ored = self._ored(or_words)
        if len(add_words):
            works.append(self.link.all_reduce(added))
        return PendingAllReduce(ored, added, works)

    def finish(self, pending: PendingAllReduce) -> tuple[torch.Tensor, torch.Tensor]:
        for work in pending.works:
            self.link.wait(work)
        return pending.ored.cpu(), pending.added.cpu()

    def close(self) -> None:
        pass

    def _ored(self, words: torch.Tensor) -> torch.Tensor:
        """NCCL has no OR: every rank ORs its share of the words of all, and sends it to all."""
        link = self.link
        share = -(-len(words) // link.world)
        padded = torch.zeros(share * link.world, dtype=words.dtype, device=link.device)
        padded[: len(words)] = words.to(link.device)
        arrived, work = link.all_to_all(list(padded.split(share)), [share] * link.world, torch.empty_like(padded))
        link.wait(work)
        link.bytes_received += (link.world - 1) * share * words.element_size()
        own, *others = arrived.view(link.world, share)
        for other in others:
            own = own | other
        gathered, work = link.all_gather(own)
        link.wait(work)
        return gathered[: len(words)]
