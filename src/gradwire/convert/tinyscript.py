"""TinyScript (Fu et al., ICML 2020), as CO3 compares with it: Lloyd's levels of a double Weibull distribution.

|v| is taken to be Weibull with shape c and scale λ, fitted by moments: (E|v|)²/E v² = Γ(1 + 1/c)²/Γ(1 + 2/c) and
E|v| = λ·Γ(1 + 1/c). The levels are those of Lloyd's iteration on that model, on a grid of shapes.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from gradwire.convert.conversion import Conversion, in_host_memory
from gradwire.convert.level_numbers import LARGEST
from gradwire.convert.level_stats import stats
from gradwire.convert.levels import Levels

SHAPES = np.geomspace(0.25, 4.0, 97)
RATIOS = np.array([math.gamma(1 + 1 / c) ** 2 / math.gamma(1 + 2 / c) for c in SHAPES])  # grows with the shape
POINTS = 1 << 14


class TinyScript(Levels):
    """Lloyd's levels of a fitted double Weibull distribution."""

    def fit(self, conversion: Conversion, starts: np.ndarray) -> np.ndarray:
        """Return the numbers of every bucket, as `Levels.fit` promises: all levels."""
        statistics = stats(conversion, starts)
        numbers = np.zeros((len(starts) - 1, self.levels))
        for i, (mean, square) in enumerate(zip(statistics["magnitude"], statistics["square"], strict=True)):
            start, stop = starts[i : i + 2]
            if stop - start <= self.levels:  # its own entries are the better levels
                entries = np.sort(in_host_memory(conversion.slice(start, stop).compensated()))
                numbers[i] = np.append(entries, np.repeat(entries[-1], self.levels - len(entries)))
            elif square > 0:
                shape = int(np.abs(RATIOS - mean * mean / square).argmin())
                numbers[i] = mean * unit_levels(shape, self.levels)
        return np.clip(numbers, -LARGEST, LARGEST).astype(np.float32) + np.float32(0)


@lru_cache(maxsize=512)
def unit_levels(shape: int, levels: int) -> np.ndarray:
    """Return Lloyd's levels of the double Weibull distribution number `shape` with E|v| = 1, in ascending order."""
    c = SHAPES[shape]
    # Cells of equal share of the magnitude's square root: fine in the bulk and in the tail.
    edges = np.linspace(0, 1, POINTS + 1)[:-1] ** 2 * 60.0 ** (1 / c)
    edges = np.append(edges, np.inf)
    mass = -np.diff(np.exp(-(edges**c)))
    middle = np.append((edges[1:-1] + edges[:-2]) / 2, edges[-2])
    masses, sums = np.append(0, np.cumsum(mass)), np.append(0, np.cumsum(mass * middle))
    zero = levels % 2  # an odd number has zero among its levels
    magnitudes = np.interp((np.arange(levels // 2) + 1) / (levels // 2 + 0.5), masses[1:], middle)
    for _ in range(1000):
        below = np.concatenate([[0.0], magnitudes]) if zero else magnitudes
        thresholds = np.searchsorted(middle, (below[1:] + below[:-1]) / 2)
        cuts = np.concatenate([thresholds if zero else [0, *thresholds], [POINTS]])
        weight = np.diff(masses[cuts])
        better = np.where(weight > 0, np.diff(sums[cuts]) / np.maximum(weight, 1e-300), magnitudes)
        if np.array_equal(better, magnitudes):
            break
        magnitudes = better
    magnitudes = magnitudes / sums[-1]
    return np.concatenate([-magnitudes[::-1], [0.0] * zero, magnitudes])
