"""Clipping gradients to a norm of 1: by torch's line after the backward pass, and by the recipe.

    python benchmarks/clipping.py

Two workers on this machine train a perceptron on a synthetic task, and the mean loss of the last 20 of 200 steps is
printed, with the mean norm that clip_grad_norm_ saw. docs/sparse.md has the table.
"""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

import gradwire

WORLD, STEPS, LAST = 2, 200, 20
RUNS = (
    (None, False), (None, True), ("co3", True), ("topk:p=0.01", False), ("topk:p=0.01", True),
    ("topk:p=0.01,clip_norm=1", False), ("dgc:warmup=0,p=0.01", False), ("dgc:warmup=0,p=0.01", True),
    ("dgc:warmup=0,p=0.01,clip_norm=1", False), ("stc:p=0.01", False), ("stc:p=0.01", True),
    ("stc:p=0.01,clip_norm=1", False),
)  # fmt: skip


def train(rank: int, spec: str | None, clips: bool) -> tuple[float, float]:
    """The mean loss of the last steps, and the mean norm of gradients where they are clipped."""
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.1, momentum=0.9)
    model = DistributedDataParallel(inner)
    if spec:
        gradwire.ddp.attach(model, spec, optimizer=optimizer, aggregate="all_gather")
    teacher = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    generator = torch.Generator().manual_seed(rank)
    losses, norms = [], []
    for _ in range(STEPS):
        x = torch.randn(64, 64, generator=generator)
        loss = nn.functional.cross_entropy(model(x), teacher(x).argmax(1))
        optimizer.zero_grad()
        loss.backward()
        if clips:
            norms.append(float(nn.utils.clip_grad_norm_(inner.parameters(), 1.0)))
        optimizer.step()
        losses.append(float(loss.detach()))
    mean = torch.tensor(sum(losses[-LAST:]) / LAST)
    dist.all_reduce(mean)
    return float(mean) / WORLD, sum(norms) / len(norms) if norms else 0.0


def work(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="gradients were changed")  # which is what is measured
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=WORLD)
    for spec, clips in RUNS:
        loss, norm = train(rank, spec, clips)
        if rank == 0:
            print(f"{spec or 'fp32':34s} {f'clip_grad_norm_ saw {norm:.1f}' if clips else '':24s} loss {loss:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        spawn(work, args=(str(Path(folder) / "store"),), nprocs=WORLD)
