"""How finely frequencies are counted: a precision of p bits means that they add up to 2ᵖ."""

from __future__ import annotations

COARSE, FINE, FINEST = 8, 12, 14  # bits of precision; 8-bit tables decode half as fast again
SMALL_ALPHABET = 16  # symbols
# From this size on a coarse table may cost this factor in bytes: what it saves in decoding is worth that many bytes
# on any link above 100 Mbit/s. Smaller tensors need the margin for their headers.
LARGE, TOLERANCE = 1 << 20, 1.006


def finest_precision(symbols: int) -> int:
    """Return the precision for an alphabet of this size where bytes matter more than speed."""
    return FINE if symbols <= SMALL_ALPHABET else FINEST
