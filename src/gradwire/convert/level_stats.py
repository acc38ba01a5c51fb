"""Statistics of the buckets of a tensor, which several methods derive their levels from."""

from __future__ import annotations

import numpy as np

from gradwire import kernels
from gradwire.convert.conversion import Conversion
from gradwire.convert.level_numbers import LARGEST


def stats(conversion: Conversion, starts: np.ndarray) -> dict[str, np.ndarray]:
    """Return statistics of u = g + decay·e by name, each with one fp64 number for every bucket.

    "min" and "max" are the least and the greatest entry, "magnitude" is the mean of |u|, "square" the mean of u²,
    "norm" the Euclidean norm (the root of the sum of squares), and "sigma" the standard deviation.
    """
    low, high, magnitudes, total, squares = kernels.bucket_stats(
        conversion.gradient, conversion.memory, conversion.decay, starts
    ).T
    n = np.diff(starts)
    mean, mean_square = total / n, squares / n
    sigma = np.sqrt(np.maximum(mean_square - mean * mean, 0))
    return {
        "min": low, "max": high, "magnitude": magnitudes / n, "norm": np.sqrt(squares), "square": mean_square,
        "sigma": sigma,
    }  # fmt: skip


def clip_limits(conversion: Conversion, starts: np.ndarray, clip: float) -> np.ndarray | None:
    """Return clip·σ of every bucket as fp32, or None if nothing is to be clipped (clip = 0)."""
    return at_least(clip * stats(conversion, starts)["sigma"]) if clip else None


def at_least(numbers: np.ndarray) -> np.ndarray:
    """Round fp64 numbers up to fp32: a level that is to enclose an entry must not be rounded to less than it."""
    numbers = np.minimum(numbers, LARGEST)
    rounded = numbers.astype(np.float32)
    return np.where(rounded < numbers, np.nextafter(rounded, np.float32(np.inf)), rounded)
