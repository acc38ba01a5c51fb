"""Tables of benchmarks/aggregation.py, beside the targets for these figures."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from adders import AGGREGATED, DENSE, SUMS, payload
from link_check import line
from machine import processor

RESULTS = Path(__file__).parent / "results"
HEAD = (
    "",
    "GB/s",
    "× dense",
    "ms",
    "quartiles",
    "floor, ms",
    "÷ floor",
    "CPU, ms",
    "MB up",
    "MB down",
    "by arithmetic",
    "exact",
)
TOO_WIDE = ("quartiles", "MB down", "by arithmetic")  # for a terminal
GOAL = 6.33  # × dense at a union of 5%: what arXiv 2402.07529 reports


def cells(table: dict[str, Any], name: str, result: dict[str, Any]) -> list[str]:
    row = table["rows"][name]
    if "ms" not in row:
        return [name, row["failed"][:80], *[""] * (len(HEAD) - 2)]
    low, high = row["quartiles_ms"]
    least = payload(name, result["entries"], table["case"]["share"], result["workers"])
    return [
        name, f"{row['gbytes_per_s']:.3f}", times_dense(table, name), f"{row['ms']:.1f}", f"{low:.1f}–{high:.1f}",
        f"{row['floor_ms']:.1f}", f"{row['ms'] / row['floor_ms']:.2f}", f"{row['cpu_ms']:.1f}",
        f"{row['upload_bytes'] / 1e6:.2f}", f"{row['download_bytes'] / 1e6:.2f}",
        "" if least is None else f"{least / 1e6:.2f}",
        "yes" if not row["wrong_entries"] else f"NO: {row['wrong_entries']} entries",
    ]  # fmt: skip


def times_dense(table: dict[str, Any], name: str) -> str:
    ratio = ratio_to_dense(table, name)
    return "" if ratio is None else f"{ratio:.2f}"


def ratio_to_dense(table: dict[str, Any], name: str) -> float | None:
    row, dense = table["rows"].get(name, {}), table["rows"].get(DENSE, {})
    return dense["ms"] / row["ms"] if "ms" in row and "ms" in dense else None


def title(table: dict[str, Any]) -> str:
    return f"{table['case']['name']}: the union is {table['union']:.1%}"


def verdicts(result: dict[str, Any]) -> list[str]:
    """Every goal, with what was measured."""
    lines = []
    for table in result["tables"]:
        ours = [name for name in (SUMS, *AGGREGATED.values()) if ratio_to_dense(table, name) is not None]
        if not ours:
            continue
        best = max(ours, key=lambda name: ratio_to_dense(table, name) or 0)
        floors = [table["rows"][name]["floor_ms"] for name in (DENSE, best)]
        line = f"{table['case']['name']}: {best} is the fastest of homomorphic, {times_dense(table, best)} × dense; "
        line += f"by its bytes it could be {floors[0] / floors[1]:.1f} ×"
        if table["union"] <= 0.051:
            reached = (ratio_to_dense(table, best) or 0) >= GOAL
            line += f" (goal {GOAL}: {'reached' if reached else 'MISSED'})"
        lines.append(line)
    wrong = [
        f"{t['case']['name']}, {n}" for t in result["tables"] for n, r in t["rows"].items() if r.get("wrong_entries")
    ]
    lines.append(f"WRONG SUMS: {'; '.join(wrong)}" if wrong else "every sum was exact on every worker")
    return lines


def show(result: dict[str, Any]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 120)
    kept = [i for i, head in enumerate(HEAD) if head not in TOO_WIDE]
    for table in result["tables"]:
        shown = Table(*(HEAD[i] for i in kept), title=title(table), box=box.SIMPLE)
        for name in table["rows"]:
            row = cells(table, name, result)
            shown.add_row(*(row[i] for i in kept))
        console.print(shown)
    for verdict in verdicts(result):
        console.print(verdict, highlight=False)


def markdown(result: dict[str, Any], command: str) -> str:
    lines = [f"# Adding up sparse gradients on thin links\n\n`{command}` on {processor()}.\n"]
    lines.append(
        f"{result['workers']} workers, {result['entries'] / 1e6:.1f} M fp32 entries each, one thread a worker."
    )
    lines.append(f"{line(result['link_check_mbit'], result['rate'])}.\n")
    lines.append(
        "GB/s of dense gradient summed, median of all rounds. The floor is what the cable takes for the bytes with "
        "headers that it carried; CPU is the processor's time of one worker; MB are of one worker, up and down, and "
        "for plain contestants by arithmetic, too.\n"
    )
    for table in result["tables"]:
        lines += [f"\n### {title(table)}\n", f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
        lines += [f"| {' | '.join(cells(table, name, result))} |" for name in table["rows"]]
    return "\n".join([*lines, "\n### Goals\n", *(f"- {verdict}" for verdict in verdicts(result))]) + "\n"


def publish(result: dict[str, Any], options: argparse.Namespace) -> None:
    command = " ".join(["sudo python benchmarks/aggregation.py", *sys.argv[1:]])
    show(result)
    data = json.dumps({"command": command, "machine": processor(), **result}, indent=1) + "\n"
    for path in (options.json, RESULTS / "aggregation.json" if options.save else None):
        if path:
            path.write_text(data)
    for path in (options.markdown, RESULTS / "aggregation.md" if options.save else None):
        if path:
            path.write_text(markdown(result, command))
