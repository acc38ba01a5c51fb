"""A rank whose parameters part from the others' in a run of `gradwire train`: an error that names it."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from gradwire import AggregateError, tasks
from gradwire.tasks.training import Training
from support.rank_pool import WORLD, RankPool, connect
from support.train_runs import settings


def stray(rank: int, folder: Path) -> list[str]:
    """One bit of one parameter of rank 1 changes on its own."""
    connect(rank, folder, "stray")

    def spoil(training: Training, loss: float) -> None:
        if training.rank == 1 and training.step == 3:
            with torch.no_grad():
                next(training.model.parameters()).view(-1).view(torch.int32)[5] ^= 1

    training = Training(tasks.find("digits")(Path()), settings(4), "co3")
    try:
        training.run(spoil)
        return []
    except AggregateError as error:
        return [str(error)]
    finally:
        dist.destroy_process_group()


def test_a_stray_replica_is_an_error(ranks: RankPool) -> None:
    told = ["replicas differ: rank 1 has other parameters than rank 0"]
    assert ranks.run(stray, seconds=60) == [told] * WORLD
