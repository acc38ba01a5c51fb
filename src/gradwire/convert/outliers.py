"""The list of a grid's outliers: where they are and how far beyond the symbols' range (docs/wire-format.md).

The gaps between them have a Rice code and the excesses an exponential Golomb code. The rules for the parameters of both
are below; those for the positions of sparse frames are in compress/golomb.py.
"""

from __future__ import annotations

import numpy as np

from gradwire import kernels
from gradwire.errors import FrameError
from gradwire.frame.byte_fields import Reader, varint

LOOKED_AT = 4096  # the parameters are chosen by at most this many outliers
Outliers = tuple[np.ndarray, np.ndarray]  # positions, ascending; signed multiples


def write_outliers(outliers: Outliers, largest: int) -> bytes:
    """Return the bytes of a list of outliers; none for an empty list."""
    positions, multiples = outliers
    if not len(positions):
        return b""
    gaps = np.diff(positions, prepend=-1) - 1
    excesses = np.abs(multiples.astype(np.int64)) - largest - 1
    part = slice(None, None, -(-len(positions) // LOOKED_AT))
    a, b = _rice_parameter(gaps[part]), _golomb_parameter(excesses[part])
    codes = kernels.pack_outliers(gaps, multiples < 0, excesses, a, b)
    return varint(len(positions)) + bytes([a, b]) + codes


def read_outliers(data: memoryview, elements: int, largest: int, capacity: int | None = None) -> Outliers:
    """Read a list of at most `capacity` outliers, all of whose positions are below `elements`."""
    if not len(data):
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int32)
    reader = Reader(data)
    count = reader.varint(elements)
    a, b = reader.byte(), reader.byte()
    codes = reader.rest()
    # No encoder lists more than this: they would take more memory than their tensor.
    too_many = count > min(kernels.grid_capacity(elements) if capacity is None else capacity, 8 * len(codes))
    if not count or a > kernels.GAP_LIMIT or b > kernels.EXCESS_LIMIT or too_many:
        raise FrameError("invalid outliers")
    return kernels.unpack_outliers(codes, count, elements, largest, a, b)


def _rice_parameter(gaps: np.ndarray) -> int:
    """Return the parameter with which the Rice codes of these gaps are shortest.

    Only two are tried: for geometric gaps, the best is ⌊log₂(mean + 1)⌋ or one less.
    """
    guess = int(int(gaps.sum()) // len(gaps) + 1).bit_length() - 1
    return min(range(max(0, guess - 1), guess + 1), key=lambda a: int((gaps >> a).sum()) + a * len(gaps))


def _golomb_parameter(excesses: np.ndarray) -> int:
    """Return the parameter of the exponential Golomb code for these excesses: from 0 up, while codes get shorter."""

    def bits(b: int) -> int:
        return 2 * int(np.frexp((excesses >> b) + 1)[1].sum()) + b * len(excesses)  # frexp counts the bits of a number

    best = 0
    while best < kernels.EXCESS_LIMIT and bits(best + 1) < bits(best):
        best += 1
    return best
