"""Attach, train, detach, many times over in one process: memory, threads and files must not grow."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import re
import warnings
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from soaking import plans
from soaking.episode import Episode
from soaking.processes import end_all, start
from soaking.training import Trainer, Training

MEASURED = (50, 80, 110)  # cycles; until then the allocator still finds its size
GROWTH = 1.5  # MB that may come and go, torch itself keeps some 10 kB a cycle; what leaks, leaks between each two


def run(episode: Episode) -> None:
    training = plans.training(episode.chance)
    episode.about = f"{MEASURED[-1]} times attach and detach: {training}"
    children = [
        start(partial(_rank, training, rank, episode.folder), episode.folder / f"{rank}.output")
        for rank in range(training.world)
    ]
    late = end_all(children, 300)
    episode.tally["hangs"] += len(late)
    for rank, child in enumerate(children):
        path = episode.folder / f"{rank}.json"
        if child.code != 0 or not path.exists():
            episode.wrong(f"rank {rank} ended with {child.code}: {child.said()}")
            continue
        first, middle, last = json.loads(path.read_text())
        episode.tally["attached and detached"] += MEASURED[-1]
        for what, may_grow in (("threads", 0), ("files", 0), ("memory", GROWTH)):
            if min(middle[what] - first[what], last[what] - middle[what]) > may_grow:
                sizes = [f"{size[what]:g}" for size in (first, middle, last)]
                episode.leak(f"{what} after {MEASURED} cycles: {', '.join(sizes)}")


def _rank(training: Training, rank: int, folder: Path) -> int:
    warnings.simplefilter("ignore")
    torch.set_num_threads(training.threads)
    store, timeout = f"file://{folder / 'store'}", timedelta(seconds=60)
    dist.init_process_group("gloo", store, rank=rank, world_size=training.world, timeout=timeout)
    measured = []
    for cycle in range(MEASURED[-1]):
        trainer = Trainer(training, rank, 60.0)
        trainer.begin()
        for _ in range(2):
            trainer.train_step()
        trainer.end()
        if hasattr(trainer.handle, "detach"):
            trainer.handle.detach()
        del trainer
        if cycle + 1 in MEASURED:
            dist.barrier()
            measured.append(_size_of_process())
    part = folder / f"{rank}.part"
    part.write_text(json.dumps(measured))
    part.rename(folder / f"{rank}.json")
    dist.destroy_process_group()
    return 0


def _size_of_process() -> dict[str, float]:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    # Of its memory what is in no file: programs' own pages come with their first use.
    (anonymous,) = re.findall(r"^Anonymous: +(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
    return {
        "memory": int(anonymous) / 1e3,
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
    }
