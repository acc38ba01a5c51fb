"""Training step of NCF and of an LSTM over thin links: plain DDP beside gradients that are added up on their way.

    sudo python benchmarks/sparse_training.py [--tasks NCF LSTM] [--rate 1gbit] [--steps 100] [--save]

Four workers around a switch (benchmarks/star.py: Linux, root, iproute2). All contestants start alike, see the same
batches and take turns of a few steps, until each has taken as many as the others: times and losses are of one run. A
step's time is that of the slowest rank, from the forward pass to the optimizer's end; the median of all steps.
"compute only" is the same step by ranks that do not talk to each other. One torch thread a worker; all share this
machine's cores.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress

import link_check
import training_report
from crews import Crew, LostCrew
from engines import Engines
from hosts import bits_per_second
from models_sparse import TASKS, Task
from star import CABLES, Star
from trainees import CONTESTANTS, Contestant, Trainee

WORKERS = 4
TURN = 5  # steps
WARM_UP = TURN  # of these times and bytes do not count: buckets are rebuilt, sizes learnt
FIRST_PORT = 29900


class Entry:
    """A contestant, and what is known of it."""

    def __init__(self, who: Contestant, task: Task, star: Star, engines: Engines, port: int):
        self.who, self.star = who, star
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.carried = dict.fromkeys(CABLES, 0.0)
        self.final, self.failed = 0.0, engines.failed.get(who.engine, "")
        make = functools.partial(Trainee, who=who, task=task, aggregator=engines.addresses.get(who.engine))
        self.crew = None if self.failed else Crew(make, star, WORKERS, port)

    def ask(self, method: str, *arguments: object) -> list[Any]:
        """Nothing once it has failed."""
        if self.crew is None:
            return []
        try:
            return self.crew.ask(method, *arguments, seconds=120)
        except LostCrew as error:
            self.crew, self.failed = None, f"{method}: {error}"
            return []

    def turn(self, count: int) -> None:
        before = self.star.carried()
        answers = self.ask("steps", count)
        if not answers:
            return
        self.seconds += [max(ranks) for ranks in zip(*(a["seconds"] for a in answers), strict=True)]
        self.losses += [statistics.fmean(ranks) for ranks in zip(*(a["losses"] for a in answers), strict=True)]
        if len(self.seconds) <= WARM_UP:
            return
        after = self.star.carried()
        for cable in CABLES:
            self.carried[cable] += statistics.fmean(after[cable]) - statistics.fmean(before[cable])

    def row(self, rate: int) -> dict[str, Any]:
        times = self.seconds[WARM_UP:]
        if self.failed or not times:
            return {"failed": self.failed or "no step was measured"}
        low, median, high = statistics.quantiles(times, n=4) if len(times) > 1 else times * 3
        sent = {f"{cable}_bytes": total / len(times) for cable, total in self.carried.items()}
        row = {"ms": median * 1e3, "quartiles_ms": [low * 1e3, high * 1e3], "floor_ms": max(sent.values()) * 8e3 / rate}
        return row | sent | {"steps": len(self.seconds), "losses": self.losses, "validation_loss": self.final}


def race(star: Star, name: str, number: int, options: argparse.Namespace, bar: Progress) -> dict[str, Any]:
    task = TASKS[name]()
    chosen = [who for who in CONTESTANTS if who.name in options.only]
    wanted = list(dict.fromkeys(who.engine for who in chosen if who.engine))
    entries: list[Entry] = []
    with Engines(star, wanted) as engines:
        try:
            star.shape("none")
            for place, who in enumerate(chosen):
                entries.append(Entry(who, task, star, engines, FIRST_PORT + 40 * number + place))
                entries[-1].ask("begin")
            star.shape(options.rate)
            work = bar.add_task(name, total=options.steps * len(entries))
            for _ in range(0, options.steps, TURN):
                for entry in entries:
                    entry.turn(TURN)
                    bar.advance(work, TURN)
            for entry in entries:
                entry.final = (entry.ask("validation") or [0.0])[0]
        finally:
            for entry in entries:
                if entry.crew is not None:
                    entry.crew.close()
    rows = {entry.who.name: entry.row(bits_per_second(options.rate)) for entry in entries}
    return {"task": name, "parameters": sum(p.numel() for p in task.model().parameters()), "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [who.name for who in CONTESTANTS]
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--only", nargs="*", default=names, choices=names, metavar="NAME", help="; ".join(names))
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--markdown", type=Path, help="write the tables to this file")
    parser.add_argument("--save", action="store_true", help="keep both in benchmarks/results")
    options = parser.parse_args()
    torch.set_num_threads(1)  # also in the ranks, which are forked from here
    with Star(WORKERS) as star:
        checked = link_check.measure(star, options.rate)
        print(link_check.line(checked, options.rate), flush=True)
        with Progress(transient=True) as bar:
            tables = [race(star, name, number, options, bar) for number, name in enumerate(options.tasks)]
    command = " ".join(["sudo python benchmarks/sparse_training.py", *sys.argv[1:]])
    result = {"command": command, "workers": WORKERS, "rate": options.rate, "link_check_mbit": checked}
    training_report.publish(result | {"tables": tables}, options)


if __name__ == "__main__":
    main()
