"""Federated learning on Flower: accuracy against real upload and download bytes.

python benchmarks/federated.py --settings fashion-10-iid fashion-100-skew --fashion-mnist FOLDER
python benchmarks/federated.py --settings cifar10-100-iid --cifar10 FOLDER --device cuda --parallel 8

Whole trainings by the apps of `gradwire train --federated`, with Flower's messages and strategy in one process
(gradwire.flower.one_process), one process for each run. Bytes are the lengths of Flower's messages as they travel.
Every run writes a JSON file to --out when it ends; what is there already is not run again. See
benchmarks/federated_report.py for tables and plots, benchmarks/federated_runs.py for the settings.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from federated_runs import CHOICE, CONTESTANTS, SETTINGS, contestant, file_name
from machine import processor

RESULTS = Path(__file__).parent / "results" / "federated"
EVERY = 5.0  # seconds between two lines of progress


def one(options: argparse.Namespace, setting: str, name: str) -> None:
    """One training, in this process."""
    import torch

    from gradwire.flower import one_process
    from gradwire.tasks.federated.apps import apps
    from gradwire.tasks.federated.run import FederatedRun
    from gradwire.tasks.federated.settings import FederatedSettings

    torch.set_num_threads(1)
    logging.getLogger("flwr").setLevel(logging.WARNING)
    values = {"alpha": math.inf, **SETTINGS[setting]} | ({"rounds": options.rounds} if options.rounds else {})
    chosen = contestant(name, values["rounds"])
    settings = FederatedSettings(
        **values, seed=options.seed, data_dir=str(data_folder(options, setting)), device=options.device, threads=1,
        download=chosen.download, rate=chosen.rate,
    )  # fmt: skip
    started, told = time.perf_counter(), 0.0

    def on_round(figures: dict[str, float]) -> None:
        nonlocal told
        if time.perf_counter() - told > EVERY or figures["round"] == settings.rounds:
            told = time.perf_counter()
            print(f"round {figures['round']}/{settings.rounds}, accuracy {figures['accuracy']:.4f}", flush=True)

    def on_failure(server_round: int, client: int, reason: str) -> None:
        raise SystemExit(f"round {server_round}: the reply of client {client} was rejected: {reason}")

    run = FederatedRun(settings, chosen.codec, on_round, on_failure)
    one_process.run(*apps([run]), settings.clients)
    result = {
        "setting": setting,
        "contestant": name,
        "settings": settings.shared(),
        **run.figures(),
        "seconds": time.perf_counter() - started,
        "machine": torch.cuda.get_device_name() if options.device == "cuda" else processor(),
        "torch": torch.__version__,
    }
    write(options.out / file_name(setting, name, options.seed), result)


def write(path: Path, result: dict[str, Any]) -> None:
    """Whole or not at all: a run may be stopped at any moment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".tmp")
    beside.write_text(json.dumps(result, indent=1) + "\n")
    beside.replace(path)


def data_folder(options: argparse.Namespace, setting: str) -> Path:
    return options.cifar10 if SETTINGS[setting]["task"].startswith("cifar10") else options.fashion_mnist


class Running:
    """A run in a process of its own; its progress is the last line of its log."""

    def __init__(self, setting: str, contestant_name: str, logs: Path):
        self.name, self.started = f"{setting} {contestant_name}", time.monotonic()
        logs.mkdir(parents=True, exist_ok=True)
        self.log = (logs / file_name(setting, contestant_name, 0)).with_suffix(".log")
        command = [sys.executable, __file__, *sys.argv[1:], "--one", setting, contestant_name]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with self.log.open("w") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def last_line(self) -> str:
        lines = self.log.read_text().strip().splitlines()
        return lines[-1][:160] if lines else "starting"


def run_all(options: argparse.Namespace, waiting: list[tuple[str, str]]) -> bool:
    """A few runs at a time; whether all came to their end."""
    running: list[Running] = []
    total, failed, told = len(waiting), 0, time.monotonic()
    deadline = time.monotonic() + options.limit
    while waiting or running:
        in_time = time.monotonic() < deadline
        while waiting and len(running) < options.parallel and in_time:
            running.append(Running(*waiting.pop(0), options.out / "logs"))
        if not in_time:
            failed += len(waiting)
            waiting = []
        for run in list(running):
            if run.process.poll() is None and in_time:
                continue
            stopped = run.process.poll() is None
            run.process.kill()
            run.process.wait()
            running.remove(run)
            failed += run.process.returncode != 0
            state = "out of time" if stopped else "done" if not run.process.returncode else "FAILED"
            left = total - len(waiting) - len(running)
            print(f"[{left}/{total}] {run.name}: {state} after {run.seconds:.0f} s: {run.last_line()}", flush=True)
        if time.monotonic() - told > 3 * EVERY:
            told = time.monotonic()
            for run in running:
                print(f"  {run.name}, {run.seconds:.0f} s: {run.last_line()}", flush=True)
        time.sleep(0.2)
    return not failed


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS), metavar="SETTING",
                        help=f"of {', '.join(SETTINGS)}; by default all")  # fmt: skip
    known = ", ".join(CONTESTANTS).replace("%", "%%")
    parser.add_argument("--contestants", nargs="+", metavar="NAME",
                        help=f"of {known}; any other is a recipe, or RECIPE / RECIPE OF DOWNLOADS; "
                        "by default those chosen for each setting")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, help="in place of the setting's own, to try things out")
    parser.add_argument("--fashion-mnist", type=Path, default=Path("data"), metavar="FOLDER")
    parser.add_argument("--cifar10", type=Path, default=Path("data"), metavar="FOLDER")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time, each with one thread")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds after which all runs are stopped")
    parser.add_argument("--again", action="store_true", help="also what has a result already")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER")
    parser.add_argument("--one", nargs=2, metavar=("SETTING", "CONTESTANT"), help="in this process")
    return parser.parse_args()


if __name__ == "__main__":
    arguments = parse()
    if arguments.one:
        one(arguments, *arguments.one)
        sys.exit()
    chosen_runs = [(s, c) for s in arguments.settings for c in arguments.contestants or CHOICE[s]]
    if not arguments.again:
        chosen_runs = [(s, c) for s, c in chosen_runs if not (arguments.out / file_name(s, c, arguments.seed)).exists()]
    print(f"{len(chosen_runs)} runs, {arguments.parallel} at a time", flush=True)
    sys.exit(not run_all(arguments, chosen_runs))
