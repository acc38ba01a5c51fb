"""Mem-AOP-GD: which rows to take, and whether to remember the others. One linear layer, three sets of data.

python benchmarks/backward_policies.py --problems digits buildings
python benchmarks/backward_policies.py --problems fashion-published fashion --fashion-mnist FOLDER --jobs 16

Whole trainings through gradwire.backward.convert: exact, and every policy (as in the paper; centred, as is gradwire's
default) × decay of the memory (0 is without) × K/M, with 10 seeds (initialisation, order and choice). With SGD it is
the paper's form; other optimizers have the default form. Each run appends a JSON line to --out when it ends, and what
is there already is not run again: it can be stopped at any time. benchmarks/backward_problems.py has the problems,
benchmarks/backward_policies_report.py makes the tables and plots.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from backward_problems import PROBLEMS, Problem, load
from gradwire import backward
from machine import processor

RESULTS = Path(__file__).parent / "results" / "backward_policies.jsonl"
POINTS = 10  # of a curve, at equal distances; the last is the end of the training
EXACT, CENTRED = "exact", ", centred"
POLICIES = [policy + how for how in ("", CENTRED) for policy in backward.POLICIES]  # as in the paper, and by default
RATES = {"sgd": 1.0, "momentum": 0.1, "adam": 0.025}  # of the rate of SGD


@dataclass(frozen=True)
class Run:
    problem: str
    optimizer: str
    policy: str
    decay: float
    share: float
    seed: int

    @property
    def key(self) -> tuple[Any, ...]:
        return tuple(asdict(self).values())


def train(folder: Path, run: Run) -> dict[str, Any]:
    """One training; its validation score over time, and the largest outer product that is left in the memory."""
    torch.set_num_threads(1)
    problem = PROBLEMS[run.problem]
    data = load(problem.data, folder)
    torch.manual_seed(run.seed)
    model = torch.nn.Linear(data.inputs.shape[1], problem.classes)
    optimizer = build_optimizer(run.optimizer, model, problem.lr)
    if run.policy != EXACT:
        papers_form = optimizer if run.optimizer == "sgd" else None
        policy, centred = run.policy.removesuffix(CENTRED), run.policy.endswith(CENTRED)
        backward.convert(model, run.share, policy, run.decay, centre=centred, optimizer=papers_form)
    order = torch.Generator().manual_seed(run.seed)  # of its own: the same rows in the same order for all policies
    at = {round(problem.epochs * (i + 1) / POINTS) for i in range(POINTS)}
    curve, seconds = [], 0.0
    for epoch in range(1, problem.epochs + 1):
        started = time.perf_counter()
        one_epoch(problem, model, optimizer, data.inputs, data.targets, order)
        seconds += time.perf_counter() - started
        if epoch in at:
            with torch.no_grad():
                curve.append(finite(problem.score(model(data.test_inputs), data.test_targets)))
    steps = problem.epochs * math.ceil(len(data.inputs) / problem.batch)
    slots = {"largest_slot": finite(largest_slot(model))} if run.policy != EXACT and run.decay else {}
    return {"run": run.key, "curve": curve, **slots, "us": round(seconds / steps * 1e6)}


def one_epoch(
    problem: Problem, model: torch.nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor,
    targets: torch.Tensor, order: torch.Generator,
) -> None:  # fmt: skip
    loss = problem.loss
    for rows in torch.randperm(len(inputs), generator=order).split(problem.batch):
        optimizer.zero_grad()
        loss(model(inputs.index_select(0, rows)), targets.index_select(0, rows)).backward()
        optimizer.step()


def build_optimizer(name: str, model: torch.nn.Module, lr: float) -> torch.optim.Optimizer:
    lr *= RATES[name]
    if name == "adam":
        return torch.optim.Adam(model.parameters(), lr)
    return torch.optim.SGD(model.parameters(), lr, momentum=0.9 if name == "momentum" else 0, foreach=False)


def largest_slot(model: torch.nn.Module) -> float:
    """The largest ‖A_j‖·‖B_j‖ in the memory; in the paper's form it has the size of a step, not of a gradient."""
    memory = backward.converted(model)[""].memory
    assert memory is not None and memory.inputs is not None and memory.outputs is not None
    return (memory.inputs.norm(dim=1) * memory.outputs.norm(dim=1)).max().item()


def finite(value: float) -> float | None:
    """JSON has no infinity; four digits are more than the seeds agree on."""
    return float(f"{value:.4g}") if math.isfinite(value) else None


def wanted(options: argparse.Namespace) -> list[Run]:
    """Seed by seed, so that what is there when it is stopped is a comparison."""
    runs: list[Run] = []
    for seed, problem, optimizer in product(range(options.seeds), options.problems, options.optimizers):
        runs.append(Run(problem, optimizer, EXACT, 0.0, 1.0, seed))
        shares = options.shares or PROBLEMS[problem].shares
        runs += [Run(problem, optimizer, *rest, seed) for rest in product(options.policies, options.decays, shares)]
    return runs


def done(path: Path) -> set[tuple[Any, ...]]:
    if not path.exists():
        return set()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {tuple(line["run"]) for line in lines if "run" in line}


def run_all(options: argparse.Namespace) -> None:
    before = done(options.out)
    runs = [run for run in wanted(options) if run.key not in before]
    print(f"{len(runs)} runs, {options.jobs} at a time; {len(before)} are in {options.out}", flush=True)
    if not runs:
        return
    options.out.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with options.out.open("a") as out, multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        print(json.dumps({"machine": processor(), "torch": torch.__version__}), file=out, flush=True)
        for count, result in enumerate(pool.imap_unordered(partial(train, options.fashion_mnist), runs), 1):
            print(json.dumps(result, separators=(",", ":")), file=out, flush=True)
            show_progress(count, len(runs), time.monotonic() - started)


def show_progress(count: int, total: int, seconds: float) -> None:
    """On a terminal one line that is written over, in a log one line for each tenth."""
    bar = "█" * (30 * count // total)
    line = f"{bar:<30} {count}/{total}, {seconds:.0f} s, {seconds / count * (total - count):.0f} s to go"
    if sys.stderr.isatty():
        print(f"\r{line}   ", end="\n" if count == total else "", file=sys.stderr, flush=True)
    elif count * 10 // total != (count - 1) * 10 // total:
        print(line, file=sys.stderr, flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", nargs="+", default=list(PROBLEMS), choices=list(PROBLEMS), metavar="PROBLEM",
                        help=f"of {', '.join(PROBLEMS)}; by default all")  # fmt: skip
    parser.add_argument("--policies", nargs="+", default=POLICIES, choices=POLICIES, metavar="POLICY",
                        help=f"of {'; '.join(POLICIES)}; by default all")  # fmt: skip
    parser.add_argument("--decays", nargs="+", type=float, default=[1.0, 0.0], metavar="DECAY",
                        help="of the memory; 0 is without memory")  # fmt: skip
    parser.add_argument("--shares", nargs="+", type=float, metavar="K/M", help="by default those of the problem")
    parser.add_argument("--optimizers", nargs="+", default=["sgd"], choices=list(RATES))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=1, help="processes, of one thread each")
    parser.add_argument("--fashion-mnist", type=Path, default=Path("data"), metavar="FOLDER")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FILE")
    return parser.parse_args()


if __name__ == "__main__":
    run_all(parse())
