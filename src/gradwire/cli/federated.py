"""`gradwire train --federated`: it turns options into settings, runs each codec once, and prints the results."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import torch

from gradwire import tasks
from gradwire._version import __version__
from gradwire.catalogue.parse_recipe import recipe
from gradwire.cli import federated_report, flower_simulation
from gradwire.cli.federated_progress import Rounds
from gradwire.cli.launch_workers import cores
from gradwire.cli.options import TrainOptions, check_values, writable
from gradwire.cli.report import write_json
from gradwire.errors import GradwireError
from gradwire.tasks.client_partition import check_skew
from gradwire.tasks.federated.settings import FederatedSettings
from gradwire.tasks.training import own_device

CLIENTS, MOST_PER_ROUND, ROUNDS, LOCAL_EPOCHS = 10, 10, 20, 1
# Options of trainings without a server, and what to give instead.
WORKER_OPTIONS = {
    "workers": "give --clients and --per-round",
    "epochs": "give --rounds and --local-epochs",
    "steps": "give --rounds and --local-epochs",
    "sync_every": "give --local-epochs",
    "aggregate": "the server adds up: leave it out",
    "aggregator": "the server adds up: leave it out",
    "aggregator_fallback": "the server adds up: leave it out",
    "backward": "rows that were not chosen are remembered by workers that stay: leave it out",
    "save": "federated runs have no checkpoints: leave it out",
    "save_every": "federated runs have no checkpoints: leave it out",
    "resume": "federated runs have no checkpoints: leave it out",
    "timeout": "a round waits for all of its clients: leave it out",
}


@dataclasses.dataclass
class FederatedOptions:
    """The options of `--federated` as the user gave them; None for those that the user left out."""

    clients: int | None
    per_round: int | None
    alpha: float | None
    rounds: int | None
    local_epochs: int | None
    download: str | None
    budget: str | None
    rate: str | None

    def check_unused(self) -> None:
        """Raise a GradwireError if any of them is given, for a training without `--federated`."""
        for name, value in dataclasses.asdict(self).items():
            if value is not None:
                raise GradwireError(f"{_option(name)} is for federated runs: add --federated, or leave it out")


def train(options: TrainOptions, federated: FederatedOptions) -> None:
    """Run each codec once on Flower's simulation engine, print the results, and write them to `--json` if given."""
    flower_simulation.check_installed()
    check_skew(tasks.find(options.task or "digits"), math.inf if federated.alpha is None else federated.alpha)
    flower_simulation.prepare()
    settings, codecs = resolve(options, federated)
    json = writable(options.json, "--json")
    from gradwire.tasks.federated.run import FederatedRun

    try:
        with Rounds(settings.rounds) as rounds:
            runs = [FederatedRun(settings, codec, *rounds.callbacks(settings.rate or codec)) for codec in codecs]
            flower_simulation.simulate(runs)
    except (KeyboardInterrupt, SystemExit) as interrupt:
        flower_simulation.leave(interrupt)
    summary = {"gradwire": __version__, "torch": torch.__version__, "federated": True, **settings.shared()}
    summary |= {"codecs": codecs, "runs": [run.figures() for run in runs]}
    federated_report.show(summary)
    if json:
        write_json(Path(json), summary)


def resolve(options: TrainOptions, federated: FederatedOptions) -> tuple[FederatedSettings, list[str]]:
    """Return the settings and the codecs. Raises a GradwireError for whatever is wrong with the options."""
    from gradwire.flower.shared import adaptive_rate

    for name, fix in WORKER_OPTIONS.items():
        if getattr(options, name):
            raise GradwireError(f"{_option(name)} does not go with --federated: {fix}")
    check_values(options)
    for name in ("clients", "per_round", "rounds", "local_epochs"):
        value = getattr(federated, name)
        if value is not None and value < 1:
            raise GradwireError(f"{_option(name)} must be at least 1, not {value}")
    task = tasks.find(options.task or "digits")
    clients = federated.clients or CLIENTS
    per_round = federated.per_round or min(clients, MOST_PER_ROUND)
    if per_round > clients:
        raise GradwireError(f"--per-round {per_round} is more than there are: give --clients {per_round} or more")
    if federated.rate:
        adaptive_rate.parse(federated.rate)
        if options.codecs:
            raise GradwireError(
                "--codec does not go with --rate, by which the server chooses the recipe: leave one out"
            )
    own_device(options.device)
    settings = FederatedSettings(
        task=task.name,
        clients=clients,
        per_round=per_round,
        rounds=federated.rounds or ROUNDS,
        local_epochs=federated.local_epochs or LOCAL_EPOCHS,
        batch_size=options.batch_size or task.defaults.batch_size,
        lr=options.lr or task.defaults.lr,
        seed=options.seed or 0,
        alpha=math.inf if federated.alpha is None else federated.alpha,
        data_dir=str(options.data_dir.absolute()),  # clients run in another folder
        device=options.device,
        threads=options.threads,
        download=str(_recipe(federated.download, "--download")) if federated.download else None,
        budget=_budget(federated.budget) if federated.budget else None,
        rate=federated.rate,
    )
    threads = options.threads or max(1, cores() // flower_simulation.actors(settings))
    codecs = options.codecs or ["co3"]
    for codec in codecs:
        _recipe(codec, "--codec")
    return dataclasses.replace(settings, threads=threads), codecs


def _recipe(spec: str, option: str) -> str:
    if spec.partition(":")[0] == "auto":
        raise GradwireError(f"{option} auto goes by the clock of an exchange between workers: name a recipe")
    recipe(spec)
    return spec


def _budget(text: str) -> int:
    from gradwire.flower.client.byte_budget import parse_bytes

    if not (count := parse_bytes(text)):
        raise GradwireError("--budget must be above 0: leave it out for none")
    return count


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
