"""Sparse gradients of some workers, and the mean that each of them should end up with.

Values are multiples of 2⁻²⁰ below 1 in magnitude: a sum of a few is exact in fp32 in any order, so that a contestant is
right if it has the very bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

GRID = 2**20


class Case(NamedTuple):
    name: str
    share: float  # of the entries that a worker has a gradient for
    same: bool  # entries on all workers, or independent ones
    row: int = 1  # entries that are there together, as in an embedding


CASES = (
    Case("same 5%", 0.05, True),
    Case("independent 5%", 0.05, False),
    Case("same 1%", 0.01, True),
    Case("independent 1%", 0.01, False),
    Case("rows of 64, independent 5%", 0.05, False, 64),
)


class Gradients(NamedTuple):
    of_worker: list[torch.Tensor]
    mean: torch.Tensor
    union: float  # share of the entries that some worker has a gradient for


def make(case: Case, entries: int, workers: int) -> Gradients:
    gradients = [_gradient(case, entries, worker) for worker in range(workers)]
    present = torch.zeros(entries, dtype=torch.bool)
    mean = torch.zeros(entries)
    for gradient in gradients:
        present |= gradient != 0
        mean += gradient
    return Gradients(gradients, mean / workers, float(present.float().mean()))


def _gradient(case: Case, entries: int, worker: int) -> torch.Tensor:
    where = torch.Generator().manual_seed(0 if case.same else 1 + worker)
    rows = entries // case.row
    chosen = torch.randperm(rows, generator=where)[: round(case.share * rows)]
    values = torch.Generator().manual_seed(100 + worker)
    size = torch.randint(1, GRID, (len(chosen), case.row), generator=values)
    sign = 1 - 2 * torch.randint(0, 2, (len(chosen), case.row), generator=values)
    gradient = torch.zeros(entries)
    gradient[: rows * case.row].view(rows, case.row)[chosen] = sign * size / GRID
    return gradient
