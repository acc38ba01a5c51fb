"""What several methods ask of a bucket."""

from __future__ import annotations

import numpy as np

from gradwire import kernels
from gradwire.convert.conversion import Conversion
from gradwire.convert.level_numbers import LARGEST


def stats(conversion: Conversion, starts: np.ndarray) -> dict[str, np.ndarray]:
    """Of every bucket of u: min, max, its mean magnitude, root mean square and standard deviation σ; fp64."""
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
    """clip·σ of every bucket, fp32; None where nothing is clipped (clip = 0)."""
    return at_least(clip * stats(conversion, starts)["sigma"]) if clip else None


def at_least(numbers: np.ndarray) -> np.ndarray:
    """fp64 numbers from above, as fp32: a level that encloses an entry may not be rounded below it."""
    numbers = np.minimum(numbers, LARGEST)
    rounded = numbers.astype(np.float32)
    return np.where(rounded < numbers, np.nextafter(rounded, np.float32(np.inf)), rounded)
