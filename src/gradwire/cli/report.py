"""What came out of `gradwire train`: its closing tables, and its JSON file."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from gradwire.cli.progress import plural
from gradwire.cli.written_file import write_file

PHASES = ("compute", "encode", "wait", "decode")
MEAN_OF_ONE_MACHINE = (
    "mean over steps and workers, which share this machine: there is no thin link between them, "
    "so that compression costs time here (steps on thin links: docs/results.md)"
)


def show(summary: dict[str, Any]) -> None:
    """Print one row for each run, with its results and its bytes, and below, where the time went."""
    runs = summary["runs"]
    first = runs[0]
    workers = plural(summary["workers"], "worker")
    layers = max(len(run["converted"]) for run in runs)
    names = ("codec", "backward") if layers else ("codec",)
    converted = f"; --backward in {plural(layers, 'layer')}" if layers else ""
    metrics = [name for name in first["history"][-1] if name not in ("epoch", "step")]
    results = table(
        f"{summary['task']}: {workers}, {first['parameters']:,} parameters, "
        f"{first['steps']:,} steps, seed {summary['seed']}",
        f"test figures; bytes per worker, over {first['measured_steps']:,} steps{converted}",
        *("\n".join(name.replace("_", " ").rsplit(" ", 1)) for name in metrics),
        *("frame\nbytes", "wire bytes\nsent", "fp32 /\nframe", *([] if layers else ["bits per\nparameter"])),
        names=names,
    )
    times = table("Milliseconds per step", MEAN_OF_ONE_MACHINE, "total", *PHASES, names=names)
    for run in runs:
        results.add_row(
            *(run[name] for name in names),
            *(f"{run['history'][-1][name]:.4f}" for name in metrics),
            f"{run['frame_bytes']:,.0f}",
            f"{run['wire_bytes_sent']:,.0f}",
            f"{run['ratio']:.2f}",
            *([] if layers else [f"{run['bits_per_parameter']:.3f}"]),  # 32 bits by the ratio; 80 columns are few
        )
        seconds = run["seconds_per_step"]
        times.add_row(*(run[name] for name in names), *(f"{1000 * seconds[phase]:.2f}" for phase in ("total", *PHASES)))
    console = Console()
    console.print(results)
    console.print(times)


def table(title: str, caption: str, *headings: str, names: tuple[str, ...] = ("codec",)) -> Table:
    """Return an empty table: columns of text that name a run, then columns of figures."""
    table = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in names:
        table.add_column(name, overflow="fold", min_width=10 if name == "codec" else 9)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def write_json(path: Path, summary: dict[str, Any]) -> None:
    """Write all figures to a file, which replaces the one before in one step; to a pipe or a device as it is."""
    text = json.dumps(_finite(summary), indent=2) + "\n"
    write_file(path, lambda file: file.write(text.encode()))


def _finite(value: Any) -> Any:
    """Replace NaN and infinities by None: JSON has none, and a run that diverged gets null for its loss."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return value
