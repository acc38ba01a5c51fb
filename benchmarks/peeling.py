"""How often peeling fails at the default size: random cases of 1 to a million blocks, encoded and decoded.

    python benchmarks/peeling.py [--cases 20000] [--seed 0]

Cases are spread evenly over the logarithm of the number of blocks; those of more than 30,000 blocks are fewer, since
one of them takes as long as thousands of others. Every failure is repaired here with another seed, as a frame's
encoder does.
"""

from __future__ import annotations

import argparse
import math
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch

from gradwire.homomorphic import code
from gradwire.homomorphic.plan import Plan, segments_for
from machine import processor

RESULTS = Path(__file__).parent / "results/peeling.md"
LARGE = 30_000


def decodes(blocks: int, lanes: int, seed: int, rng: np.random.Generator, spread: int) -> bool:
    """Whether the words of so many random blocks come back; a wrong word is an error of its own."""
    count = blocks * spread + 32
    chosen = np.sort(rng.choice(count, blocks, replace=False)) if spread > 1 else np.arange(blocks)
    positions = torch.from_numpy(chosen * lanes + rng.integers(0, lanes, blocks))
    values = torch.from_numpy(rng.integers(1, 2**31, blocks).astype(np.int32))
    plan = Plan(count * lanes, lanes, "bitmap", -(-count // 32), 0, *segments_for(blocks), seed)
    found = code.decode(plan, *code.encode(plan, positions, values))
    if len(found.left):
        return False
    assert torch.equal(found.positions, positions) and torch.equal(found.values, values)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rng, start = np.random.default_rng(options.seed), time.perf_counter()
    cases: Counter[int] = Counter()
    failed: Counter[int] = Counter()
    again: Counter[int] = Counter()
    while sum(cases.values()) < options.cases:
        blocks = int(2 ** rng.uniform(0, 20))
        if blocks > LARGE and rng.random() > LARGE / blocks:
            continue
        lanes, seed, spread = int(rng.choice((1, 4, 16))), int(rng.integers(2**32)), int(rng.choice((1, 2, 20)))
        octave = int(math.log2(blocks))
        cases[octave] += 1
        if not decodes(blocks, lanes, seed, rng, spread):
            failed[octave] += 1
            while not decodes(blocks, lanes, int(rng.integers(2**32)), rng, spread):
                again[octave] += 1
    lines = [
        "| blocks | cells for a block | cases | failed | failed again with another seed |",
        "|---|---|---|---|---|",
    ]
    for octave in sorted(cases):
        rates = [(s << log) / n for n in (2**octave, 2 ** (octave + 1) - 1) for s, log in [segments_for(n)]]
        lines.append(
            f"| {2**octave}–{2 ** (octave + 1) - 1} | {rates[0]:.2f}–{rates[1]:.2f} | {cases[octave]} | "
            f"{failed[octave]} | {again[octave]} |"
        )
    total, bad = sum(cases.values()), sum(failed.values())
    lines += [
        "",
        f"{total} cases, {bad} failed: {100 * (1 - bad / total):.3f}% peel at once; every failure was repaired.",
    ]
    text = "\n".join(lines)
    print(text)
    head = f"# Peeling\n\n`python benchmarks/peeling.py --cases {options.cases}`, {processor()}; "
    RESULTS.write_text(head + f"{time.perf_counter() - start:.0f} s.\n\n{text}\n")


if __name__ == "__main__":
    main()
