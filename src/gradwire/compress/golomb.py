"""Golomb–Rice code of the gaps between positions, as SBC codes them (arXiv 1805.08768).

Positions at random with density p have geometric gaps, for which b* = 1 + ⌊log2(ln(φ−1)/ln(1−p))⌋ is best,
φ the golden ratio; expected bits per position are then b* + 1/(1−(1−p)^(2^b*)).

This is the rule for positions of sparse frames. The outliers of ECQ choose the parameters of their codes by rules of
their own (convert/outliers.py).
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
    """Return the paper's figure: the expected bits of a position, with b*, if positions are random with density p."""
    b = best_for(p)
    return float(b + 1 / (1 - (1 - p) ** 2**b))


def choose(gaps: np.ndarray, elements: int) -> tuple[int, int]:
    """Return the b with which the codes of these gaps are shortest (the smallest of equals), and their bits.

    From b to b + 1, each gap gets one more bit of remainder, and the quotients q = ⌊gap/2ᵇ⌋ take Σ⌈q/2⌉ bits less. This
    saving shrinks as b grows, so that the length is convex in b, and walking downhill from b* leads to the least.
    """
    b = best_for(len(gaps) / elements)
    bits = kernels.golomb_bits(gaps, b)
    while b < LARGEST and (other := kernels.golomb_bits(gaps, b + 1)) < bits:
        b, bits = b + 1, other
    while b > 0 and (other := kernels.golomb_bits(gaps, b - 1)) <= bits:
        b, bits = b - 1, other
    return b, bits
