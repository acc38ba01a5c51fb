"""What benchmarks/link.py compares: one rank of each contestant."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import gradwire
from hosts import counters

COMPUTE = "compute only"
# On Gloo PowerSGD may abort where DDP has several buckets, since their collectives meet in any order.
FRAGILE, IN_ONE_BUCKET = "PowerSGD rank 1", "PowerSGD rank 1, one bucket"
PEERS = ("plain DDP", "fp16 hook", FRAGILE, IN_ONE_BUCKET)
# sbc here is SBC(1): 0.1% in every step, no warm-up; the optimizer has no momentum that could be masked.
SPECS = {"co3": "co3", "sbc": "sbc:p=0.001,mask=off,small=co3", "auto": "auto", "auto:error=1": "auto:error=1"}
FRONTS = ("attach", "DataParallel")


def names(codecs: list[str]) -> list[str]:
    """In the order of the table."""
    return [COMPUTE, *PEERS, *(f"{front} {codec}" for front in FRONTS for codec in codecs)]


def make_model() -> nn.Module:
    """10.5 M parameters."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(3072, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)
    )  # fmt: skip


def maker(name: str, interface: str) -> Callable[[int], Contestant]:
    return lambda rank: Contestant(name, interface)


class Contestant:
    """One rank of it. DDP is built by `prepare`, on a link without limits, as its start is not what is measured;
    gradwire joins by `attach`, on the link that it has to work with."""

    def __init__(self, name: str, interface: str):
        self.name, self.interface = name, interface
        self.front, _, codec = name.partition(" ")
        self.spec = SPECS.get(codec, codec)
        self.network: nn.Module = make_model()
        self.handle: Any = None
        self.x, self.y = torch.randn(16, 3072), torch.randint(0, 10, (16,))

    def prepare(self) -> None:
        if self.name in PEERS or self.front == "attach":
            cap = 1000 if self.name == IN_ONE_BUCKET else None
            self.network = DistributedDataParallel(self.network, bucket_cap_mb=cap)
        if self.name == "fp16 hook":
            self.network.register_comm_hook(None, fp16_compress_hook)
        elif self.name in (FRAGILE, IN_ONE_BUCKET):
            state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
            self.network.register_comm_hook(state, powerSGD_hook)
        if self.name in PEERS:
            self._optimizer()
            self.steps(3)  # buckets are rebuilt, and PowerSGD begins

    def attach(self) -> None:
        if self.front == "attach":
            self.handle = gradwire.ddp.attach(self.network, self.spec)
        elif self.front == "DataParallel":
            self.network = gradwire.DataParallel(make_model(), self.spec)
            self.handle = self.network.gradwire
        self._optimizer()

    def _optimizer(self) -> None:
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=0.01)

    def settled(self) -> bool:
        """Whether `auto` has ended its search."""
        return bool(self.handle.gradients.tuner.auto.settled)

    def choice(self) -> str:
        """The recipe that `auto` has settled on, and how frames meet where there is a choice."""
        if self.handle is None:
            return ""
        recipe = self.handle.recipe if "auto" in self.name else ""
        aggregate = self.handle.aggregate if dist.get_world_size() > 2 else ""
        return ", ".join(part for part in (recipe, aggregate) if part)

    def steps(self, count: int) -> dict[str, Any]:
        """Seconds of each step, and the bytes that left during all of them."""
        known = self.handle.stats()["wire_bytes_sent"] if self.handle else 0
        dist.barrier()
        before = counters(self.interface)
        seconds = []
        for _ in range(count):
            dist.barrier()
            start = time.perf_counter()
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.network(self.x), self.y).backward()
            self.optimizer.step()
            seconds.append(time.perf_counter() - start)
        dist.barrier()
        sent = counters(self.interface).since(before).bytes_sent
        stated = self.handle.stats()["wire_bytes_sent"] - known if self.handle else 0
        return {"seconds": seconds, "sent": sent, "stated": stated}
