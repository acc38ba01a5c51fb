"""BinGrad (arXiv 2002.11082): one bit an entry.

BinGrad-b (biased): two levels, the means of both sides of a threshold that is their midpoint: Lloyd and Max's
condition. Iterating it from the mean may stop at a local optimum; the search over the sorted entries does not.
BinGrad-pb (partially biased): levels ±b; |v| ≥ b goes to sign(v)·b, everything else to −b or b without bias. The error
is least at b = (1/n)·Σ_{|v| ≥ b} |v|.
"""

from __future__ import annotations

import numpy as np

from gradwire import kernels
from gradwire.convert.conversion import Conversion
from gradwire.convert.level_stats import clip_limits
from gradwire.convert.levels import EXPLICIT, SYMMETRIC, Levels


class BinGrad(Levels):
    """One bit an entry; `form` is "b" or "pb", and a `clip` above 0 cuts off magnitudes beyond clip·σ first."""

    def __init__(self, form: str, clip: float, bucket: int, precision: str, coder: str):
        super().__init__(2, bucket, precision, coder)
        self.stochastic = form == "pb"
        self.kind = SYMMETRIC if form == "pb" else EXPLICIT
        self.search, self.clip = {"b": "two", "pb": "pair"}[form], clip

    def fit(self, conversion: Conversion, starts: np.ndarray) -> np.ndarray:
        """Return the numbers of every bucket, as `Levels.fit` promises: both levels, or b of the levels ±b."""
        limits = clip_limits(conversion, starts, self.clip)
        return kernels.search_levels(
            conversion.gradient, conversion.memory, conversion.decay, starts, limits, 2, self.search
        )
