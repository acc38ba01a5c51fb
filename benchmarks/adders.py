"""What benchmarks/aggregation.py compares: one rank of each way to add up sparse gradients.

Each takes a dense fp32 tensor that is zero nearly everywhere, and leaves the mean of all ranks' in its place.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import gradwire
from supports import Gradients

Mean = Callable[[torch.Tensor], None]
DENSE, TORCH_SPARSE, RAW = "dense all-reduce", "torch sparse all-reduce", "sparse all-gather"
FRAMES = "sparse all-gather, coded"  # gradwire's topk
SUMS = "homomorphic over Gloo"
AGGREGATED = {"userspace": "homomorphic over the aggregator", "xdp": "homomorphic over the aggregator, XDP"}
NAMES = (DENSE, TORCH_SPARSE, RAW, FRAMES, SUMS, *AGGREGATED.values())


def payload(name: str, entries: int, share: float, workers: int) -> float | None:
    """Bytes that a rank has to send where they are plain arithmetic; the others' depend on a code."""
    kept = share * entries
    bytes_of = {
        DENSE: 2 * (workers - 1) / workers * 4 * entries,
        TORCH_SPARSE: (workers - 1) * kept * (8 + 4),
        RAW: (workers - 1) * kept * (4 + 4),
    }
    return bytes_of.get(name)


class Adder:
    """One rank of one contestant, on all cases in turn."""

    def __init__(self, rank: int, name: str, cases: list[Gradients], aggregator: str | None):
        self.rank, self.name, self.cases, self.aggregator = rank, name, cases, aggregator
        self.mean: Mean | None = None

    def begin(self, case: int, share: float) -> None:
        """Buffers and connections are there before anything is measured."""
        self.gradients = self.cases[case]
        self.work = torch.empty_like(self.gradients.mean)
        self.mean = self._make(share)

    def _make(self, share: float) -> Mean:
        if self.name in PLAIN:
            return PLAIN[self.name]
        size = self.work.numel()
        if self.name == FRAMES:
            return through(size, f"topk:p={share},values=fp32", aggregate="all_gather")
        return through(size, "homomorphic:p=all", **({"aggregator": self.aggregator} if self.aggregator else {}))

    def add(self, times: int) -> dict[str, Any]:
        """Seconds of each, by the clock and of the processor, and how many entries were not what they should be."""
        assert self.mean is not None
        seconds, busy, wrong = [], [], 0
        for _ in range(times):
            self.work.copy_(self.gradients.of_worker[self.rank])
            dist.barrier()
            start, used = time.perf_counter(), time.process_time()
            self.mean(self.work)
            seconds.append(time.perf_counter() - start)
            busy.append(time.process_time() - used)
            wrong += int((self.work != self.gradients.mean).sum())
        dist.barrier()
        return {"seconds": seconds, "busy": busy, "wrong": wrong}


def through(size: int, spec: str, **options: Any) -> Mean:
    """The exchange that gradwire.DataParallel and gradwire.ddp.attach share, without a backward pass around it."""
    holder = nn.Module()
    holder.gradient = nn.Parameter(torch.zeros(size))
    gradients = gradwire.DataParallel(holder, spec, **options).gradwire.gradients

    def mean(tensor: torch.Tensor) -> None:
        gradients.submit("all", [("gradient", tensor)])
        gradients.finish_step()

    return mean


def dense(tensor: torch.Tensor) -> None:
    dist.all_reduce(tensor)
    tensor /= dist.get_world_size()


def torch_sparse(tensor: torch.Tensor) -> None:
    """PyTorch's all-reduce of COO tensors: int64 positions, fp32 values, gathered and added up."""
    sparse = tensor.to_sparse()
    dist.all_reduce(sparse)
    tensor.copy_(sparse.to_dense()).div_(dist.get_world_size())


def raw(tensor: torch.Tensor) -> None:
    """int32 positions and fp32 values in one message, padded to that of the rank with the most entries."""
    positions = tensor.nonzero().view(-1)
    world = dist.get_world_size()
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
    dist.all_gather(counts, torch.tensor([len(positions)]))
    most = int(max(counts))
    own = torch.zeros(2, most, dtype=torch.int32)
    own[0, : len(positions)] = positions
    own[1, : len(positions)] = tensor[positions].view(torch.int32)
    blocks = [torch.empty_like(own) for _ in range(world)]
    dist.all_gather(blocks, own)
    tensor.zero_()
    for block, count in zip(blocks, counts, strict=True):
        tensor.index_add_(0, block[0, : int(count)], block[1, : int(count)].view(torch.float32))
    tensor /= world


PLAIN: dict[str, Mean] = {DENSE: dense, TORCH_SPARSE: torch_sparse, RAW: raw}
