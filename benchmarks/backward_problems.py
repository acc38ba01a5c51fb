"""What benchmarks/backward_policies.py trains: one linear layer on Fashion-MNIST, on digits and on a regression.

Sizes, rates and losses are those of the paper (arXiv 2110.09164). The authors put a softmax before the cross-entropy,
which has one inside: gradients are small and training is slow, so each classification is here as they published it and
plain. digits, which the paper does not have, has 40 times fewer steps in an epoch, and a rate 40 times larger.

Their regression is UCI's energy efficiency of buildings, which is not bundled. `buildings` makes a set of the same
shape and kind from a formula: figures on it are comparable with each other, not with those of the paper.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Data(NamedTuple):
    inputs: torch.Tensor
    targets: torch.Tensor
    test_inputs: torch.Tensor
    test_targets: torch.Tensor


@dataclass(frozen=True)
class Problem:
    title: str
    data: str
    loss: Loss
    epochs: int
    batch: int
    lr: float
    shares: tuple[float, ...]  # K/M
    classes: int = 10

    @property
    def measure(self) -> str:
        return "accuracy" if self.classes > 1 else "MSE"

    def score(self, outputs: torch.Tensor, targets: torch.Tensor) -> float:
        """Validation accuracy, or mean squared error where there are no classes."""
        if self.classes > 1:
            return (outputs.argmax(1) == targets).float().mean().item()
        return functional.mse_loss(outputs, targets).item()


def cross_entropy_of_softmax(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs.softmax(1), targets)


SHARES = (1 / 2, 1 / 4, 1 / 8)
PROBLEMS = {
    "fashion-published": Problem(
        "Fashion-MNIST 784→10, softmax before cross-entropy", "fashion", cross_entropy_of_softmax, 30, 64, 0.01, SHARES
    ),
    "fashion": Problem(
        "Fashion-MNIST 784→10, cross-entropy", "fashion", functional.cross_entropy, 10, 64, 0.01, SHARES
    ),
    "digits-published": Problem(
        "digits 64→10, softmax before cross-entropy", "digits", cross_entropy_of_softmax, 30, 64, 0.4, SHARES
    ),
    "digits": Problem("digits 64→10, cross-entropy", "digits", functional.cross_entropy, 30, 64, 0.4, SHARES),
    "buildings": Problem(
        "regression 16→1, mean squared error", "buildings", functional.mse_loss, 100, 144, 0.01,
        (*SHARES, 9 / 144, 3 / 144), classes=1,
    ),
}  # fmt: skip


@cache
def load(name: str, folder: Path) -> Data:
    """Once in a process."""
    if name == "buildings":
        return buildings()
    from gradwire.tasks.digits import Digits
    from gradwire.tasks.fashion_mnist import FashionMnist

    task = (Digits if name == "digits" else FashionMnist)(folder)
    brightest = task.train.pixels.max()
    parts = [(images.pixels.flatten(1) / brightest, images.labels) for images in (task.train, task.test)]
    return Data(*parts[0], *parts[1])


def buildings() -> Data:
    """768 made-up buildings of equal volume: 12 shapes, 4 orientations, 16 kinds of glazing; what heating them takes.

    16 columns, standardised: 6 quantities and two one-hot codes. The target is not linear in them and has noise, so
    that a linear model has a floor.
    """
    random = np.random.default_rng(7)
    volume, roofs = 772.0, np.repeat([110, 122, 147, 221], 3)
    walls = random.uniform(250, 420, len(roofs))
    surface = walls + 2 * roofs
    shapes = np.stack([6 * volume ** (2 / 3) / surface, surface, walls, roofs, volume / roofs], axis=1)
    glazing = [(0.0, 0), *product((0.1, 0.25, 0.4), range(1, 6))]
    rows, loads = [], []
    for shape, orientation, (area, kind) in product(shapes, range(4), glazing):
        rows.append([*shape, area, *np.eye(4)[orientation], *np.eye(6)[kind]])
        compactness, _, wall, _, height = shape
        loads.append(
            4 * height + 0.03 * wall + 16 * area * height / 5 + 30 * abs(compactness - 0.8)
            - 3 * area * (kind == orientation + 1) - 20
        )  # fmt: skip
    table = np.array(rows)
    table = (table - table.mean(0)) / table.std(0)
    target = np.array(loads)[:, None] + random.normal(0, 2, (len(table), 1))
    order = random.permutation(len(table))
    inputs, targets = (torch.from_numpy(values[order]).float() for values in (table, target))
    return Data(inputs[:576], targets[:576], inputs[576:], targets[576:])
