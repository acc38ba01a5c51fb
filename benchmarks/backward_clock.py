"""Time of a task on a CPU or a GPU, in a CUDA graph, and of its parts."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from gradwire import kernels
from gradwire.backward.row_choice import Choice

LEAST = 0.01  # seconds of a sample: what is quicker is repeated
PARTS = ("join", "choose", "take")
PLACES = ((kernels, "join_rows"), (Choice, "pick"), (kernels, "take_rows"))
HEAD_START = 2_000_000  # cycles, a millisecond: the GPU waits so long while the CPU puts work into its queue
Task = Callable[[], object]


class Clock:
    """On a GPU, `seconds` of a small task are those that Python and launches take; in a graph there are none."""

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

    def graph(self, task: Task) -> Task | None:
        """The task as a CUDA graph; None on a CPU, and where the task waits for the GPU."""
        if not self.cuda:
            return None
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):  # libraries get their workspaces, which they cannot while a graph is recorded
                task()
        torch.cuda.current_stream().wait_stream(side)
        recorded = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(recorded):
                task()
        except RuntimeError as error:
            print(f"no CUDA graph: {error}", file=sys.stderr)
            self.wait()
            return None
        return recorded.replay

    def parts(self, task: Task, repeat: int) -> dict[str, float]:
        """Seconds of the kernels and of the choice in it; on a GPU its own, not those of the launches."""
        marks: list[tuple[str, Any, Any]] = []
        with _noted(self._mark, marks):
            for _ in range(repeat):
                if self.cuda:
                    torch.cuda._sleep(HEAD_START)
                task()
                self.wait()
        spent = dict.fromkeys(PARTS, 0.0)
        for part, start, end in marks:
            spent[part] += (start.elapsed_time(end) / 1e3 if self.cuda else end - start) / repeat
        return spent

    def _mark(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


@contextlib.contextmanager
def _noted(mark: Callable[[], Any], marks: list[tuple[str, Any, Any]]) -> Iterator[None]:
    """Calls of the parts are noted in `marks`, with a mark before and one after."""

    def noted(part: str, function: Callable) -> Callable:
        def inner(*arguments: Any) -> Any:
            start = mark()
            outcome = function(*arguments)
            marks.append((part, start, mark()))
            return outcome

        return inner

    before = [getattr(place, name) for place, name in PLACES]
    try:
        for (place, name), function, part in zip(PLACES, before, PARTS, strict=True):
            setattr(place, name, noted(part, function))
        yield
    finally:
        for (place, name), function in zip(PLACES, before, strict=True):
            setattr(place, name, function)
