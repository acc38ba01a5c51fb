"""Tables and plots of benchmarks/backward_policies.py: results/backward_policies.md and docs/images/backward_*.png.

python benchmarks/backward_policies_report.py
python benchmarks/backward_policies_report.py --results FILE --show      # only prints the tables
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from backward_policies import EXACT, POLICIES, RATES, RESULTS, Run
from backward_policies_plots import DRAWINGS, Case, Curves, Results, finals, plot
from backward_problems import PROBLEMS, buildings

IMAGES = Path(__file__).parent.parent / "docs" / "images"
Line = dict[str, Any]


def load(path: Path) -> tuple[list[Line], list[str]]:
    """Runs in the order of the benchmark, and the machines they come from."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    runs = [asdict(Run(*line["run"])) | line for line in lines if "run" in line]
    runs.sort(key=lambda run: (place(run), run["seed"]))
    machines = {f"{line['machine']}, PyTorch {line['torch']}" for line in lines if "machine" in line}
    return runs, sorted(machines)


def by_case(runs: list[Line]) -> Results:
    """Curves; NaN where a training has diverged."""
    results: Results = {}
    for run in runs:
        cases = results.setdefault((run["problem"], run["optimizer"]), {})
        curve = [math.nan if value is None else value for value in run["curve"]]
        cases.setdefault((run["policy"], run["decay"], run["share"]), []).append(curve)
    return results


def place(run: Line) -> tuple[Any, ...]:
    policy = [EXACT, *POLICIES].index(run["policy"])
    return list(PROBLEMS).index(run["problem"]), list(RATES).index(run["optimizer"]), policy, -run["decay"]


def cell(curves: Curves | None, measure: str) -> str:
    """Mean ± σ over the seeds."""
    if not curves:
        return ""
    ends = finals(curves)
    lost = sum(map(math.isnan, ends))
    if lost:
        return f"diverged, {lost} of {len(ends)}"
    scale, digits = (100, 1) if measure == "accuracy" else (1, 2)
    mean, sigma = scale * statistics.fmean(ends), scale * (statistics.stdev(ends) if len(ends) > 1 else 0.0)
    return f"{mean:.{digits}f} ± {sigma:.{digits}f}" if mean < 1000 else f"{mean:.1e} ± {sigma:.1e}"


def table(name: str, cases: dict[Case, Curves]) -> str:
    problem = PROBLEMS[name]
    shares = sorted({share for policy, _, share in cases if policy != EXACT}, reverse=True)
    head = ["rows", "memory", *(f"K/M = {fraction(share)}" for share in shares), "runs"]
    lines = [head, ["---"] * len(head)]
    for policy, decay in dict.fromkeys(case[:2] for case in cases):
        if policy == EXACT:
            exact = cases[EXACT, 0.0, 1.0]
            same = cell(exact, problem.measure)
            lines.append([EXACT, "", *[f"**{same}**"] * len(shares), str(len(exact))])
            continue
        memory = f"decay {decay:g}" if decay else "none"
        found = [cases.get((policy, decay, share)) for share in shares]
        counts = sorted({len(curves) for curves in found if curves})
        cells = [cell(curves, problem.measure) for curves in found]
        lines.append([policy, memory, *cells, "–".join(map(str, counts))])
    return markdown(lines)


def conditions(name: str, optimizer: str) -> str:
    problem = PROBLEMS[name]
    rate = f"{problem.lr * RATES[optimizer]:g}"
    how = {"sgd": "SGD, the paper's form", "momentum": "SGD with momentum 0.9, default form",
           "adam": "Adam, default form"}[optimizer]  # fmt: skip
    what = "validation accuracy, %" if problem.measure == "accuracy" else "validation MSE"
    more = f"; the least-squares fit has {floor():.2f}" if name == "buildings" else ""
    return f"{what}; batches of {problem.batch}, {problem.epochs} epochs, {how}, learning rate {rate}{more}."


def floor() -> float:
    """Validation MSE of the best linear fit of the training rows."""
    data = buildings()
    inputs, tests = (np.c_[part, np.ones(len(part))] for part in (data.inputs, data.test_inputs))
    weights = np.linalg.lstsq(inputs, data.targets.numpy(), rcond=None)[0]
    return float(np.mean((tests @ weights - data.test_targets.numpy()) ** 2))


def slots(runs: list[Line]) -> str:
    """How large the largest remembered product is at the end, as a gradient: the median over seeds."""
    sizes: dict[tuple[str, str, float], dict[float, list[float]]] = {}
    for run in runs:
        if run["optimizer"] == "sgd" and run.get("largest_slot") is not None:
            case = sizes.setdefault((run["problem"], run["policy"], run["decay"]), {})
            case.setdefault(run["share"], []).append(run["largest_slot"] / PROBLEMS[run["problem"]].lr)
    shares = sorted({share for case in sizes.values() for share in case}, reverse=True)
    lines = [["problem", "rows", "decay", *(f"K/M = {fraction(share)}" for share in shares)]]
    lines.append(["---"] * len(lines[0]))
    for (name, policy, decay), case in sizes.items():
        cells = [f"{statistics.median(case[share]):.2g}" if share in case else "" for share in shares]
        lines.append([name, policy, f"{decay:g}", *cells])
    return markdown(lines)


def markdown(lines: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def fraction(share: float) -> str:
    return str(Fraction(share).limit_denominator(144))


def document(runs: list[Line], machines: list[str]) -> str:
    parts = [
        "# Mem-AOP-GD: policies, memory and K/M",
        f"""Written by `python benchmarks/backward_policies_report.py` from the runs of
`python benchmarks/backward_policies.py` (backward_policies.jsonl); {"; ".join(machines)}. One linear layer; mean ± σ of
the last validation score over runs with different seeds (initialisation, order, choice). The regression is made up: it
has the sizes of the paper's set, not its figures.""",
    ]
    for (name, optimizer), cases in by_case(runs).items():
        parts += [f"## {PROBLEMS[name].title}", conditions(name, optimizer), table(name, cases)]
    parts += ["## The largest product in the memory at the end", f"{slots.__doc__}", slots(runs)]
    return "\n\n".join(parts) + "\n"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FILE")
    parser.add_argument("--show", action="store_true", help="print the tables, and write nothing")
    return parser.parse_args()


if __name__ == "__main__":
    arguments = parse()
    found, on = load(arguments.results)
    if arguments.show:
        print(document(found, on))
    else:
        arguments.results.with_suffix(".md").write_text(document(found, on))
        for name, draw in DRAWINGS.items():
            path = IMAGES / f"backward_{name}.png"
            plot(by_case(found), draw, path)
            print(path)
