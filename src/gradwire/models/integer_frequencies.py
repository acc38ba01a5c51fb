"""Integer frequencies that add up to a power of two, which every model returns and every entropy coder takes."""

from __future__ import annotations

import numpy as np

LARGEST = 1 << 14  # the largest frequency: the sum at the finest precision
with np.errstate(divide="ignore"):
    _LOG2 = np.log2(np.arange(LARGEST + 1))


def normalize(counts: np.ndarray, precision: int) -> np.ndarray:
    """Scale counts to integers that add up to 2^precision, at least 1 where a count is not 0 (docs/wire-format.md)."""
    counts = np.asarray(counts, dtype=np.int64)
    target, total = 1 << precision, int(counts.sum())
    scaled = counts << precision
    floor = scaled // total
    frequencies = np.where(counts > 0, np.maximum(floor, 1), 0)
    missing = target - int(frequencies.sum())
    if missing > 0:
        remainder = np.where(floor > 0, scaled % total, -1)
        frequencies[np.argsort(-remainder, kind="stable")[:missing]] += 1
    for _ in range(-missing):
        frequencies[np.argmax(frequencies)] -= 1
    return frequencies


def bits_per_symbol(frequencies: np.ndarray, precision: int) -> np.ndarray:
    """Return the ideal code length of each symbol; it is infinite where the frequency is 0."""
    bits: np.ndarray = precision - _LOG2[frequencies]
    return bits
