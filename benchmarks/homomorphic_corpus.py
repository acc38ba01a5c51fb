"""Sums of recorded gradients: exact on the grid, the remainder in the memories, nothing lost over 100 steps.

    python benchmarks/homomorphic_corpus.py FOLDER [--steps 100] [--workers 4]

FOLDER holds NAME.npz files, one for each network: arrays of gradients, several layers one after the other. A worker's
gradient at a step is one of the arrays, turned by some entries, so that supports differ; grid and plan are those of the
step before, as in training. A step is right if the decoded words are the integer sum bit for bit, and if
ĝ + Σe′ = Σ(g + e) to the rounding of fp32.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch

from gradwire import kernels
from gradwire.homomorphic import code
from gradwire.homomorphic.grid import BITS, Grid, by_largest, by_rms
from gradwire.homomorphic.plan import Plan, choose


class Sums:
    """Workers with their memories, and what they agreed on."""

    def __init__(self, entries: int, workers: int, bits: int):
        self.memories = [torch.zeros(entries) for _ in range(workers)]
        self.words, self.bits = -(-entries * bits // 32), bits
        self.grid: Grid | None = None
        self.plan: Plan | None = None
        self.left = self.largest = 0
        self.sizes: list[int] = []

    def agree(self, exponent: int, squares: float, count: int, union: torch.Tensor, step: int) -> None:
        world = len(self.memories)
        rms = (squares / max(1, count)) ** 0.5
        self.grid = by_largest(exponent, 32, world) if self.bits == 32 else by_rms(rms, self.bits, world)
        blocks = {lanes: n + n // 50 for lanes, n in code.blocks(union, self.words).items()}
        self.plan = choose(self.words, blocks, step)

    def step(self, gradients: list[torch.Tensor], number: int) -> None:
        if self.grid is None:  # the first step asks before it sends
            looked = [kernels.quantize_all(g, None, None, 1.0, 1.0, 0, self.bits, None) for g in gradients]
            union = torch.unique(torch.cat([g.nonzero().flatten() * self.bits // 32 for g in gradients]))
            count = sum(int(g.count_nonzero()) for g in gradients)
            self.agree(max(x for _, _, x, _ in looked), sum(s for *_, s in looked), count, union, number)
        assert self.grid is not None and self.plan is not None
        grid, plan = self.grid, self.plan
        index, sketch = (torch.zeros(n, dtype=torch.int32) for n in (plan.index_words, plan.sketch_words))
        total = torch.zeros(self.words, dtype=torch.int32)
        before = sum(g.double() + e.double() for g, e in zip(gradients, self.memories, strict=True))
        magnitude = sum(g.abs() + e.abs() for g, e in zip(gradients, self.memories, strict=True)).double()
        supports, exponent, squares = [], 0, 0.0
        for gradient, memory in zip(gradients, self.memories, strict=True):
            positions, values, own, square = kernels.quantize_all(
                gradient, memory, memory, 1.0, grid.step, grid.most, grid.bits, None
            )
            own_index, own_sketch = code.encode(plan, positions, values)
            index, sketch = index | own_index, sketch + own_sketch
            total[positions] += values
            supports.append(positions)
            exponent, squares = max(exponent, own), squares + square
        found = code.decode(plan, index, sketch)
        sums = torch.zeros(self.words, dtype=torch.int32)
        sums[found.positions] = found.values
        sums[found.left] = total[found.left]  # the second exchange
        assert found.consistent and torch.equal(sums, total), "a wrong sum"
        decoded = torch.zeros_like(gradients[0])
        where = total.nonzero().flatten()
        kernels.put_words(decoded, where, sums[where], grid.bits, grid.step)
        after = decoded.double() + sum(e.double() for e in self.memories)
        assert bool(((after - before).abs() <= 2.0**-22 * (magnitude + decoded.double().abs())).all()), (
            "something is lost"
        )
        self.left += len(found.left) > 0
        self.sizes.append(plan.total_words)
        count = sum(int(g.count_nonzero()) for g in gradients)
        self.agree(exponent, squares, count, torch.unique(torch.cat(supports)), number + 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--workers", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| network | bits | steps | dense fp32 over index and sketch | steps with a second exchange |")
    print("|---|---|---|---|---|")
    for path in sorted(options.folder.glob("*.npz")):
        arrays = np.load(path)
        recorded = [torch.from_numpy(arrays[name]).float() for name in arrays.files if name != "layers"]
        for bits in BITS:
            sums, rng = Sums(len(recorded[0]), options.workers, bits), np.random.default_rng(0)
            for step in range(options.steps):
                late = step >= options.steps // 2
                own = [recorded[(2 * late + w) % len(recorded)] for w in range(options.workers)]
                sums.step([torch.roll(g, int(rng.integers(0, 1000))) for g in own], step)
            ratio = len(recorded[0]) / (sum(sums.sizes) / len(sums.sizes))
            print(f"| {path.stem} | {bits} | {options.steps} | {ratio:.1f} | {sums.left} |", flush=True)


if __name__ == "__main__":
    main()
