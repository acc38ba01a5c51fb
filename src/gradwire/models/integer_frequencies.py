"""Integer frequencies that add up to a power of two, which every model returns and every entropy coder takes."""

from __future__ import annotations

import numpy as np

LARGEST = 1 << 14  # the largest frequency: the sum at the finest precision
with np.errstate(divide="ignore"):
    _LOG2 = np.log2(np.arange(LARGEST + 1))


def normalize(counts: np.ndarray, precision: int) -> np.ndarray:
    """Scale counts to integers that add up to 2^precision, at least 1 where a count is not 0 (docs/wire-format.md)."""
    counts = np.asarray(counts, dtype=np.int64)
    floor, remainder = np.divmod(counts << precision, np.add.reduce(counts))
    frequencies = np.maximum(floor, counts > 0)
    missing = (1 << precision) - int(np.add.reduce(frequencies))
    if missing > 0:
        remainder[floor == 0] = -1
        frequencies[(-remainder).argsort(kind="stable")[:missing]] += 1
    for _ in range(-missing):
        frequencies[np.argmax(frequencies)] -= 1
    return frequencies


def bits_per_symbol(frequencies: np.ndarray, precision: int) -> np.ndarray:
    """Return the ideal code length of each symbol; it is infinite where the frequency is 0."""
    bits: np.ndarray = precision - _LOG2[frequencies]
    return bits
