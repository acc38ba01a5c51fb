"""Limits on what one reply can do to the mean of its round: `max_norm` and `max_weight` of `Compressed`.

A limit is a number, or text such as "10x", which is ten times the median of the round. If fewer than `FEWEST` clients
have replied, the last accepted replies of others count too; if there are still fewer, there is no median.
"auto" keeps out what no honest client sends, whatever its data are, and nothing else.
"""

from __future__ import annotations

import math
import re
import statistics
import sys
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from gradwire.errors import SpecError

FEWEST = 3  # clients of which a median says something: of two, either may be the odd one
REMEMBERED = 32  # clients
# What "auto" rejects: weights a million times the median, and updates a million times as long as the median that are
# also ten times as long as the model itself: late in a training, the updates of most clients may be next to nothing.
AUTO, AUTO_MODEL = 1e6, 10.0


@dataclass(frozen=True)
class Limit:
    """A limit as the user set it: `most` as a number or `times` the median; neither of them for no limit."""

    most: float = math.inf
    times: float = math.inf
    is_auto: bool = False

    @classmethod
    def parse(cls, name: str, value: float | str | None) -> Limit:
        """Read the value of the argument of this name. Raises a SpecError."""
        if value is None:
            return cls()
        if value == "auto":
            return cls(times=AUTO, is_auto=True)
        if isinstance(value, str) and (match := re.fullmatch(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*x\s*", value, re.ASCII)):
            if float(match[1]) >= 1:
                return cls(times=float(match[1]))
        elif isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max:
            return cls(most=float(value))
        raise SpecError(
            f"{name}={value!r}: give a number above 0, '10x' for ten times the median of the round, 'auto' or None"
        )

    @property
    def is_set(self) -> bool:
        """Whether anything can exceed it."""
        return min(self.most, self.times) < math.inf


class Median:
    """The median of a round, or of that and the last values of other clients where the round has too few.

    Every client counts once: otherwise one that is often alone in its round could make all others look too large.
    """

    def __init__(self) -> None:
        self._accepted: OrderedDict[int, float] = OrderedDict()  # the last value of each client

    def of(self, values: Mapping[int, float]) -> float | None:
        """Return the median of a round of these values, by client, or None if nothing can be said, as of zeros."""
        counted = {**self._accepted, **values} if len(values) < FEWEST else values
        middle = statistics.median(counted.values()) if len(counted) >= FEWEST else 0.0
        return middle if 0 < middle < math.inf else None

    def accept(self, values: Mapping[int, float]) -> None:
        """Remember the values of the replies that a strategy got."""
        for node, value in values.items():
            self._accepted[node] = value
            self._accepted.move_to_end(node)
        while len(self._accepted) > REMEMBERED:
            self._accepted.popitem(last=False)
