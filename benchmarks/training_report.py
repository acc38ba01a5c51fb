"""Tables of benchmarks/sparse_training.py, beside the targets for these figures."""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from link_check import line
from machine import processor
from trainees import DENSE

RESULTS = Path(__file__).parent / "results"
HEAD = ("", "ms", "quartiles", "× dense", "floor, ms", "MB up", "MB down", "validation loss")
GOAL = 3.74  # × dense an iteration: what arXiv 2402.07529 reports
POINTS = 5  # of a curve


def speed_up(table: dict[str, Any], name: str) -> float | None:
    row, dense = table["rows"][name], table["rows"].get(DENSE, {})
    return dense["ms"] / row["ms"] if "ms" in row and "ms" in dense else None


def cells(table: dict[str, Any], name: str) -> list[str]:
    row, ratio = table["rows"][name], speed_up(table, name)
    if "ms" not in row:
        return [name, row["failed"][:80], *[""] * (len(HEAD) - 2)]
    low, high = row["quartiles_ms"]
    sent = [f"{row[f'{cable}_bytes'] / 1e6:.2f}" for cable in ("upload", "download")]
    times = "" if ratio is None else f"{ratio:.2f}"
    floor, loss = f"{row['floor_ms']:.1f}", f"{row['validation_loss']:.4f}"
    return [name, f"{row['ms']:.1f}", f"{low:.1f}–{high:.1f}", times, floor, *sent, loss]


def curve_head(table: dict[str, Any]) -> list[str]:
    count = max((row["steps"] for row in table["rows"].values() if "steps" in row), default=POINTS)
    return ["mean loss of steps", *(f"{first + 1}–{last}" for first, last in _parts(count))]


def curve(table: dict[str, Any], name: str) -> list[str]:
    losses = table["rows"][name].get("losses", [])
    return [name, *(f"{statistics.fmean(losses[a:b]):.4f}" for a, b in _parts(len(losses)))]


def _parts(count: int) -> list[tuple[int, int]]:
    ends = [count * i // POINTS for i in range(POINTS + 1)]
    return [(a, b) for a, b in itertools.pairwise(ends) if a < b]


def verdict(table: dict[str, Any]) -> str:
    ratios = {name: speed_up(table, name) or 0.0 for name in table["rows"] if "homomorphic" in name}
    best = max(ratios, key=lambda name: ratios[name], default="")
    if not ratios.get(best):
        return f"{table['task']}: nothing to compare"
    reached = "reached" if ratios[best] >= GOAL else "MISSED"
    return f"{table['task']}: {best} is the fastest, {ratios[best]:.2f} × plain DDP (goal {GOAL}: {reached})"


def title(table: dict[str, Any]) -> str:
    return f"{table['task']}, {table['parameters'] / 1e6:.1f} M parameters"


def show(result: dict[str, Any]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 140)
    for table in result["tables"]:
        for head, rows in ((HEAD, cells), (curve_head(table), curve)):
            shown = Table(*head, title=title(table), box=box.SIMPLE)
            for name in table["rows"]:
                shown.add_row(*rows(table, name))
            console.print(shown)
    for table in result["tables"]:
        console.print(verdict(table), highlight=False)


def markdown(result: dict[str, Any]) -> str:
    lines = [f"# Training step of NCF and an LSTM over thin links\n\n`{result['command']}` on {processor()}.\n"]
    lines.append(f"{result['workers']} workers, one thread each; {line(result['link_check_mbit'], result['rate'])}.")
    lines.append("Median of a step, quartiles beside it; MB with all headers are those of one worker and step.\n")
    for table in result["tables"]:
        for head, rows in ((HEAD, cells), (curve_head(table), curve)):
            lines += [f"\n### {title(table)}\n", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
            lines += [f"| {' | '.join(rows(table, name))} |" for name in table["rows"]]
    return "\n".join([*lines, "\n### Goals\n", *(f"- {verdict(table)}" for table in result["tables"])]) + "\n"


def publish(result: dict[str, Any], options: argparse.Namespace) -> None:
    show(result)
    for path in (options.json, RESULTS / "sparse_training.json" if options.save else None):
        if path:
            path.write_text(json.dumps({"machine": processor(), **result}, indent=1) + "\n")
    for path in (options.markdown, RESULTS / "sparse_training.md" if options.save else None):
        if path:
            path.write_text(markdown(result))
