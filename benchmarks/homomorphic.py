"""Speed and size of the homomorphic code on one core, beside torch's own copy, in one run.

    python benchmarks/homomorphic.py [--words 10500000] [--save]

GB/s are of dense fp32: what a sum of the whole gradient would have to move. Each round measures everything once; the
table has the medians of the time of the thread that does the work.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from gradwire import kernels
from gradwire.homomorphic import code
from gradwire.homomorphic.grid import by_largest
from gradwire.homomorphic.plan import choose
from machine import processor

HEADERS = 11  # words of a message beside index and sketch
SUPPORTS = {"18.5%": (0.185, 1), "5%": (0.05, 1), "1%": (0.01, 1), "0.1%": (0.001, 1), "5% of rows of 64": (0.05, 64),
            "1% of rows of 64": (0.01, 64)}  # fmt: skip
Tasks = dict[str, Callable[[], object]]


def contestants(words: int) -> tuple[Tasks, dict[str, float]]:
    """Name → what to time, and name → how many times smaller than dense fp32 it is, everything counted."""
    generator = torch.Generator().manual_seed(0)
    gradient, memory = torch.randn(words, generator=generator), torch.randn(words, generator=generator)
    out, sum_ = torch.empty(words), torch.empty(words)
    tasks: Tasks = {"torch copy": lambda: sum_.copy_(gradient)}
    sizes: dict[str, float] = {}
    for name, (density, run) in SUPPORTS.items():
        here = (torch.rand(-(-words // run), generator=generator) < density).repeat_interleave(run)[:words]
        sparse = torch.where(here, gradient, 0.0)
        grid = by_largest(129, 32, 4)
        arguments = (sparse, memory, out, 1.0, grid.step, grid.most, 32, None)
        positions, values, _, _ = kernels.quantize_all(*arguments)
        plan = choose(words, code.blocks(positions, words), 1)
        index, sketch = code.encode(plan, positions, values)
        found = code.decode(plan, index, sketch)
        assert torch.equal(found.positions, positions) and torch.equal(found.values, values)
        label = f"{name}, {plan.index}, {plan.lanes} lanes"
        sizes[label] = words / (len(index) + len(sketch) + HEADERS)
        tasks[f"{label}: quantize"] = lambda arguments=arguments: kernels.quantize_all(*arguments)
        tasks[f"{label}: encode"] = lambda p=plan, a=positions, b=values: code.encode(p, a, b)
        tasks[f"{label}: decode"] = lambda p=plan, a=index, b=sketch: code.decode(p, a, b)
        tasks[f"{label}: put"] = lambda a=positions, b=values, s=grid.step: kernels.put_words(sum_, a, b, 32, s)
    return tasks, sizes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--words", type=int, default=10_500_000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--save", action="store_true", help="keep the results in benchmarks/results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tasks, sizes = contestants(options.words)
    times: dict[str, list[float]] = {name: [] for name in tasks}
    for _ in range(options.rounds):
        for name, task in tasks.items():
            start = time.thread_time()
            task()
            times[name].append(time.thread_time() - start)
    medians = {name: statistics.median(each) for name, each in times.items()}
    print(f"{options.words} words, {processor()}\n")
    print(f"{'':52}{'ms':>8}{'GB/s':>8}{'× copy':>8}")
    for name, seconds in medians.items():
        rate = 4e-9 * options.words / seconds
        print(f"{name:52}{1e3 * seconds:8.2f}{rate:8.1f}{medians['torch copy'] / seconds:8.2f}")
    print()
    for name, ratio in sizes.items():
        print(f"{name:52}{ratio:8.1f} times smaller than dense fp32")
    if options.save:
        path = Path(__file__).parent / "results/homomorphic.json"
        result = {"machine": processor(), "words": options.words, "seconds": medians, "ratio": sizes}
        path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
