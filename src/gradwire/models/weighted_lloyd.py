"""Lloyd's levels under the magnitude-weighted distortion of M22 (arXiv 2301.09269): d(x, x̂) = |x|^M (x − x̂)².

The magnitudes are x = t + y, where y ≥ 0 has the density of a GenNorm(β, α = 1) folded to one side. With t = 0 that
is the paper's own source. The best level of a cell is ∫x^(M+1) p / ∫x^M p, the best edge between two levels is their
midpoint. With x^M as a polynomial in y, both integrals are sums of incomplete gamma functions: closed forms, all of
whose terms are positive.

Lloyd's iteration needs hundreds of rounds for eight levels. Newton's method on the same conditions needs ten to twenty,
and where it would not lower the distortion, a round of Lloyd's takes its place.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch

LARGEST_M = 9
ROUNDS = 1000  # at most
CLOSE = 1e-9  # the search ends when Lloyd's next round would move no level by more than this part of itself
ROUNDING = 1e-13  # a distortion that is larger by no more than this part of itself counts as equal
POINTS = 512  # at which the density is computed, to find levels to start from


@lru_cache(maxsize=8192)
def levels(beta: float, t: float, m: int, count: int) -> np.ndarray:
    """Return the `count` best levels, ascending, of x = t + y for GenNorm(β, α = 1)."""
    source = _Source(beta, t, m)
    current, lloyd, least = source.start(count), None, math.inf
    for _ in range(ROUNDS):
        edges = (current[1:] + current[:-1]) / 2
        weight, first = source.integrals(edges)
        with np.errstate(divide="ignore", invalid="ignore"):  # an empty cell is no better than what was
            better = first / weight
            distortion = float(-(first * better).sum())  # but for a constant, with the best levels of these cells
        if lloyd is not None and not distortion <= least + ROUNDING * abs(least):
            current, lloyd = lloyd, None
            continue
        least = distortion
        if np.max(np.abs(better - current) / better) < CLOSE:
            break
        newton = current + _newton(current, weight, first, source.density(edges))
        current, lloyd = (newton, better) if (np.diff(newton, prepend=t) > 0).all() else (better, None)
    result: np.ndarray = better
    result.setflags(write=False)
    return result


def _newton(current: np.ndarray, weight: np.ndarray, first: np.ndarray, density: np.ndarray) -> np.ndarray:
    """Return Newton's step towards levels with first − level·weight = 0 in all cells; NaN if there is none.

    The matrix of derivatives is tridiagonal: a level changes the integrals of its own cell and of its neighbours.
    """
    half = density * np.diff(current) / 4  # an edge is halfway between its levels, and moves half as far as either
    slope = np.diag(-weight) + np.diag(half, 1) + np.diag(half, -1)
    slope[np.arange(len(half)), np.arange(len(half))] += half
    slope[np.arange(len(half)) + 1, np.arange(len(half)) + 1] += half
    try:
        step: np.ndarray = np.linalg.solve(slope, current * weight - first)
        return step
    except np.linalg.LinAlgError:
        return np.full_like(current, np.nan)


class _Source:
    """The weighted density x^M p and its integrals, all divided by E y^M, which keeps them in the range of fp64."""

    def __init__(self, beta: float, t: float, m: int):
        self.beta, self.t, self.m = beta, t, m
        self.shapes = torch.from_numpy((np.arange(m + 2) + 1) / beta)[:, None]
        log_moments = [math.lgamma(float(shape)) for shape in self.shapes]  # of E yⁱ, plus that of the density's norm
        self.log_unit = log_moments[m]
        moments = np.exp(np.array(log_moments) - self.log_unit)
        self.polynomials = np.array(
            [
                [math.comb(power, i) * t ** (power - i) if i <= power else 0.0 for i in range(m + 2)]
                for power in (m, m + 1)
            ]
        ) * moments  # fmt: skip

    def integrals(self, edges: np.ndarray) -> np.ndarray:
        """Return ∫x^M p and ∫x^(M+1) p over each of the cells into which the edges divide [t, ∞)."""
        x = torch.from_numpy(np.concatenate([[0.0], (edges - self.t) ** self.beta, [np.inf]]))
        shapes, x = self.shapes.expand(-1, len(x)), x.expand(len(self.shapes), -1)
        below, above = torch.special.gammainc(shapes, x).numpy(), torch.special.gammaincc(shapes, x).numpy()
        # Differences of numbers near 1 would be rounding errors: there, those of the complements are taken.
        integrals: np.ndarray = self.polynomials @ np.where(below[:, :-1] < 0.5, np.diff(below), -np.diff(above))
        return integrals

    def density(self, x: np.ndarray) -> np.ndarray:
        """Return x^M p at each x."""
        density: np.ndarray = self.beta * np.exp(self.m * np.log(x) - (x - self.t) ** self.beta - self.log_unit)
        return density

    def start(self, count: int) -> np.ndarray:
        """Return levels to start from; their density is the third root of x^M p, which is the best for many levels."""
        end = (3 * (60 + 3 * self.m / self.beta)) ** (1 / self.beta)
        y = end * np.linspace(0, 1, POINTS + 1)[1:] ** (2 / self.beta)
        log_density = (self.m * np.log(self.t + y) - y**self.beta) / 3
        mass = np.exp(log_density - log_density.max())
        total = np.concatenate([[0], np.cumsum((mass[1:] + mass[:-1]) / 2 * np.diff(y))])
        levels: np.ndarray = self.t + np.interp((np.arange(count) + 0.5) / count, total / total[-1], y)
        return levels
