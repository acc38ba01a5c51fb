"""Speed of the sparse codecs on one core, beside torch.topk and a copy, in one run.

    python benchmarks/sparse.py [--entries 16777216] [--save]

Everything is a multiple of torch's own copy of the same fp32 tensor, measured in the same loop: shared machines are
noisy, ratios less so. Each round measures every contestant once; the table has the medians. Times are those of the
thread that does the work.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

import gradwire
from gradwire import codecs
from gradwire.compress import golomb
from gradwire.convert.sparse import sent_positions
from gradwire.kernels import cpu
from machine import processor

BETA = 0.67  # about what gradients have
SHARES = (0.01, 0.001)
NAMES = ("sbc", "stc", "topk")
Tasks = dict[str, Callable[[], object]]


def gennorm_like(n: int, seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    magnitude = torch.distributions.Gamma(1 / BETA, 1.0).sample((n,)).pow(1 / BETA)
    return magnitude * torch.sign(torch.randn(n)) * 1e-3


def contestants(n: int) -> tuple[Tasks, dict[str, float]]:
    """Name → what to time, and name → bits per position, everything counted."""
    gradient, spare = gennorm_like(n), torch.empty(n)
    magnitudes = gradient.abs()
    frame = torch.empty(gradwire.codec("topk").max_frame_bytes(gradient), dtype=torch.uint8)
    tasks: Tasks = {"torch copy": lambda: spare.copy_(gradient), "torch zero": spare.zero_}
    bits = {}
    for p in SHARES:
        count = share_of(p, n)
        tasks[f"torch.topk {p:.1%}"] = lambda count=count: torch.topk(magnitudes, count)
        for name in NAMES:
            codec = gradwire.codec(f"{name}:p={p}")
            memory = torch.zeros(n)
            for _ in range(3):  # a memory as it is after some steps
                length = codec.encode_into(gradient, frame, residual=memory)
            fixed = frame[:length].clone()
            bits[f"{name} {p:.1%} encode_into"] = 8 * length / sent_positions(fixed).numel()
            tasks[f"{name} {p:.1%} encode_into"] = lambda codec=codec, memory=memory: codec.encode_into(
                gradient, frame, residual=memory
            )
            tasks[f"{name} {p:.1%} decode(out=)"] = lambda fixed=fixed: codecs.decode(fixed, out=spare)
            header, payload = codecs.open_frame(codecs.as_bytes(fixed))
            tasks[f"{name} {p:.1%} decode, add"] = lambda header=header, payload=payload: codecs.decode_payload(
                header, payload, spare, 1.0, True
            )
    return tasks, bits


def share_of(p: float, n: int) -> int:
    return -int(-p * n // 1)


def measure(tasks: Tasks, rounds: int) -> dict[str, float]:
    seconds: dict[str, list[float]] = {name: [] for name in tasks}
    for round_number in range(rounds + 1):
        for name, task in tasks.items():
            if name.startswith("torch.topk") and round_number > 3:
                continue  # slow and steady
            start = time.thread_time()
            task()
            if round_number:  # the first touches memory for the first time
                seconds[name].append(time.thread_time() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def report(name: str, seconds: dict[str, float], bits: dict[str, float], n: int) -> dict[str, dict[str, float]]:
    print(f"\n{name}, one core, {n / 1e6:.1f} M entries, β = {BETA}")
    print(f"{'':30s}{'ms':>9s}{'GB/s of fp32':>14s}{'× copy':>9s}{'× torch.topk':>14s}{'bits/position':>15s}")
    table = {}
    for task, t in seconds.items():
        row = {"ms": t * 1e3, "gb_per_s": 4e-9 * n / t, "times_copy": seconds["torch copy"] / t}
        line = f"{task:30s}{row['ms']:9.2f}{row['gb_per_s']:14.2f}{row['times_copy']:9.2f}"
        peer = seconds.get(f"torch.topk {task.split()[1]}") if "encode" in task else None
        if peer:
            row["times_topk"] = peer / t
            row["bits_per_position"] = bits[task]
            line += f"{row['times_topk']:14.1f}{row['bits_per_position']:15.3f}"
        table[task] = row
        print(line)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=1 << 24)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--save", action="store_true", help="keep the result in benchmarks/results/sparse.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tasks, bits = contestants(options.entries)
    result = {}
    best = cpu.instruction_sets()[-1]
    for name in reversed(cpu.instruction_sets()):
        cpu.use(name)
        chosen = tasks if name == best else {n: t for n, t in tasks.items() if not n.startswith("torch.topk")}
        result[name] = report(name, measure(chosen, options.rounds if name == best else 5), bits, options.entries)
    cpu.use(best)
    print("\nbits per position of Golomb's code at random positions:")
    print("  " + ", ".join(f"{golomb.expected_bits(p):.3f} at {p:.1%}" for p in SHARES))
    if options.save:
        machine = {"machine": processor(), "torch": torch.__version__, "entries": options.entries}
        path = Path(__file__).parent / "results" / "sparse.json"
        command = {"command": "python benchmarks/sparse.py --save"}
        path.write_text(json.dumps({**command, **machine, "results": result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
