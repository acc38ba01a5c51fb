"""The table and the plot of benchmarks/backward_models.py.

python benchmarks/backward_models_report.py    # writes results/backward_models.md and docs/images/backward_models.png
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from backward_training import EXACT, settings

ROOT = Path(__file__).parent
RESULTS = ROOT / "results" / "backward_models.jsonl"
DOCUMENT = ROOT / "results" / "backward_models.md"
IMAGE = ROOT.parent / "docs" / "images" / "backward_models.png"
SAME = ("task", "size", "device", "dtype", "width", "depth", "batch", "context", "steps", "lr")
HEAD = (
    "k", "rows by", "decay", "exact layers", "runs", "training loss", "validation loss", "against exact", "accuracy",
    "rows held, MB", "peak, MB", "backward, ms", "step, ms",
)  # fmt: skip
TITLES = {"text": "Transformer, bytes of Python's standard library", "mixer": "MLP-Mixer, CIFAR-10"}
Record = dict[str, Any]


def load(path: Path) -> dict[tuple[Any, ...], dict[str, list[Record]]]:
    """Records by what they have in common, then by variant."""
    groups: dict[tuple[Any, ...], dict[str, list[Record]]] = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        groups.setdefault(tuple(record[name] for name in SAME), {}).setdefault(record["variant"], []).append(record)
    return groups


def order(variant: str) -> tuple[Any, ...]:
    s = settings(variant)
    return (-float(s.get("k", 2)), -float(s.get("batch", 1)), s["policy"], -float(s.get("decay", 0)), variant)


def share(k: str) -> str:
    return f"1/{1 / float(k):g}"


def name(s: dict[str, str]) -> str:
    """As in the legend of the plot; the share of rows is the same for all there."""
    if "k" not in s:
        return f"exact, {s['batch']} of the batch" if "batch" in s else EXACT
    return f"{policy(s)}, " + (f"decay {s['decay']}" if float(s["decay"]) else "no memory")


def policy(s: dict[str, str]) -> str:
    return s["policy"] + (" as in the paper" if s.get("centre") == "no" else "")


def of_kind(records: list[Record], kind: str) -> list[Record]:
    return [record for record in records if record["kind"] == kind]


def spread(values: list[float], digits: int = 3) -> str:
    """Mean, and the standard deviation where there is one."""
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{deviation}"


def row(variant: str, records: list[Record], exact: list[Record]) -> list[str]:
    s, runs, timed = settings(variant), of_kind(records, "train"), of_kind(records, "times")
    layers = f"all but `{s['only']}`" if "only" in s else f"`{s['leave']}`" if "leave" in s else ""
    names = [share(s["k"]), policy(s), s["decay"], layers] if "k" in s else ["1", name(s), "", ""]
    cells = ["", "", "", "", ""]
    if runs:
        losses, by_seed = [r["loss"] for r in runs], {r["seed"]: r["loss"] for r in exact}
        worse = [r["loss"] - by_seed[r["seed"]] for r in runs if r["seed"] in by_seed and variant != EXACT]
        cells = [
            str(len(runs)), spread([r["curve"][-1][1] for r in runs]), spread(losses),
            f"{statistics.fmean(worse):+.3f}" if worse else "", f"{statistics.fmean(r['accuracy'] for r in runs):.1%}",
        ]  # fmt: skip
    held = max((r["memory_mb"] for r in records), default=0)
    peak = max((r.get("peak_mb") or 0 for r in runs), default=0)
    cells += [f"{held:,.0f}" if held else "", f"{peak:,}" if peak else ""]
    if not timed:
        return [*names, *cells, "", ""]
    last = timed[-1]
    pairs = [(last[EXACT][part], last["converted"][part]) for part in ("backward_ms", "step_ms")]
    return [*names, *cells, *(f"{own:.1f} for {plain:.1f} ({plain / own:.2f} ×)" for plain, own in pairs)]


def rows(group: dict[str, list[Record]]) -> list[list[str]]:
    exact = of_kind(group.get(EXACT, []), "train")
    return [row(variant, group[variant], exact) for variant in sorted(group, key=order)]


def conditions(key: tuple[Any, ...], group: dict[str, list[Record]]) -> str:
    same = dict(zip(SAME, key, strict=True))
    any_run = next((r for records in group.values() for r in records if r["kind"] == "train"), None)
    of_run = f"{any_run['parameters'] / 1e6:.2f} M parameters, {any_run['data']}, " if any_run else ""
    machines = sorted({f"{r['machine']}, PyTorch {r['torch']}" for records in group.values() for r in records})
    length = f" × {same['context']} bytes" if same["context"] else " images"
    return (
        f"Width {same['width']}, {same['depth']} blocks, {of_run}batches of {same['batch']}{length}, {same['steps']} "
        f"steps of AdamW (learning rate {same['lr']:g}, warm-up and cosine), {same['dtype']}; {' and '.join(machines)}."
    )


def document(groups: dict[tuple[Any, ...], dict[str, list[Record]]]) -> str:
    parts = [
        "# Whole trainings with weight gradients from K of M rows",
        "From `python benchmarks/backward_models.py`, by `python benchmarks/backward_models_report.py`. Equal seeds "
        "have equal weights to begin with and equal batches. Training loss: mean of the last fiftieth of the steps. "
        "Times: medians, an exact and a converted model step by step in turn; × is how many times faster.",
    ]
    for key, group in groups.items():
        lines = [HEAD, ["---"] * len(HEAD), *rows(group)]
        parts += [f"## {TITLES[key[0]]}: {key[1]}, {key[2]}", conditions(key, group)]
        parts.append("\n".join("| " + " | ".join(line) + " |" for line in lines))
    return "\n\n".join(parts) + "\n"


def plot(groups: dict[tuple[Any, ...], dict[str, list[Record]]], share_of_rows: float, path: Path) -> None:
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    trained = {key: group for key, group in groups.items() if of_kind(group.get(EXACT, []), "train")}
    most = {key[:4]: key for key in sorted(trained, key=lambda key: len(trained[key]))}  # not the tries of other rates
    shown = {key: group for key, group in trained.items() if key in most.values()}
    lines = (len(shown) + 1) // 2
    figure, axes = pyplot.subplots(lines, 2, figsize=(12, 4.5 * lines), squeeze=False)
    for axis in axes.flat[len(shown) :]:
        axis.remove()
    names = sorted({name(settings(variant)) for group in shown.values() for variant in group} - {EXACT})
    colours = {EXACT: "black"} | {label: f"C{i}" for i, label in enumerate(names)}  # the same in all panels
    for axis, (key, group) in zip(axes.flat, shown.items(), strict=False):
        for variant in sorted(group, key=order):
            s, runs = settings(variant), of_kind(group[variant], "train")
            if not runs or "leave" in s or "only" in s or float(s.get("k", share_of_rows)) != share_of_rows:
                continue
            steps = [step for step, _ in runs[0]["curve"]]
            losses = [
                statistics.fmean(values) for values in zip(*([p[1] for p in r["curve"]] for r in runs), strict=True)
            ]
            label = name(s)
            axis.plot(steps, losses, label=label, color=colours[label], linewidth=2 if variant == EXACT else 1)
        low = min(r["curve"][-1][1] for r in of_kind(group[EXACT], "train"))
        first = of_kind(group[EXACT], "train")[0]["curve"][1][1]
        axis.set(
            xlabel="step", ylabel="training loss", title=f"{TITLES[key[0]]}\n{key[1]}, K = M/{1 / share_of_rows:g}"
        )
        axis.set_ylim(low - 0.05 * (first - low), first)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--document", type=Path, default=DOCUMENT)
    parser.add_argument("--image", type=Path, default=IMAGE)
    parser.add_argument("--k", type=float, default=0.25, help="of the curves in the plot")
    options = parser.parse_args()
    groups = load(options.results)
    options.document.write_text(document(groups))
    plot(groups, options.k, options.image)
    print(document(groups))


if __name__ == "__main__":
    main()
