"""Adaptive rates: in each round the server tells clients how finely they have to quantize.

AdaQuantFL (arXiv 2102.04487) begins coarse and grows finer as the training loss f falls: s_k = ⌈√(f(w₀)/f(w_k))·s₀⌉
intervals between 0 and the largest magnitude. FedDQ (arXiv 2110.02291) does the opposite: it keeps the resolution of
updates, and since their range shrinks as the training converges, so does the number of bits, ⌈log₂(range/resolution)⌉.

The server holds an `AdaQuantFL` or a `FedDQ`: `instruction()` returns the text that it sends with the model, and
`observe()` takes the losses that clients report. A client turns the text into a spec by `instructed_spec.spec_for`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gradwire.catalogue.spec import Parser, number, split, whole
from gradwire.convert.levels import MOST_LEVELS
from gradwire.errors import SpecError, unknown_name

MOST_INTERVALS = (MOST_LEVELS - 1) // 2
LONGEST_INSTRUCTION = 4096  # characters

_intervals = whole(1, MOST_INTERVALS)
_resolution = number(1e-12, 1e12)


@dataclass
class AdaQuantFL:
    """A rate that grows finer as the loss falls.

    It begins with `start` intervals and never uses more than `most`; `loss` is the name of the metric in clients'
    replies that it follows. QSGD's s intervals on either side of zero are 2s + 1 levels: s = 2 is `qsgd:levels=5`.
    """

    start: int = 2
    loss: str = "train_loss"
    most: int = MOST_INTERVALS
    intervals: int = field(init=False)  # s of the next round
    _first: float | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self.start, self.most = (int(_intervals(str(n))) for n in (self.start, self.most))
        if self.start > self.most:
            raise SpecError(f"adaquantfl: start={self.start} is above most={self.most}")
        self.intervals = self.start

    @property
    def informed(self) -> bool:
        """Whether any client has reported its loss so far."""
        return self._first is not None

    def instruction(self) -> str:
        """Return the recipe that clients use in the next round."""
        return f"qsgd:levels={2 * self.intervals + 1}"

    def observe(self, losses: Sequence[tuple[float, float]]) -> None:
        """Take the (loss, weight) pair of each client after a round; the mean of the first round is f(w₀).

        Pairs that are not finite or have no weight are ignored.
        """
        usable = [(x, w) for x, w in losses if math.isfinite(x) and math.isfinite(w) and w > 0]
        if not usable:
            return
        mean = sum(x * w for x, w in usable) / sum(w for _, w in usable)
        if not math.isfinite(mean):
            return
        if self._first is None:
            self._first = mean
        if self._first <= 0:
            return  # a ratio to a loss that is not positive says nothing
        wanted = self.start * math.sqrt(self._first / mean) if mean > 0 else math.inf
        self.intervals = max(1, math.ceil(min(wanted, self.most)))


@dataclass
class FedDQ:
    """A rate that keeps the resolution of updates, so that their bits become fewer as their range shrinks."""

    resolution: float = 0.005
    loss: None = field(default=None, init=False, repr=False)  # it follows no metric
    informed = True

    def __post_init__(self) -> None:
        self.resolution = float(_resolution(str(self.resolution)))

    def instruction(self) -> str:
        """Return the resolution as text; each client chooses the levels of its tensors by it."""
        return f"feddq:resolution={self.resolution!r}"

    def observe(self, losses: Sequence[tuple[float, float]]) -> None:
        """Ignore the losses: clients follow the range of their own updates."""


Rate = AdaQuantFL | FedDQ
_RATES: dict[str, tuple[Callable[..., Rate], dict[str, Parser]]] = {
    "adaquantfl": (AdaQuantFL, {"start": _intervals, "loss": str, "most": _intervals}),
    "feddq": (FedDQ, {"resolution": _resolution}),
}


def parse(text: str) -> Rate:
    """Parse the text form of a rate: "adaquantfl", "adaquantfl:start=4,loss=loss", "feddq:resolution=0.01"."""
    name, parameters = split(text)
    if name not in _RATES:
        raise unknown_name("adaptive rate", name, _RATES)
    rate_class, parsers = _RATES[name]
    for key in parameters:
        if key not in parsers:
            raise unknown_name(f"parameter of {name}", key, parsers)
    try:
        return rate_class(**{key: parsers[key](value) for key, value in parameters.items()})
    except SpecError as error:
        raise SpecError(f"{name}: {error}") from None
