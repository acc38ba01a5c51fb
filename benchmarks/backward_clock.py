"""Time of a task on a CPU or a GPU, and of its parts."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from gradwire import kernels
from gradwire.backward.choice import Choice

LEAST = 0.01  # seconds of a sample: what is quicker is repeated
PARTS = ("norms", "choose", "take")
Task = Callable[[], object]


class Clock:
    """Seconds of a task; on a GPU those of the stream, waits for the CPU included."""

    def __init__(self, device: str):
        self.cuda = device == "cuda"

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def seconds(self, task: Task, repeat: int) -> float:
        self.wait()
        start = time.perf_counter()
        for _ in range(repeat):
            task()
        self.wait()
        return (time.perf_counter() - start) / repeat

    def repeats(self, task: Task) -> int:
        task()  # compiles kernels, touches memory for the first time
        return max(1, math.ceil(LEAST / self.seconds(task, 1)))


@contextlib.contextmanager
def timed_parts(clock: Clock) -> Iterator[dict[str, float]]:
    """Seconds in the kernels and in the choice, of what is done meanwhile."""
    spent = dict.fromkeys(PARTS, 0.0)

    def timed(part: str, function: Callable) -> Callable:
        def inner(*arguments: Any) -> Any:
            clock.wait()
            start = time.perf_counter()
            outcome = function(*arguments)
            clock.wait()
            spent[part] += time.perf_counter() - start
            return outcome

        return inner

    places = [(kernels, "row_norms"), (Choice, "pick"), (kernels, "take_rows")]
    before = [getattr(place, name) for place, name in places]
    try:
        for (place, name), function, part in zip(places, before, PARTS, strict=True):
            setattr(place, name, timed(part, function))
        yield spent
    finally:
        for (place, name), function in zip(places, before, strict=True):
            setattr(place, name, function)
