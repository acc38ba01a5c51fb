"""The cells of a float format under a GenNorm: their probabilities, and the step with the least squared error.

A cell is the interval of values that are rounded to the same magnitude. All of this is mathematics in fp64; coders
use only the integers that `integer_masses` makes of it, which are shipped (gennorm_tables.py).
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from gradwire.models.gennorm_moments import mean_square, partial_moments
from gradwire.small_float_formats import Format

MASS_BITS = 16  # integer masses add up to 2^16


def cell_edges(fmt: Format) -> np.ndarray:
    """Return the edges of the cells of the magnitudes at step 1: 0, the midpoints, infinity."""
    m = fmt.magnitudes
    return np.concatenate([[0.0], (m[1:] + m[:-1]) / 2, [np.inf]])


def cell_masses(fmt: Format, beta: float, step: float) -> np.ndarray:
    """Return the probability of each magnitude (both signs together) at α = 1."""
    return partial_moments(beta, cell_edges(fmt) * step, 0)


def nmse(fmt: Format, beta: float, step: float) -> float:
    """Return the expected squared error of the format over E x², at α = 1."""
    edges, values = cell_edges(fmt) * step, fmt.magnitudes * step
    p, first = partial_moments(beta, edges, 0), partial_moments(beta, edges, 1)
    return float(1 + (values**2 @ p - 2 * values @ first) / mean_square(beta))


@lru_cache(maxsize=4096)
def best_step(fmt: Format, beta: float) -> float:
    """Return the step (1/s of the paper) with the least squared error, at α = 1: scan, then golden section."""
    rms = math.sqrt(mean_square(beta))
    scan = np.log(rms / fmt.largest) + np.linspace(-3, 9, 121)
    errors = np.array([nmse(fmt, beta, math.exp(x)) for x in scan])
    plateau = np.flatnonzero(errors <= np.min(errors) * 1.001)
    if len(plateau) > 3:
        # Many steps are equally good, as for an 8-bit format: take one far from both underflow and overflow.
        return math.exp(scan[plateau].mean())
    best = int(np.argmin(errors))
    low, high = scan[max(best - 1, 0)], scan[min(best + 1, len(scan) - 1)]
    golden = (math.sqrt(5) - 1) / 2
    while high - low > 1e-7:
        a, b = high - golden * (high - low), low + golden * (high - low)
        if nmse(fmt, beta, math.exp(a)) < nmse(fmt, beta, math.exp(b)):
            high = b
        else:
            low = a
    return math.exp((low + high) / 2)


def integer_masses(fmt: Format, beta: float, step: float) -> np.ndarray:
    """Return the masses of the cells as integers ≥ 1 with w₀ + 2·Σw = 2^16: what the shipped tables hold."""
    total = 1 << MASS_BITS
    room = total - fmt.symbols  # so that the middle keeps at least 1 however the sides round
    side = np.maximum(1, np.rint(cell_masses(fmt, beta, step)[1:] / 2 * room)).astype(np.int64)
    middle = total - 2 * side.sum()
    return np.concatenate([[middle], side]).astype(np.uint16)
