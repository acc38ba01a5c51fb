"""Time of weight gradients from K of M rows, beside the exact matrix product, in one run.

    python benchmarks/backward.py [--device cuda --dtype bfloat16] [--json benchmarks/results/backward_cpu.json]
    python benchmarks/backward.py --shapes 64,256,256 256,1024,1024 --rounds 15     # where does it stop paying?

A shape is rows, inputs, outputs of a layer. Means, norms, choice, memory and product are all in the time. Each round
measures every contestant once, small ones many times in a row; medians count, and the best is beside them. Columns:

- graph: on a GPU, the same as a CUDA graph, and × exact then: the exact product as a graph, too. Without graphs, Python
  and launches take longer than the work of a small layer;
- floor: the product of K rows alone, and each byte that has to move at the speed of torch's copy of a large tensor;
- join, choose, take: parts of the time, measured apart (on a GPU that of the GPU); product and means are in the rest.

The last lines of a table are whole backward passes of a layer (gradients of weight, bias and input).
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

import gradwire
from backward_clock import PARTS, Clock, Task
from backward_report import progress, show
from gradwire import kernels
from gradwire.backward import POLICIES, RowMemory
from gradwire.backward.autograd import weight_gradient
from gradwire.backward.row_choice import Choice
from gradwire.backward.row_scales import Factors
from machine import processor

SHAPES = ["4096,1024,4096", "16384,4096,4096"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Layer:
    """Tensors of one shape, and what is measured with them: name → task."""

    def __init__(self, shape: tuple[int, int, int], options: argparse.Namespace):
        self.rows, self.width, self.out = shape
        self.options, self.dtype = options, DTYPES[options.dtype]
        torch.manual_seed(0)
        make = {"device": options.device, "dtype": self.dtype}
        self.x = torch.randn(self.rows, self.width, **make)
        self.d = torch.randn(self.rows, self.out, **make)
        # One for all contestants, as it is large; times do not depend on what is in it.
        self.memory = RowMemory(dtype=DTYPES[options.memory_dtype])
        self.tasks: dict[str, Task] = {"exact": lambda: self.d.t() @ self.x}
        for share in options.shares:
            self.tasks[f"product {share}"] = self._product_alone(Choice(share).count(self.rows))
            for policy in options.policies:
                for memory in (self.memory, None):
                    self.tasks[label(policy, share, memory)] = self._approximate(Choice(share, policy), memory)
        linear = torch.nn.Linear(self.width, self.out, **make)
        self.tasks["layer exact"] = self._backward(linear)
        for share in options.shares:
            own = gradwire.backward.convert(copy.deepcopy(linear), k=share)
            own.memory = self.memory
            self.tasks[f"layer {share}"] = self._backward(own)

    def _product_alone(self, count: int) -> Task:
        a, b = self.x[:count], self.d[:count]
        return lambda: b.t() @ a

    def _approximate(self, choice: Choice, memory: RowMemory | None) -> Task:
        return lambda: weight_gradient(self.x, self.d, choice, memory, Factors())

    def _backward(self, layer: torch.nn.Module) -> Task:
        x = self.x.detach().requires_grad_()
        y = layer(x)
        wanted = [x, *layer.parameters()]
        return lambda: torch.autograd.grad(y, wanted, self.d, retain_graph=True)

    def bytes(self, share: float, with_memory: bool) -> int:
        """That have to move: all rows for means and sums, and into the memory; the chosen ones out of it, then zero."""
        of_row, of_slot = self.x.element_size(), DTYPES[self.options.memory_dtype].itemsize
        count, columns = Choice(share).count(self.rows), self.width + self.out
        if with_memory:
            return columns * (self.rows * (2 * of_row + 2 * of_slot) + count * (2 * of_slot + of_row))
        return columns * (self.rows * 2 * of_row + 2 * count * of_row)


def label(policy: str, share: float, memory: RowMemory | None) -> str:
    return f"{policy} {share} {'memory' if memory else 'none'}"


def bandwidth(clock: Clock, device: str) -> float:
    """Bytes per second, read and written, of torch's copy of 256 MB."""
    source, target = (torch.ones(1 << 26, device=device) for _ in range(2))
    clock.repeats(lambda: target.copy_(source))
    return 2 * source.nbytes / min(clock.seconds(lambda: target.copy_(source), 1) for _ in range(10))


