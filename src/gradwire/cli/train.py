"""`gradwire train`: a small distributed training, with the bytes and the seconds it took."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from typer import Option

from gradwire.cli import federated as federated_runs
from gradwire.cli import launch_workers, worker
from gradwire.cli.federated import FederatedOptions
from gradwire.cli.options import TIMEOUT, TrainOptions, resolve
from gradwire.engine.options import AGGREGATIONS
from gradwire.errors import GradwireError
from gradwire.tasks import TASKS

DEFAULT_WORKERS = 2
FEDERATED = "Federated learning, on Flower's simulation engine"


def train(
    *,
    task: Annotated[str | None, Option(help=f"{', '.join(TASKS)}. Default: digits.")] = None,
    codec: Annotated[
        list[str] | None,
        Option(metavar="SPEC", help="NAME or NAME:KEY=VALUE,…, or auto; given again: one more run. Default: co3."),
    ] = None,
    backward: Annotated[
        list[str] | None,
        Option(
            metavar="SPEC",
            help="Make weight gradients of linear layers from some rows of the batch: topk, weightedk or randk, with "
            "k= (a share or a number of rows), decay= (of the memory) and centre= (yes or no). Given "
            "again: one more run of each codec. "
            "Default: none.",
        ),
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
    timeout: Annotated[
        float | None, Option(metavar="SECONDS", help=f"How long to wait for another worker. Default: {TIMEOUT:.0f}.")
    ] = None,
    federated: Annotated[
        bool, Option("--federated", help="Clients and a server in place of workers.", rich_help_panel=FEDERATED)
    ] = False,
    clients: Annotated[
        int | None, Option(help=f"Default: {federated_runs.CLIENTS}.", rich_help_panel=FEDERATED)
    ] = None,
    per_round: Annotated[
        int | None,
        Option(
            metavar="CLIENTS",
            rich_help_panel=FEDERATED,
            help=f"That train in a round. Default: all, but at most {federated_runs.MOST_PER_ROUND}.",
        ),
    ] = None,
    alpha: Annotated[
        float | None,
        Option(
            rich_help_panel=FEDERATED,
            help="Classes are dealt out by a Dirichlet distribution: 0.1 is much skew, 1 little. Default: none.",
        ),
    ] = None,
    rounds: Annotated[int | None, Option(help=f"Default: {federated_runs.ROUNDS}.", rich_help_panel=FEDERATED)] = None,
    local_epochs: Annotated[
        int | None,
        Option(
            metavar="EPOCHS",
            rich_help_panel=FEDERATED,
            help=f"Of a client in a round. Default: {federated_runs.LOCAL_EPOCHS}.",
        ),
    ] = None,
    download: Annotated[
        str | None,
        Option(metavar="SPEC", rich_help_panel=FEDERATED, help="Compress what the server sends, too. Default: no."),
    ] = None,
    budget: Annotated[
        str | None,
        Option(
            metavar="BYTES",
            rich_help_panel=FEDERATED,
            help="Of a client's upload in a round, such as 200kB: the codec's parameters are chosen to fit.",
        ),
    ] = None,
    rate: Annotated[
        str | None,
        Option(
            metavar="SCHEDULE",
            rich_help_panel=FEDERATED,
            help="The server chooses the clients' levels in each round, in place of --codec: adaquantfl or feddq.",
        ),
    ] = None,
) -> None:
    """Train a small model on several workers that compress the gradients they exchange.

    Starts the workers itself; under torchrun, on one host or several, it is one of the workers. With --federated,
    clients that hold different data send compressed updates to a server.

    **Examples**

    fp32 beside CO3, on the digits: `gradwire train --codec none --codec co3`

    Four workers: `gradwire train --task cifar10 --data-dir ~/data --workers 4 --json run.json`

    Ten local steps, then one sparse update: `gradwire train --codec sbc:p=0.01 --sync-every 10`

    A cheaper backward pass beside the exact one: `gradwire train --backward none --backward topk:k=0.25,decay=0.9`

    With checkpoints: `gradwire train --task text --save run.pt --save-every 100`

    After a crash: `gradwire train --resume run.pt --save run.pt --save-every 100`

    By a `gradwire aggregator`: `gradwire train --codec homomorphic --aggregator HOST:9999`

    On each of two hosts: `torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint HOST:29400
    -m gradwire.cli train --task text`

    Federated: `gradwire train --federated --clients 100 --per-round 10 --alpha 0.3 --codec none --codec co3`

    Both ways sparse: `gradwire train --federated --codec stc --download stc`

    At most so many bytes from a client in a round: `gradwire train --federated --budget 20kB`
    """
    world = os.environ.get("WORLD_SIZE") if "RANK" in os.environ else None
    if world and workers not in (None, int(world)):
        raise GradwireError(f"torchrun started {world} workers: leave out --workers {workers}")
    options = TrainOptions(
        task, codec, workers, epochs, steps, batch_size, lr, seed, data_dir, json, save, save_every, resume,
        threads, timeout, sync_every, device, aggregate, aggregator, aggregator_fallback, backward,
    )  # fmt: skip
    federation = FederatedOptions(clients, per_round, alpha, rounds, local_epochs, download, budget, rate)
    if federated:
        if world:
            raise GradwireError("--federated starts its clients itself: run it without torchrun")
        return federated_runs.train(options, federation)
    federation.check_unused()
    settings, workers_before = resolve(options)
    if world:
        worker.run(settings)
    else:
        launch_workers.launch(settings, workers or workers_before or DEFAULT_WORKERS)
