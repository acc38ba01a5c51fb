"""Adaptive rates: the server says in each round how finely clients quantize.

AdaQuantFL (arXiv 2102.04487) begins coarse and grows finer as the training loss f falls: s_k = ⌈√(f(w₀)/f(w_k))·s₀⌉
intervals between 0 and the largest magnitude. FedDQ (arXiv 2110.02291) does the opposite: it keeps the resolution of
updates, and since their range shrinks as the training converges, so does the number of bits, ⌈log₂(range/resolution)⌉.

The server has an `AdaQuantFL` or a `FedDQ`: `instruction()` is the text that it sends along with the model, and
`observe()` is told the losses that come back. A client makes its spec of the text by `spec_for`.
"""

from __future__ import annotations

import glob
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gradwire import kernels
from gradwire.catalogue.all_recipes import recipe
from gradwire.catalogue.spec import Parser, number, split, whole
from gradwire.catalogue.spec_by_name import Spec
from gradwire.convert.levels import MOST_LEVELS
from gradwire.errors import SpecError, unknown_name
from gradwire.flower.shared.update import STATISTICS, Tensors

MOST_INTERVALS = (MOST_LEVELS - 1) // 2
LEAST_BITS, MOST_BITS = 2, 8  # with fewer, nothing but noise is left of most tensors; with more, levels are too many
LONGEST = 4096  # characters of an instruction

_intervals = whole(1, MOST_INTERVALS)
_resolution = number(1e-12, 1e12)


@dataclass
class AdaQuantFL:
    """Finer as the loss falls; `loss` is the name of the metric in clients' replies, and `most` bounds the intervals.

    QSGD's s intervals on either side of zero are 2s + 1 levels: s = 2 is `qsgd:levels=5`.
    """

    start: int = 2
    loss: str = "train_loss"
    most: int = MOST_INTERVALS
    intervals: int = field(init=False)  # s, of the next round
    _first: float | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self.start, self.most = (int(_intervals(str(n))) for n in (self.start, self.most))
        if self.start > self.most:
            raise SpecError(f"adaquantfl: start={self.start} is above most={self.most}")
        self.intervals = self.start

    @property
    def informed(self) -> bool:
        """Whether a client has told its loss."""
        return self._first is not None

    def instruction(self) -> str:
        return f"qsgd:levels={2 * self.intervals + 1}"

    def observe(self, losses: Sequence[tuple[float, float]]) -> None:
        """The (loss, weight) of each client in the round that is over; the first round's mean is f(w₀)."""
        known = [(x, w) for x, w in losses if math.isfinite(x) and math.isfinite(w) and w > 0]
        if not known:
            return
        mean = sum(x * w for x, w in known) / sum(w for _, w in known)
        if not math.isfinite(mean):
            return
        if self._first is None:
            self._first = mean
        if self._first <= 0:
            return  # a ratio to it says nothing
        wanted = self.start * math.sqrt(self._first / mean) if mean > 0 else math.inf
        self.intervals = max(1, math.ceil(min(wanted, self.most)))


@dataclass
class FedDQ:
    """Updates to within `resolution`, with as many bits as their range needs: fewer as it shrinks."""

    resolution: float = 0.005
    loss: None = field(default=None, init=False, repr=False)  # needs none
    informed = True

    def __post_init__(self) -> None:
        self.resolution = float(_resolution(str(self.resolution)))

    def instruction(self) -> str:
        return f"feddq:resolution={self.resolution!r}"

    def observe(self, losses: Sequence[tuple[float, float]]) -> None:
        """Nothing: clients follow the range of their updates."""


Rate = AdaQuantFL | FedDQ
_RATES: dict[str, tuple[Callable[..., Rate], dict[str, Parser]]] = {
    "adaquantfl": (AdaQuantFL, {"start": _intervals, "loss": str, "most": _intervals}),
    "feddq": (FedDQ, {"resolution": _resolution}),
}


def parse(text: str) -> Rate:
    """Of the command line: "adaquantfl", "adaquantfl:start=4,loss=loss", "feddq:resolution=0.01"."""
    name, given = split(text)
    if name not in _RATES:
        raise unknown_name("adaptive rate", name, _RATES)
    make, parsers = _RATES[name]
    for key in given:
        if key not in parsers:
            raise unknown_name(f"parameter of {name}", key, parsers)
    try:
        return make(**{key: parsers[key](value) for key, value in given.items()})
    except SpecError as error:
        raise SpecError(f"{name}: {error}") from None


# ── on the client ─────────────────────────────────────────────────────────────────────────────────


def spec_for(instruction: str, differences: Tensors) -> Spec:
    """The spec of an update under a server's instruction: that recipe, or FedDQ's levels for each tensor."""
    if not isinstance(instruction, str) or len(instruction) > LONGEST:
        raise SpecError("the server's instruction is not a spec such as 'qsgd:levels=5' or 'feddq:resolution=0.005'")
    if instruction.partition(":")[0].strip() != "feddq":
        recipe(instruction)
        return instruction
    rate = parse(instruction)
    assert isinstance(rate, FedDQ)
    own = {
        glob.escape(name): _levels(2 * kernels.absmax(t.detach().reshape(-1).float()), rate.resolution)
        for name, t in differences.items()
        if t.numel()
    }
    return {**dict.fromkeys(STATISTICS, "bf16"), **own, "*": _levels(0.0, rate.resolution)}


def _levels(span: float, resolution: float) -> str:
    """Of a tensor from −span/2 to span/2: the odd number of levels, one of them zero, that so many bits have room for.

    The paper's levels are 2^bits from the least to the greatest entry. Zero is worth more than the last level: most
    entries are next to it, and would be sent as half a step up or down.
    """
    ratio = span / resolution if math.isfinite(span) else 0.0  # what is not finite will be refused when it is encoded
    bits = math.ceil(math.log2(ratio)) if ratio > 1 else 0
    return f"qsgd:levels={2 ** min(max(bits, LEAST_BITS), MOST_BITS) - 1},bucket=0"
