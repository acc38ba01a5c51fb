"""The search for ECQ's grid: the rate and the error of any grid on a sample, and the grid that meets a target.

The sample is sorted once, with running sums of x and x². The count, the mean and the squared error of every cell of
any grid are then differences of a few of these sums. If the target is a rate, the search looks for the least squared
error; if it is an error, for the least rate. The cell of zero is wider than the others by as much as is best for that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gradwire import kernels
from gradwire.convert.minifloat import round_step
from gradwire.convert.segments import LARGEST_STEP, SMALLEST_STEP

SHIFTS = tuple(s / 16 for s in range(8, 1, -1))  # ½ rounds to nearest; a smaller one makes the cell of zero wider
FIRST = 2  # the shift with which the search begins: 6/16
EXACT = 1e-12  # relative squared error below which there is nothing left to gain
CLOSE = 0.002  # a grid that misses the target by no more than this part of it is good enough


@dataclass(frozen=True)
class MeasuredGrid:
    """A grid (step, shift, largest symbol, offsets) with its rate and its squared error on the sample."""

    step: float
    shift: float
    bits: float  # what the symbols take with an ideal code, and the outliers
    outlier_bits: float
    error: float  # Σ(x − x̂)²
    largest: int  # the largest multiple of the step that has a symbol
    offsets: tuple[int, ...]  # of the values from the multiples, in 1/256 of a step


class Curve:
    """The rate–distortion curve of a sample, and of entries beside it that are all zero."""

    def __init__(self, sample: np.ndarray, zeros: int = 0, stochastic: bool = False):
        self.x, self.zeros, self.count, self.stochastic = np.sort(sample), zeros, len(sample) + zeros, stochastic
        self.first, self.second = kernels.running_sums(self.x)
        self.energy, self.top = float(self.second[-1]), float(max(-self.x[0], self.x[-1]))

    def measure(self, step: float, shift: float) -> MeasuredGrid | None:
        """Return this grid with its rate and error on the sample; None if its outliers are too many."""
        if self.stochastic:
            return self._dithered(step)
        measured = kernels.grid_measure(self.x, self.first, self.second, self.zeros, step, shift)
        return None if measured is None else MeasuredGrid(step, shift, *measured)

    def counts(self, grid: MeasuredGrid) -> np.ndarray:
        """Return how often each symbol occurs; outliers count as zeros."""
        if self.stochastic:
            positive, negative, _, _ = self._expected(grid.step)
        else:
            above, below = kernels.grid_edges(self.x, grid.step, grid.shift)
            positive, negative = np.diff(above), -np.diff(below)
        counts = np.concatenate([negative[grid.largest - 1 :: -1], [0], positive[: grid.largest]])
        counts[grid.largest] = max(0, self.count - int(counts.sum()))
        return counts

    def outliers(self, grid: MeasuredGrid) -> Callable[[int], tuple[int, float]]:
        """Return a function: largest magnitude of a symbol → (number of outliers, about how many bits they take)."""
        if self.stochastic:
            positive, negative, ends, _ = self._expected(grid.step)
            both = positive + negative
        else:
            above, below = kernels.grid_edges(self.x, grid.step, grid.shift)
            both, ends = np.diff(above) - np.diff(below), len(self.x) - int(above[-1]) + int(below[-1])

        def beyond(largest: int) -> tuple[int, float]:
            number = int(both[largest:].sum()) + ends
            return number, kernels.outlier_bits(both[largest:], ends, number, self.count)

        return beyond

    def _expected(self, step: float) -> tuple[np.ndarray, np.ndarray, int, float]:
        """Return what to expect of stochastic rounding.

        That is the counts of the multiples 1, 2, … and −1, −2, …, the number of entries beyond, and the squared error.
        """
        middle, counts, ends, error = [int(np.searchsorted(self.x, 0.0))], [], float(len(self.x)), 0.0
        for sign, edges in zip((1, -1), kernels.grid_edges(self.x, step, 0.0), strict=True):
            cuts = np.concatenate([middle, edges])
            j, n = np.arange(len(edges)), sign * np.diff(cuts)
            first, second = np.diff(self.first[cuts]), sign * np.diff(self.second[cuts])
            up = np.maximum(first / step - j * n, 0)  # Σ of the fractions: how many go up
            squares = second / step**2 - 2 * j * first / step + j * j * n
            counts.append(np.maximum(np.rint(n[1:] - up[1:] + up[:-1]), 0).astype(np.int64))
            error += step**2 * float((up - squares).sum())
            ends += float(up[-1]) - int(n.sum())
        return counts[0], counts[1], max(0, round(ends)), max(error, 0.0)

    def _dithered(self, step: float) -> MeasuredGrid | None:
        positive, negative, ends, error = self._expected(step)
        both = positive + negative
        for largest in kernels.GRID_SIZES:
            outside = int(both[largest:].sum()) + ends
            if outside <= self.count // 100:
                p = np.concatenate([positive[:largest], negative[:largest], [self.count - both[:largest].sum()]])
                p = p[p > 0] / self.count
                apart = outside * (math.log2(self.count / outside) + 8) if outside else 0.0
                return MeasuredGrid(
                    step, 0.0, float(-(p * np.log2(p)).sum()) * self.count + apart, apart, error, largest, ()
                )
        return None

    # ── the search ──

    def find(
        self, bits: float | None = None, error: float | None = None, near: MeasuredGrid | None = None
    ) -> MeasuredGrid:
        """Return the grid with the least error at this many bits for the sample, or with the fewest bits at this error.

        `near` is a grid that nearly meets the target: its shift is kept, and a step is searched close to its own.
        """

        if error is not None and near is None and not self.stochastic:
            found = kernels.grid_search(self.x, self.first, self.second, self.zeros, self.energy, error)
            if found is not None:
                step, shift, measured = found
                return MeasuredGrid(step, shift, *measured)

        def over(grid: MeasuredGrid | None) -> float:
            """Return about log₂ of the factor by which the step is too small; negative if it is too large."""
            if grid is None:
                return math.inf
            if bits is not None:
                return (grid.bits - bits) / self.count
            assert error is not None
            return math.log2(max(error, 1e-300) / max(grid.error, 1e-300)) / 2

        close = CLOSE * (bits / self.count if bits is not None else 1)
        if near is not None:
            return self._solve(near.shift, over, close, near.step, 1 / 16)
        # A guess: for GenNorm entries the step at a rate R is about E|x|·2^(2−R).
        wanted = bits / self.count if bits is not None else 1.0
        mean = float(self.first[-1] - 2 * self.first[np.searchsorted(self.x, 0)]) / len(self.x)
        guess = mean * 2 ** (2 - wanted)
        best = self._solve(0.0 if self.stochastic else SHIFTS[FIRST], over, close, guess, 0.5)
        if self.stochastic:
            return best
        for direction in (1, -1):  # towards wider cells of zero, then towards narrower ones
            index = FIRST
            while 0 <= index + direction < len(SHIFTS):
                index += direction
                other = self._solve(SHIFTS[index], over, close, best.step, 1 / 16)
                if not self._better(other, best):
                    break
                best = other
            if best.shift < SHIFTS[FIRST]:
                break
        return best

    def _better(self, a: MeasuredGrid, b: MeasuredGrid) -> bool:
        """Tell whether `a` is better than `b`.

        Both are close to the target, but not on it: so the error counts too, at one bit an entry for a factor of four.
        """
        gain = math.log2(max(b.error, 1e-300) / max(a.error, 1e-300)) / 2 * self.count
        return gain + b.bits - a.bits > 0

    def _solve(
        self, shift: float, over: Callable[[MeasuredGrid | None], float], close: float, near: float, stride: float
    ) -> MeasuredGrid:
        """Return the grid that meets the target, by a bracket around `near` and regula falsi on log₂ of the step."""
        high = math.log2(min(max(near, SMALLEST_STEP), LARGEST_STEP))
        up = down = stride
        grid = self._at(high, shift)
        low, excess_low = high, -math.inf
        while (excess_high := over(grid)) > 0 and high < math.log2(LARGEST_STEP):  # not coarse enough
            low, excess_low = high, excess_high
            high += up
            up *= 2
            grid = self._at(high, shift)
        best = grid
        assert best is not None
        if excess_high > 0:
            return best  # there is no larger step
        while excess_low <= 0:  # not fine enough
            low -= down
            down = min(2 * down, 1.0)
            grid = self._at(low, shift)
            excess_low = over(grid)
            if excess_low <= 0:
                assert grid is not None
                high, excess_high = low, excess_low
                best = grid if grid.error <= best.error else best
                if grid.error <= EXACT * self.energy or low < math.log2(SMALLEST_STEP):
                    return best  # out of reach: so few different values cost no more bits than these
        for _ in range(12):
            if -close <= excess_high <= 0:
                break
            weight = 0.5 if math.isinf(excess_low) else excess_low / (excess_low - excess_high)
            middle = low + (high - low) * min(max(weight, 0.1), 0.9)
            grid = self._at(middle, shift)
            excess = over(grid)
            if excess > 0:
                low, excess_low = middle, excess
            else:
                assert grid is not None
                high, excess_high, best = middle, excess, grid
        return best

    def _at(self, log_step: float, shift: float) -> MeasuredGrid | None:
        return self.measure(round_step(2.0 ** min(max(log_step, -126.0), 126.0)), shift)
