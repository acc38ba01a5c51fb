"""Evenly spaced levels from the least to the greatest entry, stochastic and without bias: the baseline `linear`."""

from __future__ import annotations

import numpy as np

from gradwire.convert.conversion import Conversion
from gradwire.convert.level_stats import stats
from gradwire.convert.levels import EVEN, Levels


class LinearLevels(Levels):
    """Evenly spaced levels from the least to the greatest entry of a bucket."""

    kind = EVEN
    stochastic = True
    outward = True

    def fit(self, conversion: Conversion, starts: np.ndarray) -> np.ndarray:
        """Return the numbers of every bucket, as `Levels.fit` promises: the least and the greatest entry."""
        statistics = stats(conversion, starts)
        return np.stack([statistics["min"], statistics["max"]], axis=1).astype(np.float32) + np.float32(0)
