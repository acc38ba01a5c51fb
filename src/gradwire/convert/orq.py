"""ORQ (arXiv 2002.11082): unbiased quantization to the levels with the least expected squared error.

An entry v in [b_k, b_{k+1}] goes up with probability (v − b_k)/(b_{k+1} − b_k); the expected squared error of a
bucket is Σ(b_{k+1} − v)(v − b_k). The outer levels are its minimum and maximum, and an inner level b between lo and hi
is best where #{v < b} = n − Σ(v − lo)/(hi − lo). The paper's greedy search solves the middle level first and recurs
into both halves; `search=polished` then solves each level once more between its neighbours, and `search=exact` finds
the optimum of all levels together.
"""

from __future__ import annotations

import numpy as np

from gradwire import kernels
from gradwire.convert.conversion import Conversion
from gradwire.convert.level_stats import clip_limits
from gradwire.convert.levels import Levels
from gradwire.errors import SpecError

MOST = 129


class ORQ(Levels):
    """Unbiased levels with the least expected squared error; `search` is "greedy", "polished" or "exact"."""

    stochastic = True
    outward = True

    def __init__(self, levels: int, search: str, clip: float, bucket: int, precision: str, coder: str):
        super().__init__(levels, bucket, precision, coder)
        self.search, self.clip = search, clip

    def fit(self, conversion: Conversion, starts: np.ndarray) -> np.ndarray:
        """Return the numbers of every bucket, as `Levels.fit` promises: all levels, from minimum to maximum."""
        limits = clip_limits(conversion, starts, self.clip)
        return kernels.search_levels(
            conversion.gradient, conversion.memory, conversion.decay, starts, limits, self.levels, self.search
        )


def parse_levels(text: str) -> int:
    """Parse a number of levels: 2^K + 1, because the greedy search halves its intervals."""
    allowed = [2**k + 1 for k in range(1, 8)]
    try:
        wanted = int(text)
    except ValueError:
        raise SpecError(f"{text!r} is not one of {', '.join(map(str, allowed))}") from None
    if wanted not in allowed:
        nearest = min(allowed, key=lambda n: abs(n - wanted))
        raise SpecError(f"{wanted} is not 2^K + 1: the nearest is {nearest} (allowed: {', '.join(map(str, allowed))})")
    return wanted
