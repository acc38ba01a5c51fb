"""Bytes that each rank sends and receives in a step, at its network interface, beside what they should be.

    sudo python benchmarks/volume.py [--ranks 2,4,8,16] [--codecs co3] [--save]
    python benchmarks/volume.py --loopback          # without namespaces: the interface then counts all ranks together

b is the bits an entry of a rank's own frames, as measured. All-gather sends them to every peer: b·d·(W−1).
Scatter-reduce sends each shard to its owner, and the owner sends the sum to all: 2·b·d·(W−1)/W, below 2·b·d for any
number of ranks.

An interface also counts headers and acknowledgements. Both figures are shown: all of its bytes, and the payload, which
is less 66 bytes for each packet (Ethernet 14, IP 20, TCP 32). Between namespaces packets have up to 64 kB, so that
headers are a fraction of a percent; on a cable with packets of 1500 bytes they are 4.6%.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from crews import Crew, LostCrew
from hosts import HEADERS, Counters, Hosts, Loopback, counters
from machine import processor

AGGREGATIONS = ("all_gather", "scatter_reduce")
ALLOWED = 0.05
PORT = 29700
Figures = dict[str, float]


class Rank:
    """One rank: every codec and aggregation in turn, on a model of its own each."""

    def __init__(self, rank: int):
        self.rank = rank

    def measure(self, codec: str, aggregation: str, width: int, steps: int, interface: str) -> dict[str, Any]:
        torch.manual_seed(0)
        layers = [nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)]
        model = DistributedDataParallel(nn.Sequential(*layers))
        handle = gradwire.ddp.attach(model, codec, aggregate=aggregation)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        torch.manual_seed(1 + self.rank)

        def train(count: int) -> None:
            for _ in range(count):  # new batches, or gradients would fade and frames with them
                x, y = torch.randn(16, width), torch.randint(0, 10, (16,))
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
            dist.barrier()  # nothing of the others' last step is still to come

        train(4)  # lengths are agreed, and buckets rebuilt
        stats, seen = handle.stats(), _seen(interface)
        train(steps)
        after, now = handle.stats(), _seen(interface)
        own = {key: after[key] - stats[key] for key in ("frame_bytes", "wire_bytes_sent", "wire_bytes_received")}
        return {**own, "interface": now.since(seen) if now and seen else None, "entries": _entries(model)}


def _entries(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def _seen(interface: str) -> Counters | None:
    try:
        return counters(interface)
    except OSError:
        return None


def expected(aggregation: str, world: int, frame_bytes: float) -> tuple[float, float]:
    """b·d in bytes, and what a rank should send, given the frames that it wrote.

    In scatter-reduce it writes its own gradient, b·d, and the sum of one shard, b·d/W.
    """
    if aggregation == "all_gather":
        return frame_bytes, frame_bytes * (world - 1)
    whole = frame_bytes / (1 + 1 / world)
    return whole, 2 * whole * (world - 1) / world


def figures(ranks: list[dict[str, Any]], aggregation: str, steps: int, shared: bool) -> Figures:
    """Of one step and rank: the mean over the ranks, and the most that one of them sent."""
    world = len(ranks)
    frames = statistics.fmean(r["frame_bytes"] for r in ranks) / steps
    whole, goal = expected(aggregation, world, frames)
    stated = statistics.fmean(r["wire_bytes_sent"] for r in ranks) / steps
    row = {"bits": 8 * whole / ranks[0]["entries"], "expected": goal, "stated": stated}
    seen = [r["interface"] for r in ranks if r["interface"]]
    if not seen:
        return row
    count = steps * (world if shared else 1)  # the loopback interface counts all ranks
    row |= {"sent": statistics.fmean(c.bytes_sent for c in seen) / count}
    row |= {"received": statistics.fmean(c.bytes_received for c in seen) / count}
    payload = [(c.bytes_sent - HEADERS * c.packets_sent) / count for c in seen]
    return row | {"payload": statistics.fmean(payload), "payload_most": max(payload)}


def misses(row: Figures, loopback: bool) -> list[str]:
    """What is more than 5% away from what it should be."""
    sent = row.get("payload", row["stated"])
    found = []
    if abs(sent / row["expected"] - 1) > ALLOWED:
        found.append("expected bytes")
    if "sent" in row and abs(row["stated"] / row["sent"] - 1) > ALLOWED:
        found.append("stats() and the interface" + (" (which others use too)" if loopback else ""))
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown; MB of one rank and step."""
    head = ("codec", "aggregation", "ranks", "b, bits", "expected", "payload", "÷ expected", "busiest rank",
            "interface: sent", "received", "stats()", "÷ interface", "within 5%")  # fmt: skip
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in rows:
        f, where = row.get("figures"), f"| {row['codec']} | {row['aggregation']} | {row['ranks']} |"
        if f is None:
            lines.append(f"{where} {row['failed'][:100]} |" + " |" * 9)
            continue
        payload = f.get("payload", f["stated"])
        cells = [f"{f['bits']:.3f}", _mb(f["expected"]), _mb(f.get("payload")), f"{payload / f['expected']:.3f}"]
        cells += [f"{f['payload_most'] / f['expected']:.3f}" if "payload_most" in f else "–"]
        cells += [_mb(f.get("sent")), _mb(f.get("received")), _mb(f["stated"])]
        cells += [f"{f['stated'] / f['sent']:.3f}" if "sent" in f else "–"]
        cells += ["yes" if not row["misses"] else f"**no**: {', '.join(row['misses'])}"]
        lines.append(f"{where} {' | '.join(cells)} |")
    return "\n".join(lines)


