"""Mem-AOP-GD once more, in fp64 numpy and from the paper's text (arXiv 2110.09164, algorithm 1): the tests' reference.

Unlike gradwire, it decays the memory when it is written, as the paper does; slots that a batch does not reach wait.
With `centre`, as gradwire's default, the mean of the inputs goes through exactly, and the paper's method gets the rest.
"""

from __future__ import annotations

import math

import numpy as np
import torch

Array = np.ndarray


class PlainRows:
    """One layer: `rate` is the learning rate that is folded into the factors, 1 in the form for any optimizer."""

    def __init__(self, inputs: int, outputs: int, decay: float = 1.0, centre: bool = True) -> None:
        self.decay, self.centre = decay, centre
        self.a, self.b = np.zeros((0, inputs)), np.zeros((0, outputs))

    def gradient(
        self, x: torch.Tensor, d: torch.Tensor, count: int, rate: float = 1.0, chosen: list[int] | None = None
    ) -> Array:
        """out × in, of the `count` rows with the largest norms, or of those that were chosen elsewhere."""
        rows, of_rows = x.double().numpy(), d.double().numpy()
        counts = np.abs(of_rows).sum(1) > 0
        mean = rows[counts].mean(0) if self.centre and counts.any() else np.zeros(rows.shape[1])
        rows = rows - mean
        self.a, self.b = _at_least(self.a, len(rows)), _at_least(self.b, len(rows))
        brings = ((rows != 0).any(1) & counts)[:, None]  # not the paper's: a row without a product enters neither side
        a = self.a[: len(rows)] + math.sqrt(rate) * rows * brings
        b = self.b[: len(rows)] + math.sqrt(rate) * of_rows * brings
        if chosen is None:
            scores = [float(np.linalg.norm(p) * np.linalg.norm(q)) for p, q in zip(a, b, strict=True)]
            chosen = sorted(range(len(rows)), key=lambda j: -scores[j])[:count]
        step = np.zeros((b.shape[1], a.shape[1]))
        for j in chosen:
            step += np.outer(b[j], a[j])
            a[j], b[j] = 0, 0
        self.a[: len(rows)], self.b[: len(rows)] = math.sqrt(self.decay) * a, math.sqrt(self.decay) * b
        return step / rate + np.outer(of_rows.sum(0), mean)

    def left(self) -> tuple[Array, Array]:
        """As gradwire stores it: not yet decayed."""
        return self.a / math.sqrt(self.decay), self.b / math.sqrt(self.decay)


def _at_least(memory: Array, rows: int) -> Array:
    return np.concatenate([memory, np.zeros((max(0, rows - len(memory)), memory.shape[1]))])


def close(a: torch.Tensor, b: Array, tolerance: float = 2e-6) -> None:
    """To rounding: errors are measured against the largest entry, since sums cancel."""
    assert tuple(a.shape) == b.shape
    most = max(float(np.abs(b).max(initial=0)), 1e-30)
    assert float(np.abs(a.detach().double().numpy() - b).max(initial=0)) <= tolerance * most
