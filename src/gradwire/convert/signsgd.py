"""signSGD with error feedback (EF-signSGD, arXiv 1901.09847, alg. 1): (‖u‖₁/d)·sign(u), the rest remembered.

Without the memory it does not converge in general (the paper's counterexamples); the sign of zero is +.
"""

from __future__ import annotations

import numpy as np

from gradwire.convert.conversion import Conversion
from gradwire.convert.level_stats import stats
from gradwire.convert.levels import SYMMETRIC, Levels


class SignSGD(Levels):
    """The signs of a bucket, times its mean magnitude."""

    kind = SYMMETRIC

    def __init__(self, bucket: int, precision: str, coder: str):
        super().__init__(2, bucket, precision, coder)

    def fit(self, conversion: Conversion, starts: np.ndarray) -> np.ndarray:
        """Return the numbers of every bucket, as `Levels.fit` promises: its mean magnitude."""
        return stats(conversion, starts)["magnitude"].astype(np.float32)[:, None]
