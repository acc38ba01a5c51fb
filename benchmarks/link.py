"""Training step over thin links: plain DDP, PyTorch's own hooks and gradwire, interleaved in one run.

    sudo python benchmarks/link.py [--rates 100mbit,1gbit,10gbit] [--ranks 2,4] [--codecs co3,sbc]
        [--network mobilenet_v2] [--save]

Every rank is a host of its own, its link shaped in both directions with tc's token bucket (benchmarks/hosts.py: Linux,
root, iproute2). Every contestant has processes of its own, and they take turns of a few steps, round after round, so
that all of them meet the same noise of a shared machine. The model is an MLP of 10.5 M parameters, or another one of
benchmarks/networks.py, with SGD and momentum 0.9, one thread a rank. Rows are named by what a user would write. A
step's time is the mean over the ranks; the table has the median of all steps, and the processor's time beside it.
"compute only" is the same step by as many ranks that do not talk to each other. `auto` is measured once it has settled.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import link_report
from contestants import CODECS, COMPUTE, FRAGILE, FRONTS, PEERS, maker, names
from crews import Crew, LostCrew
from hosts import Hosts, bits_per_second
from networks import NETWORKS

TURN = 0.6  # seconds: slower contestants take fewer steps
SPENT = 8.0  # seconds: after these, and three steps, a contestant has been measured well enough
WARM_UP = 4  # steps, in which gradwire also chooses between all-gather and scatter-reduce
FIRST_PORT = 29600
PATIENCE = 60  # seconds; PowerSGD may hang where it does not abort


@dataclass
class Entry:
    """A contestant, and what is known of it."""

    name: str
    hosts: Hosts
    port: int
    network: str = "mlp"
    crew: Crew | None = None
    seconds: list[float] = field(default_factory=list)
    sent: float = 0.0  # bytes of a rank, by its interface
    stated: float = 0.0  # by its own account
    busy: list[float] = field(default_factory=lambda: [0.0] * 3)  # the processor's seconds: all, encoding, decoding
    steps_run: int = 0  # that these bytes and seconds belong to
    pace: float = 0.1  # seconds of the last step
    settled_after: int = 0
    choice: str = ""
    failed: str = ""
    aborts: int = 0

    def prepare(self) -> None:
        """On a link without limits. Peers may abort (PowerSGD on Gloo does, in some runs): they have another try."""
        while self.crew is None and self.aborts < 2:
            self.failed = ""
            self.crew = Crew(
                maker(self.name, self.hosts.interface, self.network), self.hosts, self.hosts.count, self.port
            )
            self.port += 20
            self.ask("prepare")

    def ask(self, method: str, *arguments: object) -> list[Any]:
        """Nothing once it has failed."""
        if self.crew is None:
            return []
        try:
            return self.crew.ask(method, *arguments, seconds=PATIENCE)
        except LostCrew as error:
            self.failed, self.crew = f"{method}: {error}", None
            self.aborts += 1
            return []

    def close(self) -> None:
        if self.crew is not None:
            self.crew.close()

    def steps(self, count: int) -> list[float]:
        """Seconds of each; fewer where it fails."""
        times: list[float] = []
        for _ in range(count if self.name == FRAGILE else 1):
            part = 1 if self.name == FRAGILE else count  # one by one, so that those before an abort count
            answers = self.ask("steps", part)
            if not answers:
                break
            times += [statistics.fmean(step) for step in zip(*(a["seconds"] for a in answers), strict=True)]
            self.pace = times[-1]
            self.sent += statistics.fmean(a["sent"] for a in answers)
            self.stated += statistics.fmean(a["stated"] for a in answers)
            parts = (statistics.fmean(of_ranks) for of_ranks in zip(*(a["busy"] for a in answers), strict=True))
            self.busy = [before + now for before, now in zip(self.busy, parts, strict=True)]
            self.steps_run += part
        return times

    def turn(self, most: int) -> None:
        """Some steps; the first of them finds its data out of the caches, and does not count unless it is long."""
        if sum(self.seconds) > SPENT and len(self.seconds) >= 3:
            return
        count = max(1, min(most, int(TURN / self.pace)))
        times = self.steps(count + 1 if count > 1 else count)
        self.seconds += times[1:] if count > 1 else times

    def settle(self, most: int) -> None:
        """Until it says that it has settled, or for `most` steps, or half a minute."""
        deadline = time.monotonic() + 30
        while self.crew is not None and self.settled_after < most and time.monotonic() < deadline:
            self.settled_after += len(self.steps(4))
            if all(self.ask("settled")):
                return
        self.failed = self.failed or f"not settled after {self.settled_after} steps"

    def forget(self) -> None:
        """What came before is not part of the measurement."""
        self.seconds, self.sent, self.stated, self.busy, self.steps_run = [], 0.0, 0.0, [0.0] * 3, 0

    def begin_table(self) -> None:
        self.forget()
        self.settled_after, self.choice, self.failed, self.aborts = 0, "", "", 0

    def row(self) -> dict[str, Any]:
        aborts = {"aborts": self.aborts} if self.aborts else {}
        if not self.seconds:
            return {"failed": self.failed or "no step was measured", **aborts}
        low, _, high = statistics.quantiles(self.seconds, n=4) if len(self.seconds) > 1 else self.seconds * 3
        row = {"ms": statistics.median(self.seconds) * 1e3, "quartiles_ms": [low * 1e3, high * 1e3]}
        row |= {"steps": len(self.seconds), "interface_bytes_per_step": self.sent / self.steps_run} | aborts
        row["busy_ms"] = [1e3 * part / self.steps_run for part in self.busy]
        if self.name != COMPUTE and self.name not in PEERS:
            row["stated_bytes_per_step"] = self.stated / self.steps_run
        if self.settled_after:
            row["settled_after_steps"] = self.settled_after
        return row | {"choice": self.choice, "failed": self.failed}


def races(ranks: int, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The tables of one number of ranks. Processes and DDP models stay; gradwire begins anew with each rate."""
    with Hosts(ranks) as hosts:
        entries = [Entry(name, hosts, FIRST_PORT + i, options.network) for i, name in enumerate(names(options.codecs))]
        try:
            for rate in options.rates:
                race(entries, hosts, rate, options)
                yield {"ranks": ranks, "rate": rate, "rows": {entry.name: entry.row() for entry in entries}}
        finally:
            for entry in entries:
                entry.close()


