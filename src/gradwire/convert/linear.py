"""Evenly spaced levels from the least to the greatest entry, stochastic and without bias: the baseline `linear`."""

from __future__ import annotations

import numpy as np

from gradwire.convert.conversion import Job
from gradwire.convert.level_stats import stats
from gradwire.convert.levels import EVEN, Levels


class Linear(Levels):
    kind = EVEN
    stochastic = True
    outward = True

    def fit(self, job: Job, starts: np.ndarray) -> np.ndarray:
        found = stats(job, starts)
        return np.stack([found["min"], found["max"]], axis=1).astype(np.float32) + np.float32(0)
