"""What benchmarks/sparse_training.py compares: one rank of each contestant."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from models_sparse import VALIDATION, Task


class Contestant(NamedTuple):
    name: str
    front: str = ""  # what averages gradients
    spec: str = ""
    engine: str = ""  # of the aggregator; without one it is Gloo


COMPUTE, DENSE = "compute only", "plain DDP"
TOP = "homomorphic:p=0.01"
CONTESTANTS = (
    Contestant(COMPUTE),
    Contestant(DENSE, "DDP"),
    Contestant("attach topk:p=0.01", "attach", "topk:p=0.01"),
    Contestant(f"attach {TOP}", "attach", TOP),
    Contestant(f"DataParallel {TOP}", "DataParallel", TOP),
    Contestant(f"attach {TOP}, aggregator", "attach", TOP, "userspace"),
    Contestant(f"DataParallel {TOP}, aggregator", "DataParallel", TOP, "userspace"),
    Contestant(f"DataParallel {TOP}, aggregator, XDP", "DataParallel", TOP, "xdp"),
    Contestant("DataParallel homomorphic:p=all", "DataParallel", "homomorphic:p=all"),
    Contestant("DataParallel homomorphic:p=all, aggregator", "DataParallel", "homomorphic:p=all", "userspace"),
)


class Trainee:
    """One rank; `begin` is on a link without limits, as it is not what is measured."""

    def __init__(self, rank: int, who: Contestant, task: Task, aggregator: str | None):
        self.rank, self.who, self.task, self.taken = rank, who, task, 0
        self.options: dict[str, Any] = {"aggregator": aggregator} if aggregator else {}

    def begin(self) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = self.task.model()
        if self.who.front in ("DDP", "attach"):
            self.model = DistributedDataParallel(self.model)
        if self.who.front == "attach":
            self.handle = gradwire.ddp.attach(self.model, self.who.spec, **self.options)
        elif self.who.front == "DataParallel":
            self.model = gradwire.DataParallel(self.model, self.who.spec, **self.options)
        self.optimizer = torch.optim.Adagrad(self.model.parameters(), lr=self.task.lr, fused=True)

    def steps(self, count: int) -> dict[str, list[float]]:
        seconds, losses = [], []
        for _ in range(count):
            batch = self.task.batch(self.rank, self.taken)
            self.taken += 1
            dist.barrier()
            start = time.perf_counter()
            self.optimizer.zero_grad()
            loss = self.model(*batch)
            loss.backward()
            self.optimizer.step()
            seconds.append(time.perf_counter() - start)
            losses.append(float(loss.detach()))
        dist.barrier()
        return {"seconds": seconds, "losses": losses}

    def validation(self) -> float:
        """Of ten batches that nobody trained on."""
        with torch.no_grad():
            batches = [self.task.batch(VALIDATION, step) for step in range(10)]
            return sum(float(self.model(*batch)) for batch in batches) / len(batches)
