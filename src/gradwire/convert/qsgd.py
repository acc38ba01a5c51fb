"""QSGD (arXiv 1610.02132, eq. 3): v → ‖v‖·sgn(v)·ξ(v), ξ one of 0, 1/s, …, 1, stochastic and without bias.

With s steps on either side there are 2s + 1 levels from −‖v‖ to ‖v‖. The paper's norm is the Euclidean one; with the
largest magnitude in its place (as its own experiments have it) the levels reach no further than the entries.
"""

from __future__ import annotations

import numpy as np

from gradwire.convert.conversion import Conversion
from gradwire.convert.level_stats import at_least, stats
from gradwire.convert.levels import SYMMETRIC, Levels


class QSGD(Levels):
    """Evenly spaced levels from −norm to norm; `norm` is "l2" or "max"."""

    kind = SYMMETRIC
    stochastic = True
    outward = True

    def __init__(self, levels: int, norm: str, bucket: int, precision: str, coder: str):
        super().__init__(levels, bucket, precision, coder)
        self.norm = norm

    def fit(self, conversion: Conversion, starts: np.ndarray) -> np.ndarray:
        """Return the numbers of every bucket, as `Levels.fit` promises: its norm."""
        statistics = stats(conversion, starts)
        largest = np.maximum(-statistics["min"], statistics["max"])
        # A sum of rounded squares may fall short of the one entry that it consists of.
        norm = largest if self.norm == "max" else np.maximum(statistics["norm"], largest)
        return at_least(norm)[:, None]
