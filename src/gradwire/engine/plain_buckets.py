"""DDP's buckets, averaged by plain all-reduce: what a hook does in steps without compression.

torch's own `allreduce_hook` lets Gloo's thread call Python when a mean is there. That thread is not done with Python
when the backward pass is over, and if the interpreter ends just then, the process aborts
(`aggregate/peers/interpreter_exit.py`). So here the call for the last bucket waits, in the training's thread, which is
what DDP would do next.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass
class PlainBucket:
    """A bucket whose all-reduce is under way."""

    buffer: torch.Tensor
    sent: torch.Tensor  # the buffer itself, or a copy in bf16
    work: dist.Work
    mean: torch.futures.Future[torch.Tensor]  # what DDP waits for


class PlainBuckets:
    """The buckets of one backward pass whose means are under way. The training's thread calls everything."""

    def __init__(self, group: dist.ProcessGroup):
        self._group = group
        self._started: list[PlainBucket] = []

    def start(self, bucket: dist.GradBucket, halved: bool = False) -> PlainBucket:
        """Begin to average a bucket. If it is `halved`, fp32 travels as bf16, and the caller copies the sum back."""
        if bucket.index() == 0:
            self._started.clear()  # of a backward pass that failed
        buffer = bucket.buffer()
        sent = buffer.to(torch.bfloat16) if halved else buffer
        sent.div_(self._group.size())  # before the sum, which might be too large for fp16
        work = dist.all_reduce(sent, group=self._group, async_op=True)
        assert work is not None
        # On a GPU the mean may be there only when the stream is that sets the result: the future tells DDP's.
        mean: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=[buffer.device] if buffer.is_cuda else None
        )
        self._started.append(PlainBucket(buffer, sent, work, mean))
        return self._started[-1]

    def wait(self) -> None:
        """Wait until all sums are there; on a GPU its stream waits, and not the host."""
        for started in self._started:
            started.work.wait()

    def finish(self) -> None:
        """Tell DDP that all buffers are means."""
        started, self._started = self._started, []
        for each in started:
            each.mean.set_result(each.buffer)
