"""Golomb–Rice code of the gaps between positions, as SBC codes them (arXiv 1805.08768).

Positions at random with density p have geometric gaps, for which b* = 1 + ⌊log2(ln(φ−1)/ln(1−p))⌋ is best,
φ the golden ratio; expected bits per position are then b* + 1/(1−(1−p)^(2^b*)).
"""

from __future__ import annotations

import math

import numpy as np

from gradwire import kernels

LARGEST = 47  # gaps are below 2⁴⁸


def best_for(p: float) -> int:
    """Return b* of the paper: the best parameter for positions at random with density p."""
    if p >= 1:
        return 0
    ratio = math.log((math.sqrt(5) - 1) / 2) / math.log1p(-p)
    return min(LARGEST, max(0, 1 + math.floor(math.log2(ratio))))


def expected_bits(p: float) -> float:
    """Return the bits per position at random positions with density p, with b*: the figure of the paper."""
    b = best_for(p)
    return float(b + 1 / (1 - (1 - p) ** 2**b))


def choose(gaps: np.ndarray, elements: int) -> tuple[int, int]:
    """Return the b that is shortest on these gaps (the smallest of equals), and how many bits it takes.

    The length is convex in b (one more bit of remainder saves Σ⌈⌊gap/2ᵇ⌋/2⌉ of the quotients, ever less), so walking
    downhill from b* finds the best of all.
    """
    b = best_for(len(gaps) / elements)
    bits = kernels.golomb_bits(gaps, b)
    while b < LARGEST and (other := kernels.golomb_bits(gaps, b + 1)) < bits:
        b, bits = b + 1, other
    while b > 0 and (other := kernels.golomb_bits(gaps, b - 1)) <= bits:
        b, bits = b - 1, other
    return b, bits
