"""Tables and plots of benchmarks/federated.py: docs/federated-results.md and docs/images/federated-*.svg.

python benchmarks/federated_report.py
python benchmarks/federated_report.py --results FOLDER --show      # only prints the tables
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from federated_runs import CHOICE, CONTESTANTS, PLAIN, SETTINGS, describe

ROOT = Path(__file__).parent
RESULTS = ROOT / "results" / "federated"
DOCUMENT = ROOT.parent / "docs" / "federated-results.md"
IMAGES = ROOT.parent / "docs" / "images"
SHARE = 0.95  # of the uncompressed accuracy that bytes are counted to
HEAD = (
    "run", "accuracy", "points lost", "upload, MB", "fewer", "download, MB", "fewer",
    f"upload to {SHARE:.0%}, MB", "fewer",
)  # fmt: skip
Result = dict[str, Any]


def load(folder: Path) -> dict[str, dict[str, Result]]:
    """Results by setting and contestant, in the order of the benchmark; contestants that were tried come last."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    order = {name: i for i, name in enumerate(CONTESTANTS)}
    found.sort(key=lambda r: (list(SETTINGS).index(r["setting"]), order.get(r["contestant"], len(order))))
    settings: dict[str, dict[str, Result]] = {}
    for result in found:
        settings.setdefault(result["setting"], {})[result["contestant"]] = result
    return settings


def accuracy(result: Result) -> float:
    return result["history"][-1]["accuracy"]


def upload_to(result: Result, goal: float) -> float | None:
    """Bytes uploaded by all clients until the model was this accurate; None if it never was."""
    return next((point["upload_bytes"] for point in result["history"] if point["accuracy"] >= goal), None)


def rows(results: dict[str, Result]) -> list[list[str]]:
    plain = results.get(PLAIN)
    return [row(name, result, plain) for name, result in results.items()]


def row(name: str, result: Result, plain: Result | None) -> list[str]:
    cells = [f"`{name}`" if name in CONTESTANTS else f"`{result['codec']}`", f"{100 * accuracy(result):.2f}%"]
    if plain is None:
        return [
            *cells,
            "",
            f"{result['upload_bytes'] / 1e6:.2f}",
            "",
            f"{result['download_bytes'] / 1e6:.2f}",
            "",
            "",
            "",
        ]
    cells.append(f"{100 * (accuracy(plain) - accuracy(result)):+.2f}".replace("-", "−"))
    for way in ("upload_bytes", "download_bytes"):
        cells += [megabytes(result[way]), times(plain[way], result[way])]
    goal = SHARE * accuracy(plain)
    needed, by_plain = upload_to(result, goal), upload_to(plain, goal)
    if needed is None:
        return [*cells, "not reached", ""]
    return [*cells, megabytes(needed), times(by_plain, needed)]


def megabytes(count: float) -> str:
    return f"{count / 1e6:,.0f}" if count >= 1e8 else f"{count / 1e6:.2f}"


def times(plain: float | None, own: float) -> str:
    return f"{plain / own:.1f} ×" if plain and own else ""


def table(results: dict[str, Result]) -> str:
    lines = [HEAD, ["---"] * len(HEAD), *rows(results)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def conditions(results: dict[str, Result]) -> str:
    """What all runs of a setting have in common."""
    first = next(iter(results.values()))
    s = first["settings"]
    model = {"cifar10": "ResNet-20"}.get(s["task"], "a small conv net")
    epochs = f"{s['local_epochs']} local epoch{'s' if s['local_epochs'] > 1 else ''}"
    return (
        f"{model}, {first['parameters']:,} parameters; {s['rounds']} rounds, {epochs} in batches of {s['batch_size']}, "
        f"SGD with momentum, learning rate {s['lr']} along half a cosine over the rounds, seed {s['seed']}; "
        f"{first['machine']}, PyTorch {first['torch']}."
    )


def specs(settings: dict[str, dict[str, Result]]) -> str:
    """What the names stand for, from the results themselves."""
    lines = []
    for name in CONTESTANTS:
        result = next((results[name] for results in settings.values() if name in results), None)
        if result is None or name == PLAIN:
            continue
        own = result["settings"]
        more = [f"downloads by `{own['download']}`"] if own["download"] else []
        more += [f"rate by `{own['rate']}`"] if own["rate"] else []
        note = CONTESTANTS[name].note
        lines.append(
            f"- `{name}`: `{result['codec']}`{', ' + ', '.join(more) if more else ''}{'; ' + note if note else ''}"
        )
    return "\n".join(lines)


def plot(name: str, results: dict[str, Result], folder: Path) -> Path:
    """Accuracy over the bytes that all clients have uploaded."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "gradwire"  # the same file for the same results
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for contestant, result in results.items():
        points = [p for p in result["history"] if p["upload_bytes"]]
        style = {"color": "black", "linewidth": 2} if contestant == PLAIN else {}
        axes.plot([p["upload_bytes"] / 1e6 for p in points], [100 * p["accuracy"] for p in points],
                  label=contestant, **style)  # fmt: skip
    if PLAIN in results:
        axes.axhline(100 * SHARE * accuracy(results[PLAIN]), color="grey", linestyle=":", linewidth=1)
    axes.set(xscale="log", xlabel="uploaded by all clients, MB", ylabel="accuracy, %", title=describe(name))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"federated-{name}.svg"
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    pyplot.close(figure)
    return path


def document(settings: dict[str, dict[str, Result]]) -> str:
    parts = [
        "# Federated learning: accuracy and bytes",
        f"""Written by `python benchmarks/federated_report.py` from the results of `python benchmarks/federated.py`
(benchmarks/results/federated/, one file for each run): whole trainings by the apps of `gradwire train --federated`,
with Flower's FedAvg and Flower's messages. Bytes are the lengths of those messages as they travel, all of them in the
run, heads, names and metrics included; *fewer* is how many times fewer than FedAvg with raw arrays (`{PLAIN}`) sends in
the same rounds. *Upload to {SHARE:.0%}* is what clients had uploaded when the model first had {SHARE:.0%} of the
accuracy that `{PLAIN}` has at the end. How recipes work: [flower.md](flower.md), [recipes.md](recipes.md).""",
        specs(settings),
    ]
    for name, results in settings.items():
        chosen = {c: r for c, r in results.items() if c in CHOICE[name]}
        parts += [
            f"## {describe(name)}", conditions(chosen), table(chosen),
            f"![Accuracy over uploaded bytes](images/federated-{name}.svg)",
        ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    parser.add_argument("--show", action="store_true", help="print tables of all results, and write nothing")
    return parser.parse_args()


if __name__ == "__main__":
    arguments = parse()
    all_results = load(arguments.results)
    if arguments.show:
        for setting, those in all_results.items():
            print(f"\n{describe(setting)}\n{table(those)}")
    else:
        DOCUMENT.write_text(document(all_results))
        for setting, those in all_results.items():
            print(plot(setting, {c: r for c, r in those.items() if c in CHOICE[setting]}, IMAGES))
        print(DOCUMENT)
