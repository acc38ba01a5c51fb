"""One table and one plot of what benchmarks/language_model.py has measured.

    python benchmarks/language_model_report.py results.jsonl [--plot plot.png]

Of each method the learning rate counts that has the lowest mean loss, over seeds that all of its rates have been tried
with. Runs of different settings get tables of their own. A curve of the plot is one method: the loss at each fifth of
the training, over the bits that a worker has sent for a parameter until then.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

Results = list[dict[str, Any]]


def read(path: Path) -> Results:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def best(results: Results) -> dict[str, Results]:
    """The runs of each method, at its best learning rate."""
    chosen = {}
    for method in dict.fromkeys(r["spec"] for r in results):
        by_rate: dict[float, Results] = {}
        for r in results:
            if r["spec"] == method:
                by_rate.setdefault(r["lr"], []).append(r)
        common = set.intersection(*({r["seed"] for r in runs} for runs in by_rate.values()))
        compared = {lr: [r["loss"] for r in runs if not common or r["seed"] in common] for lr, runs in by_rate.items()}
        lr = min(by_rate, key=lambda lr: statistics.mean(compared[lr]))
        chosen[method] = sorted(by_rate[lr], key=lambda r: r["seed"])
    return chosen


def groups(results: Results) -> dict[str, Results]:
    """Results by all settings but the learning rate."""
    found: dict[str, Results] = {}
    for r in results:
        found.setdefault(json.dumps([r["parameters"], r["settings"]], sort_keys=True), []).append(r)
    return found


def table(results: Results) -> str:
    lines = []
    for runs in groups(results).values():
        s, count = runs[0]["settings"], runs[0]["parameters"]
        lines += [
            f"\n{count:,} parameters, {s['workers']} workers, {s['steps']} steps of {s['batch']} × {s['context']} bytes"
            f" under AdamW; delayed methods exchange every {s['every']} steps\n",
            "| method | held-out loss, mean | of each seed | learning rate | bits a parameter and exchange | in all |",
            "|---|---|---|---|---|---|",
        ]
        rows = sorted(best(runs).items(), key=lambda item: -item[1][0]["bits"])
        for method, of_method in rows:
            losses = [r["loss"] for r in of_method]
            bits = statistics.mean(r["bits"] for r in of_method)
            exchanges = s["steps"] / (s["every"] if of_method[0]["delayed"] else 1)
            lines.append(
                f"| {method} | {statistics.mean(losses):.3f} | {', '.join(f'{x:.3f}' for x in losses)} "
                f"| {of_method[0]['lr']:g} | {bits * s['steps'] / exchanges:.3f} | {bits * s['steps']:.3g} |"
            )
    return "\n".join(lines)


def plot(results: Results, path: Path) -> None:
    """The largest group of runs alone."""
    from matplotlib.figure import Figure

    runs = max(groups(results).values(), key=lambda runs: (runs[0]["parameters"], len(runs)))
    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    for number, (method, of_method) in enumerate(best(runs).items()):
        total = statistics.mean(r["bits"] for r in of_method) * runs[0]["settings"]["steps"]
        curve = [statistics.mean(points) for points in zip(*(r["curve"] for r in of_method), strict=True)]
        bits = [total * (i + 1) / len(curve) for i in range(len(curve))]
        axes.plot(bits, curve, label=method, marker="osv^D"[number % 5], linestyle="-" if number < 10 else "--")
    axes.set_xscale("log")
    axes.set_xlabel("bits that a worker has sent for a parameter")
    axes.set_ylabel("held-out loss, nats a byte")
    axes.set_title(f"{runs[0]['parameters']:,} parameters, {runs[0]['settings']['steps']} steps")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--plot", type=Path)
    o = parser.parse_args()
    results = read(o.results)
    if not results:
        raise SystemExit(f"no results in {o.results}")
    print(table(results))
    if o.plot:
        plot(results, o.plot)


if __name__ == "__main__":
    main()
