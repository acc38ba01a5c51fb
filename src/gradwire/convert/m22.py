"""M22 (arXiv 2301.09269): top-k, then 2^bits levels by Lloyd's method for d(u, û) = |u|^M (u − û)² under a GenNorm.

After top-k no entry is smaller than the k-th, whose magnitude is t. A GenNorm that is fitted to the entries themselves
has its peak at 0, where there are none, and puts levels there. Here the excess y = |u| − t is fitted instead, by the
moments E y and E y². If the source is a Laplace distribution, y is exponential whatever t is, and this is exact. With
t = 0 it is the paper's quantizer (models/weighted_lloyd.py). The cells of these levels are kept, and the level of each
is then moved to the weighted mean of the entries in it.

With a larger M, levels are closer to the largest entries, and the many small ones are rounded up further. If tails are
so heavy that the squared error would be more than MOST_LOST of the squares of what is sent, M is lowered: error
feedback works only if what is sent is nearer to u than 0 is. With M = 0 it always is, since levels are then means.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from gradwire import kernels
from gradwire.convert import magnitudes
from gradwire.convert.conversion import Conversion, in_host_memory, limit_to
from gradwire.convert.sparse import Sparse
from gradwire.convert.sparse_values import MAGNITUDES
from gradwire.errors import SpecError
from gradwire.models import gennorm_moments, weighted_lloyd

MOST_BITS = 6
SAMPLE = 1 << 14  # levels are fitted to this many entries; an outlier that is not among them is sent as less than it is
MOST_LOST = 0.25  # the largest squared error of what is sent, over the sum of its squares
FINENESS = 4  # t / E y is rounded to one of this many values an octave
SMALLEST = 1e-280  # smaller weighted sums would lose their precision; with M = 0 none is so small
OCTAVES = (-5, 6)  # log₂ of t / E y: below this range, t counts as 0; above it, |u|^M hardly varies


class M22(Sparse):
    """Top-k, and 2^bits levels for the values, fitted with the weight |u|^m."""

    def __init__(
        self, p: float = 0.01, k: int | None = None, bits: int = 2, m: int = 2, positions: str = "auto",
        threshold: float | None = None,
    ):  # fmt: skip
        super().__init__(p, k, positions, threshold)
        if not 1 <= bits <= MOST_BITS:
            raise SpecError(f"bits must be from 1 to {MOST_BITS}, not {bits}: an entry is one of 2^bits levels")
        if not 0 <= m <= weighted_lloyd.LARGEST_M:
            raise SpecError(f"m must be from 0 to {weighted_lloyd.LARGEST_M}, not {m}: the power of |u| that weighs")
        self.count_of_levels, self.m = 1 << bits - 1, m  # on either side of zero

    def encode(self, conversion: Conversion, out: torch.Tensor) -> int:
        """Write the payload and update the error memory, as `Converter.encode` promises."""
        chosen, values = self.select(conversion)
        if not chosen.numel():
            return self.write(conversion, out, chosen, MAGNITUDES, b"", None)
        levels = fit(values, self.m, self.count_of_levels)
        table = limit_to(torch.from_numpy(levels).float(), torch.bfloat16)
        raw, left = magnitudes.encode(values, table, conversion.dtype)
        if conversion.memory_out is not None:
            kernels.replace(conversion.memory_out, chosen, left)
        return self.write(conversion, out, chosen, MAGNITUDES, raw, None)


def fit(sent: torch.Tensor, m: int, count: int) -> np.ndarray:
    """Return ascending levels in fp64, `count` of them at most, for the magnitudes of values that are not 0."""
    x = in_host_memory(sent[:: -(-sent.numel() // SAMPLE) | 1].abs().double())
    if len(x) <= count:  # its own entries are the better levels
        return np.sort(x)
    t = float(x.min())
    beyond = x - t
    mean, square = float(beyond.mean()), float(np.square(beyond).mean())
    if not mean > 0:
        return np.array([t])
    for power in range(m, -1, -1):
        levels, lost = weighted_means(x, model_levels(t, mean, square, power, count), power)
        if lost <= MOST_LOST:
            break
    return levels


def model_levels(t: float, mean: float, square: float, m: int, count: int) -> np.ndarray:
    """Return the levels of t + y for the GenNorm y with these moments.

    They are looked up on grids of β and t/E y, so that few have to be solved.
    """
    beta = float(gennorm_moments.BETAS[gennorm_moments.nearest_index(mean, square)])
    unit = gennorm_moments.mean_abs(beta)
    from_zero = _on_grid(t / mean) * unit if m else 0.0
    return t + (weighted_lloyd.levels(beta, from_zero, m, count) - from_zero) * (mean / unit)


def _on_grid(ratio: float) -> float:
    low, high = OCTAVES
    octaves = math.log2(ratio) if ratio > 0 else -math.inf
    return 0.0 if octaves < low else 2 ** (round(FINENESS * min(octaves, high)) / FINENESS)


def weighted_means(x: np.ndarray, levels: np.ndarray, m: int) -> tuple[np.ndarray, float]:
    """Move levels to the weighted means of their cells, and leave out those of empty cells.

    The result is the levels, and their squared error over the sum of squares.
    """
    cells = np.searchsorted((levels[1:] + levels[:-1]) / 2, x)
    largest = x.max()
    part = x / largest  # so that no power is too large
    weight = part**m
    number, sums, weights, weighted = (
        np.bincount(cells, w, len(levels)) for w in (None, part, weight, weight * part)
    )  # fmt: skip
    used = number > 0
    if weighted[used].min() < SMALLEST:
        return levels, math.inf
    better = weighted[used] / weights[used]
    squares = float(np.square(part).sum())  # BLAS would start threads for it, which go on spinning for a while
    return better * largest, 1 + float(better**2 @ number[used] - 2 * better @ sums[used]) / squares
