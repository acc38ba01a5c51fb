"""What happens to a training: each fault, when it strikes, and what the ranks must then say."""

from __future__ import annotations

import random
import re
import time
from dataclasses import dataclass

# Faults that end an attempt: all other ranks must raise, and all are started anew from a checkpoint.
FATAL = ("kill", "kill while saving", "stop", "late", "exception", "aggregator killed")
# Faults that must not be noticed.
HARMLESS = ("pause", "slow", "clock", "garbage", "packet loss", "full disk", "other spec")
OF_AGGREGATOR = ("aggregator restarted", "lossy relay", "flood", "fallback")
SOON = 15.0  # seconds in which a survivor says that a rank is gone; a second, on a machine that has nothing else to do


@dataclass(frozen=True)
class Fault:
    kind: str
    victim: int
    step: int
    seconds: float = 0.0  # of a pause or a delay
    moment: float = 0.0  # seconds into the step

    def __str__(self) -> str:
        return f"{self.kind} of rank {self.victim} in step {self.step}"

    @property
    def is_fatal(self) -> bool:
        return self.kind in FATAL

    def before_step(self, rank: int, step: int, chance: random.Random) -> None:
        """The part of it that a rank does to itself."""
        if self.kind == "clock" and chance.random() < 0.5:
            jump_clock(chance.choice((-86400, -3600.0, -1.0, 1.0, 3600.0, 40 * 86400)))
        if (rank, step) != (self.victim, self.step):
            return
        if self.kind in ("late", "slow"):
            time.sleep(self.seconds)
        if self.kind == "exception":
            raise KeyError("an error of the user's own")

    def strikes_while_saving(self, rank: int, step: int) -> bool:
        return self.kind == "kill while saving" and rank == self.victim and step >= self.step

    def problem(self, kind: str, text: str, world: int, sums_alone: bool) -> str:
        """What is wrong with the error that a survivor raised, or nothing."""
        if self.kind == "aggregator killed":
            return "" if (kind == "AggregateError" and "listens" in text) or "no answer" in text else "another cause"
        if kind != "AggregateError":
            return f"raised {kind}"
        named = {rank for rank in range(world) if re.search(rf"\brank {rank}\b", text)}
        if self.victim not in named and f"worker {self.victim}" not in text:
            return "did not name the rank"
        if named - {self.victim} and self.kind != "late":  # who waits is named, too
            return "named another rank"
        if self.kind == "exception" and "has raised an error" in text:  # it had not ended yet
            return ""
        causes = {"kill": "gone", "kill while saving": "gone", "exception": "gone", "stop": "stopped", "late": "alive"}
        return "" if causes[self.kind] in text or sums_alone else "named another cause"


_real_time, _real_time_ns = time.time, time.time_ns
_jumps: list[float] = []


def jump_clock(seconds: float) -> None:
    """Set this process's time of day forward or back."""
    _jumps.append(seconds)
    time.time = lambda: _real_time() + sum(_jumps)
    time.time_ns = lambda: _real_time_ns() + int(sum(_jumps) * 1e9)
