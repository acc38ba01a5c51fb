"""The search for the longest update that fits, by the secant method.

Few encodings have to do: each takes a tenth of a second for a model of ten million entries.
"""

from __future__ import annotations

from collections.abc import Callable

from gradwire.flower.shared.update import Encoded

Point = tuple[float, float]  # a setting, and the linearized length of the update that it leads to
CLOSE_ENOUGH = 0.93  # the part of the limit at which the search ends
TRIES = 4


def longest_fitting(
    attempt: Callable[[float], Encoded], limit: int, target: float, start: float, slope: float,
    linearize: Callable[[float], float], too_long: Point | None, largest: float,
) -> Encoded | None:  # fmt: skip
    """Return the longest of a few attempts that take at most `limit` bytes, or None if none does.

    `attempt` encodes with a setting, which is at most `largest`; a higher one makes the update longer. `linearize`
    maps lengths so that they grow about linearly with the setting, at first by `slope`. The search begins with the
    setting `start` and aims at the length `target`; `too_long` is a point that is known to be above the limit.
    """
    goal = linearize(target)
    setting = start
    fits: Point | None = None
    best: Encoded | None = None
    tried: set[float] = set()
    while len(tried) < TRIES and setting not in tried:
        tried.add(setting)
        encoded = attempt(setting)
        point = setting, linearize(len(encoded.data))
        if len(encoded.data) <= limit:
            if best is None or len(encoded.data) > len(best.data):
                best = encoded
            if len(encoded.data) >= CLOSE_ENOUGH * limit:
                break
            previous, fits = fits, point
        else:
            previous, too_long = too_long, point
        if fits and too_long:
            rise = (too_long[1] - fits[1]) or 1.0
            setting = fits[0] + min(max((goal - fits[1]) / rise, 0.1), 0.9) * (too_long[0] - fits[0])
            continue
        if previous and previous[0] != point[0] and previous[1] != point[1]:
            slope = max((point[1] - previous[1]) / (point[0] - previous[0]), slope / 4)
        setting = min(setting + (goal - point[1]) / slope, largest)
    return best