def measure(layer: Layer, clock: Clock, speed: float, advance: Callable[[], None]) -> dict[str, Any]:
    eager = {name: (task, clock.repeats(task)) for name, task in layer.tasks.items()}
    # Backward passes run on the stream of their forward pass, which is not one that is recorded.
    recorded = {name: clock.graph(task) for name, task in layer.tasks.items() if not name.startswith("layer")}
    graphs = {name: (task, clock.repeats(task)) for name, task in recorded.items() if task}
    seconds, in_graph = Samples(eager), Samples(graphs)
    parts: dict[str, list[dict[str, float]]] = {name: [] for name in eager if name.startswith(POLICIES)}
    for _ in range(layer.options.rounds):
        for name, (task, repeat) in eager.items():
            seconds.add(name, clock.seconds(task, repeat))
            if name in graphs:
                in_graph.add(name, clock.seconds(*graphs[name]))
            if name in parts:
                parts[name].append(clock.parts(task, repeat))
            advance()
    table = {}
    for name in eager:
        row = table[name] = seconds.row(name)
        if name in graphs:
            row |= {f"graph_{key}": value for key, value in in_graph.row(name).items()}
        if name in parts:
            _, share, memory = name.split()
            product = (in_graph if graphs else seconds).row(f"product {share}")["ms"]
            row["floor_ms"] = product + 1e3 * layer.bytes(float(share), memory == "memory") / speed
            row |= {f"{part}_ms": 1e3 * statistics.median(spent[part] for spent in parts[name]) for part in PARTS}
    return {"rows": layer.rows, "inputs": layer.width, "outputs": layer.out, "tasks": table}


class Samples:
    """Seconds by name, each beside its exact contestant."""

    def __init__(self, names: Iterable[str]):
        self.seconds: dict[str, list[float]] = {name: [] for name in names}

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name].append(seconds)

    def row(self, name: str) -> dict[str, float]:
        mine, exact = self.seconds[name], self.seconds["layer exact" if name.startswith("layer") else "exact"]
        return {
            "ms": 1e3 * statistics.median(mine), "best_ms": 1e3 * min(mine),
            "times_exact": statistics.median(exact) / statistics.median(mine),
            "best_times_exact": min(exact) / min(mine),
        }  # fmt: skip


def run(options: argparse.Namespace) -> dict[str, Any]:
    clock = Clock(options.device)
    speed = bandwidth(clock, options.device)
    cuda = options.device == "cuda"
    result: dict[str, Any] = {
        "command": " ".join(["python benchmarks/backward.py", *without_json(sys.argv[1:])]),
        "device": options.device, "machine": torch.cuda.get_device_name() if cuda else processor(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(), "dtype": options.dtype, "memory_dtype": options.memory_dtype,
        "copy_gb_per_s": speed / 1e9, "shapes": [],
    }  # fmt: skip
    for shape in options.shapes:
        rows, width, out = (int(part) for part in shape.split(","))
        layer = Layer((rows, width, out), options)
        found = kernels.implementation(options.device, "rows")
        result["kernels"] = found.__name__ if found else "gradwire.kernels.reference.rows"
        with progress(f"{rows} rows, {width} → {out}", len(layer.tasks) * options.rounds) as advance:
            result["shapes"].append(measure(layer, clock, speed, advance))
        show(result, result["shapes"][-1])
        del layer
    return result


def without_json(arguments: list[str]) -> list[str]:
    """Where the result went is a matter of the machine, not of the measurement."""
    at = arguments.index("--json") if "--json" in arguments else len(arguments)
    return arguments[:at] + arguments[at + 2 :]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32")
    parser.add_argument("--memory-dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="ROWS,INPUTS,OUTPUTS")
    parser.add_argument("--shares", nargs="+", type=float, default=[0.25, 0.125], metavar="K/M")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="keep the result in this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    result = run(options)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
