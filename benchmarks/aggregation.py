"""How fast four workers on thin links add up sparse gradients: all ways side by side, interleaved in one run.

    sudo python benchmarks/aggregation.py [--rate 1gbit] [--rounds 7] [--json FILE] [--markdown FILE] [--save]

Workers and switch are network namespaces (benchmarks/star.py: Linux, root, iproute2; the XDP engine wants clang, too).
Every worker has a dense fp32 gradient that is zero outside its support, and ends with the dense mean of all of them;
that it is the exact one, bit for bit, is checked each time. Throughput is the bytes of one dense gradient over the time
until the last worker has the mean; the median of all rounds. The floor is the time that the busier direction of a cable
takes for the bytes, with headers, that it was seen to carry. One torch thread a worker; workers, switch and aggregator
share this machine's cores, so the processor's time of a worker is shown, too.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress

import aggregation_report
import link_check
import supports
from adders import AGGREGATED, NAMES, Adder
from crews import Crew, LostCrew
from engines import Engines
from hosts import bits_per_second
from star import CABLES, Star

WORKERS = 4
WARM_UP = 6  # not counted: sizes are learnt from the last four unions, the first of which is a guess
FIRST_PORT = 29800


class Entry:
    """A contestant in one case."""

    def __init__(self, name: str, crew: Crew | None, failed: str = ""):
        self.name, self.crew, self.failed = name, crew, failed
        self.forget()

    def forget(self) -> None:
        self.seconds: list[float] = []
        self.busy: list[float] = []  # seconds of the processor, of one worker
        self.carried = dict.fromkeys(CABLES, 0.0)  # bytes of a worker
        self.dropped = self.wrong = 0

    def ask(self, method: str, *arguments: object) -> list[Any]:
        """Nothing once it has failed."""
        if self.crew is None:
            return []
        try:
            return self.crew.ask(method, *arguments, seconds=60)
        except LostCrew as error:
            self.crew, self.failed = None, f"{method}: {error}"
            return []

    def add(self, star: Star, times: int) -> None:
        before = star.carried()
        answers = self.ask("add", times)
        if not answers:
            return
        self.seconds += [max(ranks) for ranks in zip(*(a["seconds"] for a in answers), strict=True)]
        self.busy += [statistics.fmean(ranks) for ranks in zip(*(a["busy"] for a in answers), strict=True)]
        self.wrong += sum(a["wrong"] for a in answers)
        after = star.carried()
        for cable in CABLES:
            self.carried[cable] += statistics.fmean(after[cable]) - statistics.fmean(before[cable])
        self.dropped += sum(after["dropped"]) - sum(before["dropped"])

    def row(self, entries: int, rate: int) -> dict[str, Any]:
        if self.crew is None or not self.seconds:
            return {"failed": self.failed or "not measured"}
        median, count = statistics.median(self.seconds), len(self.seconds)
        low, _, high = statistics.quantiles(self.seconds, n=4) if count > 1 else self.seconds * 3
        sent = {cable: total / count for cable, total in self.carried.items()}
        floor = max(sent.values()) * 8 / rate
        row = {"gbytes_per_s": 4 * entries / median / 1e9, "ms": median * 1e3, "quartiles_ms": [low * 1e3, high * 1e3]}
        row |= {
            "floor_ms": floor * 1e3,
            "cpu_ms": statistics.median(self.busy) * 1e3,
            "rounds": count,
            "dropped_packets": self.dropped,
            "wrong_entries": self.wrong,
        }
        return row | {f"{cable}_bytes": amount for cable, amount in sent.items()}


def race(star: Star, cases: list[supports.Case], options: argparse.Namespace, bar: Progress) -> list[dict[str, Any]]:
    gradients = []
    making = bar.add_task("gradients", total=len(cases))
    for case in cases:
        gradients.append(supports.make(case, options.entries, WORKERS))
        bar.advance(making)
    tables = []
    with Engines(star, [engine for engine, name in AGGREGATED.items() if name in options.only]) as engines:
        crews = {name: _crew(name, star, gradients, engines, number) for number, name in enumerate(options.only)}
        try:
            for number, case in enumerate(cases):
                star.shape(options.rate)
                entries = [Entry(name, *crews[name]) for name in options.only]
                _measure(star, entries, case, number, options, bar)
                crews = {entry.name: (entry.crew, entry.failed) for entry in entries}
                rows = {e.name: e.row(options.entries, bits_per_second(options.rate)) for e in entries}
                tables.append({"case": case._asdict(), "union": gradients[number].union, "rows": rows})
        finally:
            for crew, _ in crews.values():
                if crew is not None:
                    crew.close()
    return tables


def _crew(
    name: str, star: Star, gradients: list[supports.Gradients], engines: Engines, number: int
) -> tuple[Crew | None, str]:
    """Or why there is none."""
    engine = next((engine for engine, who in AGGREGATED.items() if who == name), None)
    if engine in engines.failed:
        return None, engines.failed[engine]
    make = functools.partial(Adder, name=name, cases=gradients, aggregator=engines.addresses.get(engine or ""))
    return Crew(make, star, WORKERS, FIRST_PORT + number), ""


def _measure(
    star: Star, entries: list[Entry], case: supports.Case, number: int, options: argparse.Namespace, bar: Progress
) -> None:
    task = bar.add_task(case.name, total=len(entries) * (options.rounds + 1))
    for entry in entries:
        entry.ask("begin", number, case.share)
        entry.add(star, WARM_UP)
        wrong = entry.wrong  # an error is one in any round
        entry.forget()
        entry.wrong = wrong
        bar.advance(task)
    for _ in range(options.rounds):
        for entry in entries:
            entry.add(star, 2)
            bar.advance(task)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=10_500_000, help="of a gradient")
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--rounds", type=int, default=7, help="of two sums each")
    parser.add_argument("--only", nargs="*", default=list(NAMES), choices=NAMES, metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--cases", nargs="*", default=[case.name for case in supports.CASES], metavar="CASE")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--markdown", type=Path, help="write the tables to this file")
    parser.add_argument("--save", action="store_true", help="keep both in benchmarks/results")
    options = parser.parse_args()
    cases = [case for case in supports.CASES if case.name in options.cases]
    torch.set_num_threads(1)  # also in the ranks, which are forked from here
    with Star(WORKERS) as star:
        checked = link_check.measure(star, options.rate)
        print(link_check.line(checked, options.rate), flush=True)
        with Progress(transient=True) as bar:
            tables = race(star, cases, options, bar)
    result = {"entries": options.entries, "workers": WORKERS, "rate": options.rate, "link_check_mbit": checked}
    aggregation_report.publish(result | {"tables": tables}, options)


if __name__ == "__main__":
    main()
