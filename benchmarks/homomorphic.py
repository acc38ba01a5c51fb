"""Speed and size of the homomorphic code on one core or on a GPU, beside torch's own copy, in one run.

    python benchmarks/homomorphic.py [--words 10500000] [--save]
    python benchmarks/homomorphic.py --device cuda --words 67108864

GB/s are of dense fp32: what a sum of the whole gradient would have to move. Each round measures everything once; the
table has the medians of the time of the thread that does the work, or of whole calls until the GPU is done.
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


def contestants(words: int, device: str) -> tuple[Tasks, dict[str, float]]:
    """Name → what to time, and name → how many times smaller than dense fp32 it is, everything counted."""
    generator = torch.Generator().manual_seed(0)
    gradient, memory = (torch.randn(words, generator=generator).to(device) for _ in range(2))
    out, sum_ = torch.empty_like(gradient), torch.empty_like(gradient)
    tasks: Tasks = {"torch copy": lambda: sum_.copy_(gradient)}
    sizes: dict[str, float] = {}
    for name, (density, run) in SUPPORTS.items():
        here = (torch.rand(-(-words // run), generator=generator) < density).repeat_interleave(run)[:words]
        sparse = torch.where(here.to(device), gradient, 0.0)
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
        bitmap, everything = kernels.index_bitmap(positions, 1, words), (words, 1, positions, values)
        tasks[f"{label}: align"] = lambda b=bitmap, a=everything: kernels.align_words(b, *a)
        tasks[f"{label}: put"] = lambda a=positions, b=values, s=grid.step: kernels.put_words(sum_, a, b, 32, s)
    for share in (0.05, 0.01):
        count = int(share * words)
        tasks[f"select {share:.0%}"] = lambda n=count: kernels.select(gradient, memory, out, 1.0, n)
    return tasks, sizes


def seconds_of(task: Callable[[], object], device: str) -> float:
    if device == "cpu":
        start = time.thread_time()
        task()
        return time.thread_time() - start
    torch.cuda.synchronize()
    start = time.perf_counter()
    task()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--words", type=int, default=10_500_000)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--save", action="store_true", help="keep the results in benchmarks/results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tasks, sizes = contestants(options.words, options.device)
    times: dict[str, list[float]] = {name: [] for name in tasks}
    for _ in range(options.rounds):
        for name, task in tasks.items():
            times[name].append(seconds_of(task, options.device))
    medians = {name: statistics.median(each) for name, each in times.items()}
    machine = processor() if options.device == "cpu" else torch.cuda.get_device_name()
    print(f"{options.words} words, {machine}\n")
    print(f"{'':52}{'ms':>8}{'GB/s':>8}{'× copy':>8}")
    for name, seconds in medians.items():
        rate = 4e-9 * options.words / seconds
        print(f"{name:52}{1e3 * seconds:8.2f}{rate:8.1f}{medians['torch copy'] / seconds:8.2f}")
    print()
    for name, ratio in sizes.items():
        print(f"{name:52}{ratio:8.1f} times smaller than dense fp32")
    if options.save:
        name = "homomorphic" if options.device == "cpu" else "homomorphic_gpu"
        path = Path(__file__).parent / f"results/{name}.json"
        result = {"machine": machine, "words": options.words, "seconds": medians, "ratio": sizes}
        path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
