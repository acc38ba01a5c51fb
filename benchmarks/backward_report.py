"""Tables and progress of benchmarks/backward.py: rich where it is installed, plain text elsewhere."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

try:
    from rich import box
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table
except ImportError:  # a GPU machine may have torch alone
    Console = None

GOALS = {"0.25": 2.5, "0.125": 4.0}  # times as fast as the exact product, for topk with memory, in fp32 on a CPU
GOALS_ARE_FOR = ((4096, 1024, 4096), (16384, 4096, 4096))
FIRST, TIMES = ("", "memory", "K/M"), ("ms", "best", "× exact")
OF_GRAPHS, PARTS = ("graph", "best", "× exact"), ("floor", "join", "choose", "take", "rest")


@contextlib.contextmanager
def progress(name: str, steps: int) -> Iterator[Callable[[], None]]:
    if Console is None:
        print(f"{name}: {steps} measurements", file=sys.stderr, flush=True)
        yield lambda: None
        return
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(name, total=steps)
        yield lambda: bar.advance(task)


def show(result: dict[str, Any], shape: dict[str, Any]) -> None:
    """One shape of the result."""
    memory = result["memory_dtype"] if result["memory_dtype"] != result["dtype"] else "same"
    title = (
        f"{shape['rows']} rows, {shape['inputs']} → {shape['outputs']}, {result['dtype']} (memory: {memory}), "
        f"{result['machine']}, torch's copy {result['copy_gb_per_s']:.0f} GB/s, {result['kernels']}"
    )
    graphs = "graph_ms" in shape["tasks"]["exact"]
    headings = (*FIRST, *TIMES, *(OF_GRAPHS if graphs else ()), *PARTS)
    lines = [line(name, row, graphs) for name, row in shape["tasks"].items()]
    if Console is None:
        widths = [max(len(cells[i]) for cells in [headings, *lines]) for i in range(len(headings))]
        print(f"\n{title}")
        for cells in [headings, *lines]:
            first, *others = zip(cells, widths, strict=True)
            print("  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]))
    else:
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
        for i, heading in enumerate(headings):
            table.add_column(heading, justify="right" if i else "left", no_wrap=True)
        for cells in lines:
            table.add_row(*cells)
        console = Console()
        console.print(table) if console.is_terminal else Console(width=140).print(table)
    if (shape["rows"], shape["inputs"], shape["outputs"]) in GOALS_ARE_FOR and result["device"] == "cpu":
        for share, goal in GOALS.items():
            row = shape["tasks"].get(f"topk {share} memory")
            if row:
                verdict = "reached" if row["times_exact"] >= goal else "not reached"
                print(f"topk with memory, K/M = {share}: {row['times_exact']:.2f} × exact; {goal} × is {verdict}")


def line(name: str, row: dict[str, float], graphs: bool) -> tuple[str, ...]:
    what, share, memory = (*name.split(), "", "")[:3]
    if name.endswith("exact"):
        what, share = ("exact product", "") if name == "exact" else ("layer, exact", "")
    elif what in {"product", "layer"}:
        what, memory = {"product": ("product of K rows alone", ""), "layer": ("layer, topk", "memory")}[what]
    figures = times(row, "") + (times(row, "graph_") if graphs else [])
    if "floor_ms" in row:
        parts = [row[f"{part}_ms"] for part in PARTS[1:-1]]
        rest = row.get("graph_ms", row["ms"]) - sum(parts)
        figures += [f"{ms:.3f}" for ms in (row["floor_ms"], *parts, rest)]
    else:
        figures += [""] * len(PARTS)
    return (what, {"none": "–"}.get(memory, memory), share, *figures)


def times(row: dict[str, float], which: str) -> list[str]:
    if f"{which}ms" not in row:
        return ["–"] * 3
    return [f"{row[f'{which}ms']:.3f}", f"{row[f'{which}best_ms']:.3f}", f"{row[f'{which}times_exact']:.2f}"]
