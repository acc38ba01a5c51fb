"""The tables that `gradwire train --federated` prints at its end."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from gradwire.cli.federated_progress import decimal
from gradwire.cli.report import table

NOT_METRICS = ("round", "upload_bytes", "download_bytes", "seconds")


def show(summary: dict[str, Any]) -> None:
    """Print a table of metrics and bytes per client, one row for each run, and a table of totals."""
    runs = summary["runs"]
    first = runs[0]
    metrics = [name for name in first["history"][-1] if name not in NOT_METRICS]
    skew = "all alike" if summary["alpha"] is None else f"α = {summary['alpha']:g}"
    results = table(
        f"{summary['task']}: {summary['clients']:,} clients ({skew}), {summary['per_round']:,} a round, "
        f"{summary['rounds']:,} rounds, {first['parameters']:,} parameters, seed {summary['seed']}",
        "test figures; bytes of Flower's messages, per client and round",
        *("\n".join(name.replace("_", " ").rsplit(" ", 1)) for name in metrics),
        *("upload\nbytes", "raw /\nupload", "download\nbytes", "raw /\ndownload"),
    )
    rejected = any(run["rejected"] for run in runs)
    totals = table(
        "In total", "seconds per round without the evaluation",
        *("upload", "download", *(["replies\nnot used"] if rejected else []), "seconds\nper round"),
    )  # fmt: skip
    for run in runs:
        results.add_row(
            run["codec"],
            *(f"{run['history'][-1][name]:.4f}" for name in metrics),
            f"{run['upload_per_client']:,.0f}",
            f"{run['upload_ratio']:.2f}",
            f"{run['download_per_client']:,.0f}",
            f"{run['download_ratio']:.2f}",
        )
        totals.add_row(
            run["codec"],
            *(decimal(run[name]) for name in ("upload_bytes", "download_bytes")),
            *([f"{run['rejected']:,}"] if rejected else []),
            f"{run['seconds_per_round']:.2f}",
        )
    console = Console()
    console.print(results)
    console.print(totals)
