"""What benchmarks/link.py and benchmarks/recipes.py compare: one rank of each contestant."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.aggregate.messages import step_ledger
from hosts import counters
from networks import NETWORKS, make_model

COMPUTE = "compute only"
# On Gloo PowerSGD may abort where DDP has several buckets, since their collectives meet in any order.
FRAGILE, IN_ONE_BUCKET = "PowerSGD rank 1", "PowerSGD rank 1, one bucket"
PLAIN_DDP, FP16_HOOK = "plain DDP", "fp16 hook"
PEERS = (PLAIN_DDP, FP16_HOOK, FRAGILE, IN_ONE_BUCKET)
CODECS = ("co3", "sbc", "auto", "auto:error=1")
FRONTS = ("attach", "DataParallel")


def names(codecs: list[str]) -> list[str]:
    """In the order of the table."""
    return [COMPUTE, *PEERS, *(f"{front} {codec}" for front in FRONTS for codec in codecs)]


def maker(name: str, interface: str, network: str = "mlp") -> Callable[[int], Contestant]:
    return lambda rank: Contestant(name, interface, network)


class Contestant:
    """One rank of it, which trains with SGD and momentum 0.9. DDP is built by `prepare`, on a link without limits, as
    its start is not what is measured; gradwire joins by `attach`, on the link that it has to work with."""

    def __init__(self, name: str, interface: str, network: str):
        self.name, self.interface = name, interface
        self.front, _, self.spec = name.partition(" ")
        self.network = make_model(network)
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=0.01, momentum=0.9)
        self.handle: Any = None
        shape = NETWORKS[network].batch
        self.x, self.y = torch.randn(shape), torch.randint(0, 10, shape[:1])
        # What gradwire counts for encoding and decoding is the processor's time here, of the thread that does both.
        step_ledger.time = SimpleNamespace(perf_counter=time.thread_time)  # type: ignore[assignment]

    def prepare(self) -> None:
        if self.name in PEERS or self.front == "attach":
            cap = 1000 if self.name == IN_ONE_BUCKET else None
            self.network = DistributedDataParallel(self.network, bucket_cap_mb=cap)
        if self.name == FP16_HOOK:
            self.network.register_comm_hook(None, fp16_compress_hook)
        elif self.name in (FRAGILE, IN_ONE_BUCKET):
            state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
            self.network.register_comm_hook(state, powerSGD_hook)
        if self.name in PEERS:
            self.steps(3)  # buckets are rebuilt, and PowerSGD begins

    def attach(self) -> None:
        if self.front == "attach":
            self.handle = gradwire.ddp.attach(self.network, self.spec, optimizer=self.optimizer)
        elif self.front == "DataParallel":
            self.network = gradwire.DataParallel(self.network, self.spec, optimizer=self.optimizer)
            self.handle = self.network.gradwire

    def skip_warm_up(self) -> None:
        """Go on at the step from which a recipe sends as few entries as it will."""
        gradients = self.handle.gradients
        warm_ups = [int(recipe.values.get("warmup", 0)) for recipe in gradients.recipes.by_pattern.values()]
        gradients.ledger.resume_at(max(warm_ups))

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
        """Seconds of each step; and of all of them the bytes that left, and the processor's seconds: in all, to encode,
        and to decode."""
        known = self._stats()
        dist.barrier()
        before, busy = counters(self.interface), time.process_time()
        seconds = []
        for _ in range(count):
            dist.barrier()
            start = time.perf_counter()
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.network(self.x), self.y).backward()
            self.optimizer.step()
            seconds.append(time.perf_counter() - start)
        dist.barrier()
        busy = time.process_time() - busy
        sent, after = counters(self.interface).since(before).bytes_sent, self._stats()
        stated, encode, decode = (
            after.get(key, 0) - known.get(key, 0) for key in ("wire_bytes_sent", "encode_s", "decode_s")
        )
        return {"seconds": seconds, "sent": sent, "stated": stated, "busy": (busy, encode, decode)}

    def _stats(self) -> dict[str, float]:
        return self.handle.stats() if self.handle else {}
