"""Step time and loss of delayed exchange on a thin link: at once, and in parts beside the training.

    sudo python benchmarks/streaming.py [--rate 100mbit] [--rounds 5] [--json FILE]

Two ranks, each a host of its own whose link is shaped in both directions (benchmarks/hosts.py: Linux, root, iproute2),
train a small GPT with AdamW on the sources of Python's standard library, one thread each. Every contestant has
processes of its own, and they take turns of one round (`--every` steps), so that all meet the same noise of the
machine. "compute only" is the same training without any exchange. A turn begins behind the last step at which a mean is
due, so that all that a round sends is sent and waited for within it. Times are of whole turns, over the number of
steps; the ratio is the median over turns of a turn's time over that of "compute only" in the same round. The loss is on
held-out text, of the parameters that the ranks share at the end. Some four minutes on two quiet cores.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import gradwire
from crews import Crew
from hosts import Hosts, counters
from language_model import GPT, batch, evaluate, loss_of, text

COMPUTE = "compute only"
FIRST_PORT = 29900


def contestants(o: argparse.Namespace) -> dict[str, dict[str, Any] | None]:
    """The options of LocalSGD for each of them."""
    at_once: dict[str, Any] = {"sync_every": o.every, "outer": "nesterov"}
    streaming = {**at_once, "parts": o.parts, "overlap": o.overlap, "mix": o.mix}
    return {
        COMPUTE: None,
        "bf16 at once (DiLoCo)": {"spec": "bf16", **at_once},
        f"{o.spec} at once": {"spec": o.spec, **at_once},
        f"{o.spec}, {o.parts} parts beside {o.overlap} steps": {"spec": o.spec, **streaming},
    }


class Contestant:
    """One rank of one contestant."""

    def __init__(self, options: dict[str, Any] | None, o: argparse.Namespace, rank: int, interface: str):
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.o, self.interface = o, interface
        self.model = GPT(o.width, o.layers, o.context)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), o.lr, weight_decay=0.1, betas=(0.9, 0.95))
        self.training, self.held_out = text()
        self.generator = torch.Generator().manual_seed(rank)
        self.local = None if options is None else gradwire.LocalSGD(self.model, self.optimizer, **options)

    def enter(self) -> int:
        if self.local is not None:
            self.local.__enter__()
        return sum(p.numel() for p in self.model.parameters())

    def steps(self, count: int) -> dict[str, float]:
        """Seconds of the turn, by the clock and of this process, seconds spent waiting, and bytes sent."""
        dist.barrier()
        waited, sent = self._waited(), counters(self.interface).bytes_sent
        start, worked = time.perf_counter(), time.process_time()
        for _ in range(count):
            x, y = batch(self.training, self.o.batch, self.o.context, self.generator)
            self.optimizer.zero_grad()
            loss_of(self.model, x, y).backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
        seconds, worked = time.perf_counter() - start, time.process_time() - worked
        return {
            "seconds": seconds, "cpu": worked, "waited": self._waited() - waited,
            "sent": counters(self.interface).bytes_sent - sent,
        }  # fmt: skip

    def _waited(self) -> float:
        return 0.0 if self.local is None else self.local.stats()["wait_s"]

    def leave(self) -> float:
        """The loss when all is over."""
        if self.local is not None:
            self.local.__exit__(None, None, None)
        return evaluate(self.model, self.held_out, argparse.Namespace(device="cpu", context=self.o.context))


def run(o: argparse.Namespace) -> dict[str, Any]:
    turns: dict[str, list[list[dict[str, float]]]] = {}
    losses, parameters = {}, 0
    with Hosts(2) as hosts:
        crews = {}
        for number, (name, options) in enumerate(contestants(o).items()):
            make = lambda rank, options=options: Contestant(options, o, rank, hosts.interface)  # noqa: E731
            crews[name] = Crew(make, hosts, 2, FIRST_PORT + 20 * number)
        hosts.shape(o.rate)
        for name, crew in crews.items():
            parameters = crew.ask("enter")[0]
            crew.ask("steps", o.every + o.overlap + 1)  # lengths are exchanged ahead the first time
            turns[name] = []
        for number in range(o.rounds):
            for name, crew in crews.items():
                turns[name].append(crew.ask("steps", o.every, seconds=300))
            print(f"round {number + 1} of {o.rounds}", flush=True)
        for name, crew in crews.items():
            losses[name] = statistics.mean(crew.ask("leave"))
            crew.close()
    rows = [summary(name, turns[name], turns[COMPUTE], losses[name], o) for name in turns]
    settings = {k: str(v) for k, v in vars(o).items() if k != "json"}
    return {"parameters": parameters, "settings": settings, "rows": rows}


def summary(
    name: str, turns: list[list[dict[str, float]]], compute: list[list[dict[str, float]]], loss: float,
    o: argparse.Namespace,
) -> dict[str, Any]:  # fmt: skip
    """Of all turns of a contestant; a turn is as long as on its slower rank."""

    def of(turn: list[dict[str, float]], key: str) -> float:
        return max(rank[key] for rank in turn)

    ratios = [of(turn, "seconds") / of(other, "seconds") for turn, other in zip(turns, compute, strict=True)]
    return {
        "name": name,
        "step_ms": 1000 * statistics.median(of(turn, "seconds") for turn in turns) / o.every,
        "ratio": statistics.median(ratios),
        "waited_ms": 1000 * statistics.median(of(turn, "waited") for turn in turns) / o.every,
        "cpu_ms": 1000 * statistics.median(of(turn, "cpu") for turn in turns) / o.every,
        "round_kb": statistics.mean(of(turn, "sent") for turn in turns) / 1000,
        "loss": loss,
    }


def show(result: dict[str, Any], o: argparse.Namespace) -> None:
    print(
        f"\n{result['parameters']:,} parameters, 2 ranks, {o.rate}, exchange every {o.every} steps, {o.rounds} rounds"
    )
    print("\n| | ms a step | over compute | ms waited a step | CPU ms a step | kB a round | held-out loss |")
    print("|---|---|---|---|---|---|---|")
    for row in result["rows"]:
        print(
            f"| {row['name']} | {row['step_ms']:.1f} | {row['ratio']:.3f} | {row['waited_ms']:.1f} "
            f"| {row['cpu_ms']:.1f} | {row['round_kb']:.0f} | {row['loss']:.4f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--spec", default="co3")
    parser.add_argument("--every", type=int, default=30)
    parser.add_argument("--parts", type=int, default=3)
    parser.add_argument("--overlap", type=int, default=5)
    parser.add_argument("--mix", type=float, default=0.5, help="the part of its own parameters that a rank keeps")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--json", type=Path, help="a file for the figures")
    o = parser.parse_args()
    result = run(o)
    show(result, o)
    if o.json:
        o.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