def _mb(count: float | None) -> str:
    return "–" if count is None else f"{count / 1e6:.4f}"


def measure(world: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    with contextlib.ExitStack() as stack:
        place: Hosts | Loopback = Loopback() if options.loopback else stack.enter_context(Hosts(world))
        for i, codec in enumerate(options.codecs):
            for j, aggregation in enumerate(AGGREGATIONS):
                row: dict[str, Any] = {"codec": codec, "aggregation": aggregation, "ranks": world}
                crew = Crew(Rank, place, world, PORT + 20 * i + j)
                stack.callback(crew.close)
                how = (codec, aggregation, options.width, options.steps, place.interface)
                try:
                    found = figures(crew.ask("measure", *how, seconds=300), aggregation, options.steps, place.shared)
                    row |= {"figures": found, "misses": misses(found, options.loopback)}
                except LostCrew as error:
                    row |= {"failed": str(error), "misses": ["it failed"]}
                crew.close()
                rows.append(row)
                print(table([row]).splitlines()[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4,8,16")
    parser.add_argument("--codecs", default="co3")
    parser.add_argument("--width", type=int, default=1024, help="of an MLP with 2·width² parameters")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--loopback", action="store_true", help="on 127.0.0.1: needs no root")
    parser.add_argument("--save", action="store_true", help="keep the table in benchmarks/results")
    options = parser.parse_args()
    options.codecs = options.codecs.split(",")
    print(table([]))
    rows = [row for world in options.ranks.split(",") for row in measure(int(world), options)]
    missed = [row for row in rows if row["misses"]]
    for row in missed:
        print(f"missed: {row['codec']}, {row['aggregation']}, {row['ranks']} ranks: {', '.join(row['misses'])}")
    print(f"{len(rows) - len(missed)} of {len(rows)} rows within {ALLOWED:.0%}")
    if options.save:
        folder, command = Path(__file__).parent / "results", f"python benchmarks/volume.py {' '.join(sys.argv[1:])}"
        about = {"command": command, "machine": processor(), "rows": rows}
        (folder / "volume.json").write_text(json.dumps(about, indent=1) + "\n")
        text = f"# Bytes of a rank in a step\n\n`{command}`; MB; {2 * options.width**2 / 1e6:.1f} M parameters.\n\n"
        (folder / "volume.md").write_text(text + table(rows) + "\n")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
