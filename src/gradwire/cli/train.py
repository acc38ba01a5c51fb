"""`gradwire train`: a small distributed training, with the bytes and the seconds it took."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from typer import Option

from ..errors import GradwireError
from ..gradients import AGGREGATIONS
from ..tasks import TASKS
from . import launch, worker
from .options import Options, resolve

DEFAULT_WORKERS = 2


def train(
    *,
    task: Annotated[str | None, Option(help=f"{', '.join(TASKS)}. Default: digits.")] = None,
    codec: Annotated[
        list[str] | None,
        Option(metavar="SPEC", help="NAME or NAME:KEY=VALUE,…, or auto; given again: one more run. Default: co3."),
    ] = None,
    workers: Annotated[int | None, Option(help=f"Processes to start. Default: {DEFAULT_WORKERS}.")] = None,
    epochs: Annotated[int | None, Option(help="Passes over the data. Default: the task's.")] = None,
    steps: Annotated[int | None, Option(help="Steps in all, instead of --epochs.")] = None,
    batch_size: Annotated[int | None, Option(help="Per worker and step. Default: the task's.")] = None,
    lr: Annotated[float | None, Option(help="The highest learning rate. Default: the task's.")] = None,
    sync_every: Annotated[
        int | None, Option(metavar="STEPS", help="Local steps between syncs. Default: the codec's own, mostly 1.")
    ] = None,
    aggregate: Annotated[
        str | None, Option(metavar="HOW", help=f"{', '.join(AGGREGATIONS)}. Default: all_gather, always the same.")
    ] = None,
    aggregator: Annotated[
        str | None, Option(metavar="HOST:PORT", help="Have it sum the gradients of --codec homomorphic.")
    ] = None,
    aggregator_fallback: Annotated[
        bool, Option("--aggregator-fallback", help="Go on without the aggregator where it does not answer.")
    ] = False,
    seed: Annotated[int | None, Option(help="Of everything random. Default: 0.")] = None,
    data_dir: Annotated[Path, Option(help="Where fashion-mnist and cifar10 are.")] = Path("data"),
    json: Annotated[Path | None, Option(metavar="FILE", help="Write all figures to this file.")] = None,
    save: Annotated[Path | None, Option(metavar="FILE", help="Write a checkpoint at the end.")] = None,
    save_every: Annotated[int | None, Option(metavar="STEPS", help="Write it every so often, too.")] = None,
    resume: Annotated[
        Path | None, Option(metavar="FILE", help="Go on from this checkpoint, with its settings.")
    ] = None,
    threads: Annotated[
        int | None, Option(help="Torch threads per worker. Default: this machine's cores, shared out.")
    ] = None,
    device: Annotated[str, Option(help="cpu or cuda; workers of a host share its GPUs.")] = "cpu",
    timeout: Annotated[float, Option(metavar="SECONDS", help="How long to wait for another worker.")] = 300.0,
) -> None:
    """Train a small model on several workers that compress the gradients they exchange.

    Starts the workers itself; under torchrun, on one host or several, it is one of the workers.

    **Examples**

    fp32 beside CO3, on the digits: `gradwire train --codec none --codec co3`

    Four workers: `gradwire train --task cifar10 --data-dir ~/data --workers 4 --json run.json`

    Ten local steps, then one sparse update: `gradwire train --codec sbc:p=0.01 --sync-every 10`

    With checkpoints: `gradwire train --task text --save run.pt --save-every 100`

    After a crash: `gradwire train --resume run.pt --save run.pt --save-every 100`

    By a `gradwire aggregator`: `gradwire train --codec homomorphic --aggregator HOST:9999`

    On each of two hosts: `torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint HOST:29400
    -m gradwire.cli train --task text`
    """
    world = os.environ.get("WORLD_SIZE") if "RANK" in os.environ else None
    if world and workers not in (None, int(world)):
        raise GradwireError(f"torchrun started {world} workers: leave out --workers {workers}")
    options = Options(
        task, codec, workers, epochs, steps, batch_size, lr, seed, data_dir, json, save, save_every, resume,
        threads, timeout, sync_every, device, aggregate, aggregator, aggregator_fallback,
    )  # fmt: skip
    settings, workers_before = resolve(options)
    if world:
        worker.run(settings)
    else:
        launch.launch(settings, workers or workers_before or DEFAULT_WORKERS)
