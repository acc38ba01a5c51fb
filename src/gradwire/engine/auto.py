"""`auto`: every candidate is tried for some steps, and the fastest of those with a small enough error is kept.

What counts is the time of whole training steps, as the user has them, and on the slowest rank. When it changes for
good, because the link did, all are tried again, on the link as it is then. Ranks decide from the same figures, so they
decide alike.

A rank that is alone has nobody to send to: it stays with plain all-reduce, and tries nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from gradwire.catalogue.spec import number, split
from gradwire.errors import SpecError

EXACT = "exact"  # plain all-reduce
HALF = "bf16 all-reduce"  # of fp32 gradients; fp16 would take as many bytes, and overflow
PLAIN = {HALF: 2, EXACT: 4}  # candidates without frames, and the bytes that an entry takes
CANDIDATES = (
    "co3",
    "ecq:rate=1",
    "sbc:p=0.01,mask=off,warmup=0,small=co3",
    "sbc:p=0.001,mask=off,warmup=0,small=co3",
    *PLAIN,  # the last ones, since they may be left out as hopeless
)
STRUCTURED = "structured"  # a candidate beside them on links so slow that the time of its coding may pay
# Each goes on from the others' memories.
RECIPE_NAMES = {split(spec)[0] for spec in (STRUCTURED, *CANDIDATES) if spec not in PLAIN}
MEASURED_BY = {HALF: "bf16"}  # the recipe with the same error, of candidates that are none
DEFAULT_ERROR = 0.1
SKIPPED, TIMED = 5, 5  # steps of a trial; in the first ones the aggregation is chosen, and lengths are agreed on
CHECK = 32  # steps between looks at whether anything has changed
CHANGED = 1.3  # times slower or faster
NEARLY = 1.03  # times as slow as the fastest: then the one with the smaller error is taken
HOPELESS = 2.0  # times as slow as the best, for its bytes alone

Agree = Callable[[list[float]], list[float]]  # the largest of all ranks, one by one


@dataclass
class Trial:
    """A candidate: its relative squared error, and the median seconds of its training steps once it was tried."""

    spec: str
    error: float
    seconds: float = float("inf")


@dataclass
class Auto:
    """Tries every candidate for some steps, and settles on the fastest whose error is small enough.

    All ranks call `step_done` after every step, and so `agree` in the same steps: they decide alike.
    """

    agree: Agree
    plain_seconds: Callable[[int], float]  # what all-reduce of so many bytes an entry would take for its bytes alone
    target: float = DEFAULT_ERROR
    candidates: Callable[[], Sequence[str]] = lambda: CANDIDATES  # asked whenever all are tried: links change
    alone: bool = False  # whether there is one rank only
    settled: bool = False
    tried: Sequence[str] = ()  # the candidates that were tried last, or are
    trials: list[Trial] = field(default_factory=list)  # that are over
    _left: list[Trial] = field(default_factory=list)  # the first is under way
    _times: list[float] = field(default_factory=list)
    _strikes: int = 0
    _baseline: float | None = None

    def __post_init__(self) -> None:
        if self.alone:
            self.settled = True
        else:
            self._try_all()

    def _try_all(self) -> None:
        self.settled = False
        self.tried = self.candidates()
        self.trials, self._left = [], [Trial(spec, 0.0) for spec in self.tried]
        self._times = []

    @property
    def spec(self) -> str:
        """The spec to use in the next step."""
        if self.alone:
            return EXACT
        return self._best().spec if self.settled else self._left[0].spec

    @property
    def measuring(self) -> bool:
        """Whether the next step is to measure the errors of all candidates: the second, which has an error memory."""
        return not self.settled and not self.trials and len(self._times) == 1

    def step_done(self, seconds: float, errors: Mapping[str, float]) -> None:
        """Learn from a step: its seconds, and the relative squared errors of the candidates if they were measured."""
        if self.alone:
            return
        self._times.append(seconds)
        if self.settled:
            self._watch()
        elif errors:
            self._leave_out(errors)
        elif len(self._times) == SKIPPED + TIMED:
            (self._left[0].seconds,) = self.agree([statistics.median(self._times[SKIPPED:])])
            self._next()

    def _leave_out(self, errors: Mapping[str, float]) -> None:
        """Leave out the candidates whose error is too large on any rank."""
        measured = [errors.get(MEASURED_BY.get(trial.spec, trial.spec), 0.0) for trial in self._left]
        agreed = self.agree([error if math.isfinite(error) else math.inf for error in measured])
        if math.inf in agreed:  # a gradient was not finite, as in the first steps with a GradScaler: measure the next
            self._times.pop()
            return
        under_way = self._left[0].spec
        self._left = [Trial(t.spec, error) for t, error in zip(self._left, agreed, strict=True) if error <= self.target]
        if self._left[0].spec != under_way:
            self._times = []

    def _next(self) -> None:
        self._times = []
        self.trials.append(self._left.pop(0))
        while self._left and self._is_hopeless(self._left[0].spec):
            self._left.pop(0)
        if not self._left:
            self.settled = True
            self._baseline, self._strikes = None, 0

    def _is_hopeless(self, spec: str) -> bool:
        best = min(trial.seconds for trial in self.trials)
        return spec in PLAIN and self.plain_seconds(PLAIN[spec]) > HOPELESS * best

    def _best(self) -> Trial:
        fastest = min(trial.seconds for trial in self.trials)
        return min((t for t in self.trials if t.seconds <= NEARLY * fastest), key=lambda t: t.error)

    @property
    def reason(self) -> str:
        """What was chosen and why, in a line: the times of whole training steps with each candidate."""
        tried = sorted(self.trials, key=lambda trial: trial.seconds)
        times = ", ".join(f"{trial.spec} {1e3 * trial.seconds:.1f} ms" for trial in tried)
        steps = (SKIPPED + TIMED) * len(self.trials)
        return f"{self.spec} from now on; whole steps took {times} ({steps} steps of trials)"

    def _watch(self) -> None:
        if len(self._times) < CHECK:
            return
        (now,) = self.agree([statistics.median(self._times)])
        self._times = []
        if self._baseline is None:
            self._baseline = now
        elif 1 / CHANGED < now / self._baseline < CHANGED:
            self._strikes = 0
        else:
            self._strikes += 1
            if self._strikes == 2:
                self._try_all()


def candidates(halves: bool, structured: bool, under_adam: bool) -> list[str]:
    """Return the specs to try.

    `halves` and `structured` say whether those that not every training tries are there. Under an Adam sparse recipes
    cost far more loss than their error tells, so that none is tried, whatever error is allowed.
    """
    recipes = [spec for spec in CANDIDATES if spec not in PLAIN and not (under_adam and spec.startswith("sbc:"))]
    plain = [spec for spec in PLAIN if halves or spec != HALF]
    return [*recipes, *([STRUCTURED] if structured else []), *plain]


def parse(spec: str) -> float | None:
    """Return the error target of `auto` or `auto:error=0.1`; None for any other spec."""
    name, given = split(spec)
    if name != "auto":
        return None
    unknown = set(given) - {"error"}
    if unknown:
        raise SpecError(f"auto has one parameter, error, not {', '.join(sorted(unknown))}: such as auto:error=0.1")
    return number(0, 1e9)(given.get("error", str(DEFAULT_ERROR)))
