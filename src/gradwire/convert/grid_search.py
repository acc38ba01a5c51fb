"""Which grid? What any step comes to on a sample, and the step that meets a target.

The sample is sorted once, with running sums of x and x²: the count, the mean and the squared error of every cell
of any grid are then differences of a few of them. For a target rate the least squared error counts, for a target
error the least rate; the cell of zero is wider than the others by as much as serves that best.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .minifloat import LARGEST_STEP, SMALLEST_STEP, round_step

SHIFTS = tuple(s / 16 for s in range(8, 1, -1))  # ½ is rounding to nearest; the less, the wider is the cell of zero
FIRST = 2  # the shift with which the search begins: 6/16
SIZES = (7, 15, 31, 63, 127)  # largest magnitudes of symbols
NEARLY = 1.01  # more symbols are slower: they have to save more than this
OFFSETS = 2  # magnitudes rebuilt at means of their own; the rest shares the last. More of them gain under 0.1%
EXACT = 1e-7  # relative squared error below which there is nothing left to gain
CLOSE = 0.002  # to the target is good enough
MAGNITUDES = np.arange(1, SIZES[-1] + 1)
OWN_OFFSET = np.minimum(MAGNITUDES, OFFSETS) - 1


def capacity(count: int, segmented: bool = False) -> int:
    """How many outliers a tensor may have: this bounds the length of its frame."""
    return count // 16 + (0 if segmented else 16)


@dataclass(frozen=True)
class Grid:
    """A choice of step, and what it comes to on the sample."""

    step: float
    shift: float
    largest: int  # magnitude of a symbol
    offsets: tuple[int, ...]
    bits: float  # of the symbols with an ideal code, and of the outliers
    outlier_bits: float
    error: float  # Σ(x − x̂)²
    counts: np.ndarray  # of the 2·largest+1 symbols; outliers count as zeros


class Curve:
    """The rate–distortion curve of a sample."""

    def __init__(self, sample: np.ndarray, stochastic: bool = False):
        self.x, self.count, self.stochastic = np.sort(sample), len(sample), stochastic
        wide = self.x.astype(np.float64)
        self.sums = np.zeros((2, self.count + 1))
        np.cumsum(wide, out=self.sums[0, 1:])
        np.cumsum(wide * wide, out=self.sums[1, 1:])
        self.energy, self.top = float(self.sums[1, -1]), float(max(-wide[0], wide[-1]))
        self.middle = int(np.searchsorted(self.x, 0.0))

    def measure(self, step: float, shift: float) -> Grid | None:
        """What this grid comes to; None if its outliers are too many."""
        with np.errstate(over="ignore"):  # an edge beyond the range of fp32 is infinite, and has nothing above it
            edges = ((np.arange(1, SIZES[-1] + 2) - shift) * step).astype(np.float32)
        above, below = np.searchsorted(self.x, edges), np.searchsorted(self.x, -edges, side="right")
        ends = self.count - int(above[-1]) + int(below[-1])
        if ends > capacity(self.count):
            return None
        if self.stochastic:
            positive, up = self._dithered(np.concatenate([[self.middle], above]), 1, step)
            negative, down = self._dithered(np.concatenate([[self.middle], below]), -1, step)
            return self._priced(step, shift, (), positive, negative, ends, up + down)
        positive, negative = np.diff(above), -np.diff(below)
        counts = positive + negative
        sums = np.diff(self.sums[:, above]) - np.diff(self.sums[:, below]) * np.array([[-1.0], [1.0]])
        offsets = _offsets(sums[0] / step - MAGNITUDES * counts, counts)
        r = (MAGNITUDES + np.array(offsets)[OWN_OFFSET] / 256) * step
        inner = float(self.sums[1, above[0]] - self.sums[1, below[0]])
        error = inner + float((sums[1] - 2 * r * sums[0] + r * r * counts).sum()) + ends * step * step / 12
        return self._priced(step, shift, offsets, positive, negative, ends, error)

    def _dithered(self, cuts: np.ndarray, sign: int, step: float) -> tuple[np.ndarray, float]:
        """Expected counts of the magnitudes 1, 2, … of one sign, and the expected squared error."""
        j, n = np.arange(len(cuts) - 1), sign * np.diff(cuts)
        first, second = np.diff(self.sums[0, cuts]), sign * np.diff(self.sums[1, cuts])
        up = np.maximum(first / step - j * n, 0)  # Σ of the fractions: how many go up
        squares = second / step**2 - 2 * j * first / step + j * j * n
        return np.maximum(np.rint(n[1:] - up[1:] + up[:-1]), 0).astype(np.int64), step**2 * float((up - squares).sum())

    def _priced(
        self, step: float, shift: float, offsets: tuple[int, ...], positive: np.ndarray, negative: np.ndarray,
        ends: int, error: float,
    ) -> Grid | None:  # fmt: skip
        """With the smallest alphabet that is nearly the cheapest."""
        both, found = positive + negative, []
        for largest in SIZES:
            outside = int(both[largest:].sum()) + ends
            if outside > capacity(self.count):
                continue
            counts = np.concatenate([negative[largest - 1 :: -1], [0], positive[:largest]])
            counts[largest] = max(0, self.count - int(counts.sum()))
            apart = _outlier_bits(both[largest:], ends, self.count)
            bits = _entropy_bits(counts) + apart
            found.append(Grid(step, shift, largest, offsets, bits, apart, max(error, 0.0), counts))
            if not outside:
                break
        limit = NEARLY * min((grid.bits for grid in found), default=0)
        return next((grid for grid in found if grid.bits <= limit), None)

    # ── the search ──

    def find(self, bits: float | None = None, error: float | None = None) -> Grid:
        """The grid with the least error at this many bits for the sample, or with the least bits at this error."""

        def over(grid: Grid | None) -> float:  # log₂ of how far the step is too small (or too large, if negative)
            if grid is None:
                return math.inf
            if bits is not None:
                return (grid.bits - bits) / self.count
            assert error is not None
            return math.log2(max(error, 1e-300) / max(grid.error, 1e-300)) / 2

        close = CLOSE * (bits / self.count if bits is not None else 1)
        best = self._solve(0.0 if self.stochastic else SHIFTS[FIRST], over, close)
        if self.stochastic:
            return best
        for direction in (1, -1):  # towards wider cells of zero, then towards narrower ones
            index = FIRST
            while 0 <= index + direction < len(SHIFTS):
                index += direction
                other = self._solve(SHIFTS[index], over, close, best.step)
                if not self._better(other, best):
                    break
                best = other
            if best.shift < SHIFTS[FIRST]:
                break
        return best

    def _better(self, a: Grid, b: Grid) -> bool:
        """Both are close to the target, not on it; one bit an entry is about a factor of four in the error."""
        gain = math.log2(max(b.error, 1e-300) / max(a.error, 1e-300)) / 2 * self.count
        return gain + b.bits - a.bits > 0

    def _solve(
        self, shift: float, over: Callable[[Grid | None], float], close: float, near: float | None = None
    ) -> Grid:
        """The step at which the target is met: a bracket, then regula falsi on log₂ of the step."""
        high = math.log2(near) if near else math.log2(min(2 * self.top, LARGEST_STEP))
        stride = 1 / 16 if near else 1.0
        grid = self._at(high, shift)
        while (excess := over(grid)) > 0:  # not coarse enough
            high += stride
            stride *= 2
            if high > math.log2(LARGEST_STEP):
                break
            grid = self._at(high, shift)
        stride = 1 / 16 if near else 1.0
        low, best = high, grid
        excess_high, excess_low = excess, -math.inf
        assert best is not None
        if excess > 0:
            return best  # there is no larger step
        while excess_low <= 0:
            low -= stride
            stride = min(2 * stride, 1.0)
            grid = self._at(low, shift)
            excess_low = over(grid)
            if excess_low <= 0:
                assert grid is not None
                high, excess_high = low, excess_low
                if grid.error < best.error:
                    best = grid
                if grid.error <= EXACT * self.energy or low < math.log2(SMALLEST_STEP):
                    return best  # the target is out of reach: so few values cost no more bits than these
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

    def _at(self, log_step: float, shift: float) -> Grid | None:
        return self.measure(round_step(2.0 ** min(max(log_step, -126.0), 126.0)), shift)


def _offsets(excess: np.ndarray, counts: np.ndarray) -> tuple[int, ...]:
    """Means of what the entries of the first cells are above their multiples, in 1/256."""
    own = [(excess[i], counts[i]) for i in range(OFFSETS - 1)]
    own.append((excess[OFFSETS - 1 :].sum(), counts[OFFSETS - 1 :].sum()))
    return tuple(min(max(round(256 * float(e) / int(n)), -128), 127) if n else 0 for e, n in own)


def _entropy_bits(counts: np.ndarray) -> float:
    used = counts[counts > 0].astype(np.float64)
    total = used.sum()
    return float(total * math.log2(total) - (used * np.log2(used)).sum())


def _outlier_bits(cells: np.ndarray, ends: int, count: int) -> float:
    """About what the outliers in these cells, and beyond them, take."""
    number = int(cells.sum()) + ends
    if not number:
        return 0.0
    excess = np.arange(len(cells) + 1, dtype=np.float64)
    cells = np.append(cells, ends)
    excess[-1] += 32  # a guess at those beyond
    b = max(0.0, math.floor(math.log2(max(1.0, float(cells @ excess) / number))))
    codes = 2 * np.floor(np.log2(excess * 2.0**-b + 1)) + 1 + b
    return number * (math.log2(count / number) + 2.5) + float(cells @ codes)