def race(entries: list[Entry], hosts: Hosts, rate: str, options: argparse.Namespace) -> None:
    hosts.shape("none")
    for entry in entries:
        link_report.progress(f"{hosts.count} ranks at {rate}: starting {entry.name}")
        entry.begin_table()
        entry.prepare()
    hosts.shape(rate)
    for entry in entries:
        link_report.progress(f"{hosts.count} ranks at {rate}: warming up {entry.name}")
        entry.ask("attach")
        if "auto" in entry.name:
            entry.settle(options.settle)
        if entry.name.split()[0] in FRONTS:
            entry.steps(WARM_UP)
        entry.forget()
    for number in range(options.rounds):
        link_report.progress(f"{hosts.count} ranks at {rate}: round {number + 1} of {options.rounds}")
        for entry in entries:
            if entry.crew is None and entry.name in PEERS:
                hosts.shape("none")
                entry.prepare()
                hosts.shape(rate)
            entry.turn(options.steps)
    for entry in entries:
        entry.choice = (entry.ask("choice") or [""])[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=_list, default=["100mbit", "1gbit", "10gbit"], help="or none, for no limit")
    parser.add_argument("--ranks", type=_list, default=["2", "4"])
    parser.add_argument("--codecs", type=_list, default=list(CODECS), help="gradwire specs")
    parser.add_argument("--network", choices=NETWORKS, default="mlp")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="of one turn")
    parser.add_argument("--settle", type=int, default=60, help="steps that auto has at most before it is measured")
    parser.add_argument("--save", action="store_true", help="keep the tables in benchmarks/results")
    options = parser.parse_args()
    for rate in options.rates:
        if rate != "none":
            bits_per_second(rate)
    start = time.monotonic()
    tables = []
    for ranks in map(int, options.ranks):
        with contextlib.closing(races(ranks, options)) as results:
            for result in results:
                link_report.progress("")
                print(link_report.table(result), flush=True)
                tables.append(result)
    print("\n".join(link_report.verdicts(tables)))
    print(f"\n{time.monotonic() - start:.0f} s in all")
    if options.save:
        link_report.save(tables, options.network)


def _list(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


if __name__ == "__main__":
    main()
