"""Whether all ranks still have the same model, bit for bit, after every step of a training.

A part of it is a test (test_replicas.py), all of it a program (nightly_replicas.py).
"""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from support.rank_pool import connect
from support.ranks import SMALL_BUCKETS, Net, digest, loss_of

AGGREGATIONS = ("all_gather", "scatter_reduce")


def recipes_for_a_hook() -> list[str]:
    """All but those that need LocalSGD."""
    return [entry.name for entry in gradwire.recipes() if not gradwire.recipe(entry.name).delayed]


@dataclass(frozen=True)
class Training:
    recipe: str
    aggregation: str
    steps: int
    spoiled_at: int = -1  # in this step rank 1 changes its own model: to see that it would be noticed

    def __str__(self) -> str:
        return f"{self.recipe}, {self.aggregation}"


def train(training: Training, rank: int) -> list[str]:
    """Digests of the model after each step; the last may say instead that it is no longer finite."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(), bucket_cap_mb=SMALL_BUCKETS)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    if gradwire.recipe(training.recipe).in_adam_units:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    gradwire.ddp.attach(model, training.recipe, optimizer=optimizer, aggregate=training.aggregation)
    digests = []
    for step in range(training.steps):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
        if step == training.spoiled_at and rank == 1:
            with torch.no_grad():
                model.module.last.bias[0] += 1e-6
        digests.append(digest({name: p.detach() for name, p in model.module.named_parameters()}))
    return digests if finite(model) else [*digests[:-1], "not finite"]


def finite(model: nn.Module) -> bool:
    return all(bool(p.isfinite().all()) for p in model.parameters())


def work(
    trainings: Sequence[Training], world: int, shown: Callable[[int, int, str], None] | None, rank: int, folder: Path
) -> dict[Training, list[str]]:
    """All trainings, each in a process group of its own, so that one that fails does not spoil the next."""
    results = {}
    for i, training in enumerate(trainings):
        if shown and rank == 0:
            shown(i, world, str(training))
        connect(rank, folder, f"{i}", seconds=60, world=world)
        try:
            results[training] = train(training, rank)
        except Exception:
            results[training] = [traceback.format_exc()]
        gc.collect()  # DDP models keep the group
        dist.destroy_process_group()
    return results


def verdict(training: Training, results: Sequence[dict[Training, list[str]]]) -> str:
    """ "equal", or what is wrong."""
    found = [result[training] for result in results]
    failed = [(rank, digests[0]) for rank, digests in enumerate(found) if digests[0].startswith("Traceback")]
    if failed:
        rank, text = failed[0]
        return f"rank {rank} failed: {text.strip().splitlines()[-1]}"
    for step, digests in enumerate(zip(*found, strict=True)):
        if len(set(digests)) > 1:
            return f"parted in step {step}"
    if "not finite" in found[0]:
        return "not finite"
    return "equal" if len(set(found[0])) == training.steps else "did not train in every step"


def progress_line(done: int, total: int, text: str) -> None:
    if sys.stderr.isatty():
        bar = "█" * (30 * done // total)
        print(f"\r\033[K{bar:░<30s} {done}/{total} {text}", end="", file=sys.stderr, flush=True)
    else:
        print(f"{done}/{total} {text}", file=sys.stderr, flush=True)
