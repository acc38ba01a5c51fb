"""The grid of a tensor: the step that turns entries into integers, and how large these may be so that sums fit."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from gradwire.errors import SpecError

BITS = (32, 16, 8, 4)
SMALLEST = 2.0**-126  # step: a normal fp32 number
LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Grid:
    """An entry u becomes q = u / step, rounded and limited to ±most; the sum of all workers' q fits into `bits`."""

    step: float
    most: int
    bits: int


def exponent_of(largest: float) -> int:
    """Return the biased fp32 exponent of a magnitude: 0 if it is subnormal or zero, 255 if it is not finite."""
    return int(np.float32(largest).view(np.uint32)) >> 23


def most_of(bits: int, world: int) -> int:
    """Return the largest |q| of a worker, such that the sum of all workers' q fits into `bits`."""
    if bits not in BITS:
        raise SpecError(f"bits must be one of {', '.join(map(str, BITS))}, not {bits}")
    if world < 1:
        raise SpecError(f"there must be a worker at least, not {world}")
    most: int = (2 ** (bits - 1) - 1) // world
    if most < 1:
        enough = min(b for b in BITS if (2 ** (b - 1) - 1) // world)
        raise SpecError(
            f"{bits} bits do not hold the sum of {world} workers' codes, not even of −1, 0 and 1: "
            f"use homomorphic:bits={enough}"
        )
    return most


def by_largest(exponent: int, bits: int, world: int) -> Grid:
    """Return the grid on which no |u| < 2^(exponent − 126) is clipped; `exponent` is the biased one of the largest |u|.

    With 32 bits the step is a power of two, so that q·step has no error beyond the rounding to the grid.
    """
    most = most_of(bits, world)
    if not 0 <= exponent <= 254:
        raise ValueError(f"{exponent} is not the biased exponent of a finite fp32 number")
    limit = math.ldexp(1.0, exponent - 126)
    if bits == 32:
        step = limit / 2 ** ((most + 1).bit_length() - 1)  # u has 24 bits, so |u|/step is at most 2^p − 2^(p − 24)
        step = max(step, SMALLEST)
        return Grid(step, min(most, int(LARGEST / step)), bits)  # of the largest numbers, none is rounded to infinity
    return _grid(limit / most, most, bits)


def by_rms(rms: float, bits: int, world: int) -> Grid:
    """Return the grid that suits the bulk of the entries; what is clipped off larger ones waits in the error memory.

    Magnitudes are clipped at 1.05·log2(2·most + 1)·rms. That is between the best limit for Laplace's distribution,
    (0.5 + 0.8·log2(2·most + 1))·rms, and the best for GenNorm with β = 0.67, (1.33·log2(2·most + 1) − 0.5)·rms, both
    fitted to measurements: most gradients are between these two distributions.
    """
    if not 0 <= rms < math.inf:
        raise ValueError(f"{rms} is not a root mean square")
    most = most_of(bits, world)
    return _grid(1.05 * math.log2(2 * most + 1) * rms / most, most, bits)


def _grid(step: float, most: int, bits: int) -> Grid:
    """Return a grid whose step is the smallest fp32 number not below `step`, or less where most·step would overflow."""
    step = max(step, SMALLEST)
    if step * most >= LARGEST:
        near = np.float32(LARGEST / most)
        return Grid(float(near if float(near) * most <= LARGEST else np.nextafter(near, np.float32(0))), most, bits)
    near = np.float32(step)
    return Grid(float(near if float(near) >= step else np.nextafter(near, np.float32(np.inf))), most, bits)
