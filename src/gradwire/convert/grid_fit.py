"""`Target`: from a sample to all that ECQ's encoder needs, which is the grid, its largest symbol, and their coding."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch

from gradwire import compress, kernels
from gradwire.convert.conversion import Conversion, NonFinite, in_host_memory
from gradwire.convert.grid_search import Curve, MeasuredGrid
from gradwire.models import histogram
from gradwire.models.integer_frequencies import bits_per_symbol, normalize

SEARCHED = 1 << 14  # entries of a sample on which the step for a rate is searched
# A grid that misses the rate by more than this part of it is corrected: PART if it was searched on a part of the
# sample, WHOLE if on all of it.
PART, WHOLE = 0.005, 0.012
SIDE = 20  # bytes: a first guess at side information and frequencies
FIXED = 9  # bytes of side information that do not depend on the symbols
LEAST_SHARE = 0.75  # symbols get this share of the bits of a small tensor, however long the side information is
FEWEST = 3  # the smallest `largest` that is tried: symbols for the multiples −3 … 3


@dataclass(frozen=True)
class GridFit:
    """What an encoder of a grid needs: the grid, and how its symbols are coded."""

    grid: MeasuredGrid
    coding: compress.Coding
    outlier_bits: float

    @property
    def bits(self) -> float:
        """The length of the whole payload, as far as the sample tells it."""
        return 8 * FIXED + self.coding.expected_bits + self.outlier_bits


@dataclass(frozen=True)
class Target:
    """What a grid has to meet: either a rate, in bits an entry, or a relative squared error."""

    rate: float | None
    nmse: float | None
    stochastic: bool = False

    def fit(self, sample: torch.Tensor, count: int, zeros: int = 0) -> GridFit | None:
        """Return the fit for the sample and further entries, `zeros` of them, that are zero; None if all are zero."""
        if not sample.numel():
            return None
        # A rate is searched for on a part of the sample, and then corrected by the whole sample.
        in_parts = not (self.stochastic or zeros or self.rate is None) and len(sample) > SEARCHED
        part = sample[:: -(-len(sample) // SEARCHED)] if in_parts else sample
        curve = Curve(in_host_memory(part), zeros, self.stochastic)
        if not math.isfinite(curve.energy):
            raise NonFinite
        if not curve.energy:
            return None
        whole = sample if in_parts else None
        if self.rate is None:
            assert self.nmse is not None
            return _coded(curve, curve.find(error=self.nmse * curve.energy), count, whole)
        budget, scale = self.rate * count, count / curve.count
        wanted = max(budget - 8 * SIDE, LEAST_SHARE * budget)
        fitted = _coded(curve, curve.find(bits=wanted / scale), count, whole)
        missing = budget - fitted.bits
        in_reach = fitted.grid.bits > 0.9 * wanted / scale
        if abs(missing) > (PART if in_parts else WHOLE) * budget and in_reach:
            wanted = max(wanted + missing, LEAST_SHARE * budget)
            grid = curve.find(bits=wanted / scale, near=fitted.grid)
            fitted = _coded(curve, grid, count, whole, fitted.grid.largest)
        return fitted

    def fit_tensor(self, conversion: Conversion) -> GridFit | None:
        """Return the fit for a whole tensor, by a sample of its entries; None if all of them are zero."""
        sample = kernels.sample(conversion.gradient, conversion.memory, conversion.decay)
        if sample.numel() == conversion.count or np.count_nonzero(in_host_memory(sample)) * 64 > sample.numel():
            return self.fit(sample, conversion.count)
        conversion.require_finite()
        # Nearly all of the sample is zero: the sample is taken from the entries of the tensor that are not.
        u = conversion.compensated()
        entries = u[u != 0]
        looked_at = entries[:: -(-entries.numel() // kernels.SAMPLE) or 1].contiguous()
        share = looked_at.numel() / max(1, entries.numel())
        return self.fit(looked_at, conversion.count, round((conversion.count - entries.numel()) * share))


def choose(largest: int, counts: np.ndarray, count: int) -> compress.Coding:
    """Return how symbols with these counts are coded; `count` is how many there will be."""
    alphabet = compress.Alphabet(2 * largest + 1, largest)
    return compress.choose(compress.SymbolStatistics(alphabet, counts, count), compress.RANS)


def _coded(
    curve: Curve, grid: MeasuredGrid, count: int, whole: torch.Tensor | None = None, largest: int | None = None
) -> GridFit:
    """Return the grid with the best number of symbols, and their coding; the curve has seen a part of `whole`.

    Fewer symbols leave more outliers, but with them tables of 8 bits, which are fast, are shorter and lose less.
    """
    counts = curve.counts(grid) if whole is None else _counts(whole, grid)
    sizes = [grid.largest]
    if grid.largest == kernels.GRID_SIZES[0]:
        sizes = list(range(grid.largest, FEWEST - 1, -1)) if largest is None else [min(largest, grid.largest)]
    scale = count / curve.count
    cost: dict[int, float] = {}
    apart: dict[int, float] = {}
    outliers = curve.outliers(grid)
    for size in sizes:
        number, bits = outliers(size)
        if cost and number > kernels.grid_capacity(curve.count):  # the encoder itself limits those of the first size
            break
        apart[size] = bits * scale
        # Outliers cost a bit each beside their own bits, for the time that they take.
        cost[size] = apart[size] + number * scale + _coarse_bits(_fold(counts, size), count)
        if cost[size] > min(cost.values()):
            break
    fits = []
    for size in dict.fromkeys([max(cost), min(cost, key=cost.__getitem__)]):
        fits.append(GridFit(replace(grid, largest=size), choose(size, _fold(counts, size), count), apart[size]))
    least = compress.TOLERANCE * min(fit.bits for fit in fits)
    fast = [fit for fit in fits if fit.bits <= least and fit.coding.precision == compress.COARSE]
    return min(fast if fast and count >= compress.LARGE else fits, key=lambda fit: fit.bits)


def _counts(sample: torch.Tensor, grid: MeasuredGrid) -> np.ndarray:
    values = torch.zeros(2 * grid.largest + 1, dtype=torch.float32, device="cpu")
    symbols, _ = kernels.grid_quantize(sample, None, None, 0.0, grid.step, grid.shift, values, len(sample))
    return kernels.histogram(symbols, len(values))


def _fold(counts: np.ndarray, largest: int) -> np.ndarray:
    """Return the counts for fewer symbols: entries beyond these become outliers, whose symbol is that of zero."""
    middle = len(counts) // 2
    folded = counts[middle - largest : middle + largest + 1].copy()
    folded[largest] += counts.sum() - folded.sum()
    return folded


def _coarse_bits(counts: np.ndarray, count: int) -> float:
    """Return the bits of `count` symbols with this distribution and of their table, if the table has 8 bits."""
    if len(counts) > compress.SMALL_ALPHABET:
        return 0.0
    smooth = 2 * counts + 1
    frequencies = normalize(smooth, compress.COARSE)
    bits = smooth @ bits_per_symbol(frequencies, compress.COARSE) * count / smooth.sum()
    return float(bits) + 8 * histogram.packed_length(frequencies, len(counts) // 2)
