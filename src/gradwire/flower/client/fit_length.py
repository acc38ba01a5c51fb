"""The longest update that fits, by few encodings: each takes a tenth of a second for a model of ten million entries."""

from __future__ import annotations

from collections.abc import Callable

from gradwire.flower.shared.update import Encoded

Point = tuple[float, float]  # x, and a straightened length
ENOUGH = 0.93  # of the limit: not searched further
TRIES = 4


def closest(
    make: Callable[[float], Encoded], limit: int, target: float, x: float, slope: float,
    straight: Callable[[float], float], high: Point | None, most: float,
) -> Encoded | None:  # fmt: skip
    """The longest of a few encodings within the limit; None if none is.

    Lengths grow with x up to `most`, straight(length) about in proportion, by `slope` at first: a secant, begun at x,
    leads to the target. `high` is a point that is known to be too long.
    """
    goal = straight(target)
    low: Point | None = None
    best: Encoded | None = None
    tried: set[float] = set()
    while len(tried) < TRIES and x not in tried:
        tried.add(x)
        found = make(x)
        here = x, straight(len(found.data))
        if len(found.data) <= limit:
            if best is None or len(found.data) > len(best.data):
                best = found
            if len(found.data) >= ENOUGH * limit:
                break
            other, low = low, here
        else:
            other, high = high, here
        if low and high:
            rise = (high[1] - low[1]) or 1.0
            x = low[0] + min(max((goal - low[1]) / rise, 0.1), 0.9) * (high[0] - low[0])
            continue
        if other and other[0] != here[0] and other[1] != here[1]:
            slope = max((here[1] - other[1]) / (here[0] - other[0]), slope / 4)
        x = min(x + (goal - here[1]) / slope, most)
    return best
