"""Parameters as differences to a mean that all replicas share, for torchft's LocalSGD, which averages parameters.

A recipe of a few bits is made for gradients and updates: parameters would come back as coarse as it is. So what travels
is the difference to the mean of the last round that was committed, d = x − m + e, and the sum is Σ ĝ + n·m, where n
replicas have taken part. After replicas came or went there is no such mean; then x + e travels in full precision.

1. `begin` has the replicas tell each other who takes part: torchft lets a replica that heals hand over zeros.
2. The sum of the differences is exchanged like any other.
3. `_complete` makes of it the sum of the parameters, and a mean that counts when the round is committed.
"""

from __future__ import annotations

import functools

import torch

from gradwire.aggregate.messages import present_tensors
from gradwire.correct.worker_memories import WorkerMemories
from gradwire.torchft.replicas import Replicas
from gradwire.torchft.sum_under_way import SumUnderWay

EXACT = "in full:"  # in front of the names of tensors that travel in full precision


class SharedMeans:
    """The means that all replicas of a quorum share, by name.

    The training's thread calls everything; parts of a sum run in the exchange thread, until the sum is over.
    """

    def __init__(self, memories: WorkerMemories):
        self._memories = memories
        self._means: dict[str, torch.Tensor] = {}
        self._next: dict[str, torch.Tensor] = {}

    def begin(self, replicas: Replicas, name: str, tensor: torch.Tensor) -> SumUnderWay:
        """Begin to replace the tensor by its sum over all replicas."""
        values = tensor.detach().to(torch.float32)
        takes_part = not present_tensors.is_zero(values)
        mean = self._means.get(name)
        sent = torch.zeros_like(values) if not takes_part else values.clone() if mean is None else values - mean
        counts: list[int] = []

        def prepare() -> None:
            counts.append(sum(message[0] for message in replicas.link.gather_short(bytes([takes_part]))))
            if takes_part and mean is None:
                self._take_memory(name, sent)

        if sent.is_cuda:  # the exchange thread has a stream of its own
            torch.cuda.current_stream(sent.device).synchronize()
        replicas.before_next(prepare)
        complete = functools.partial(self._complete, name, tensor, sent, mean, counts)
        return replicas.add_up(name if mean is not None else EXACT + name, sent, complete)

    def _take_memory(self, name: str, sent: torch.Tensor) -> None:
        """Send the memory, too, which is empty after this round, if that counts."""
        if name in self._memories.errors.memory:
            before, after = self._memories.errors.buffers(name, sent)
            sent.add_(before)
            after.zero_()

    def _complete(
        self, name: str, tensor: torch.Tensor, added: torch.Tensor, mean: torch.Tensor | None, counts: list[int]
    ) -> None:
        [count] = counts
        if mean is not None:
            added.add_(mean, alpha=count)
        if count:
            self._next[name] = added / count
        tensor.detach().copy_(added)

    def end(self, committed: bool) -> None:
        """Share the means of this round from now on, or forget them."""
        if committed:
            self._means.update(self._next)
        self._next = {}

    def forget(self) -> None:
        """Share nothing any more, because the replicas have changed."""
        self._means, self._next = {}, {}
