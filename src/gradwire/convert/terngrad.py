"""TernGrad (arXiv 1705.07878, eq. 1–4): v → s·sign(v)·b, s = max|v|, b = 1 with probability |v|/s and else 0.

The paper clips at 2.5σ first (eq. 8), which lowers the variance and breaks the unbiasedness: here an option.
"""

from __future__ import annotations

import numpy as np

from gradwire.convert.conversion import Conversion
from gradwire.convert.level_stats import at_least, stats
from gradwire.convert.levels import SYMMETRIC, Levels


class TernGrad(Levels):
    """The levels −s, 0 and s; a `clip` above 0 cuts off magnitudes beyond clip·σ first."""

    kind = SYMMETRIC
    stochastic = True
    outward = True

    def __init__(self, clip: float, bucket: int, precision: str, coder: str):
        super().__init__(3, bucket, precision, coder)
        self.clip = clip

    def fit(self, conversion: Conversion, starts: np.ndarray) -> np.ndarray:
        """Return the numbers of every bucket, as `Levels.fit` promises: s, its largest magnitude."""
        statistics = stats(conversion, starts)
        scale = np.maximum(-statistics["min"], statistics["max"])
        if self.clip:
            scale = np.minimum(scale, self.clip * statistics["sigma"])
        return at_least(scale)[:, None]
