"""Figures of the exchange for a log: to TensorBoard, or to any function of them and the step.

model.gradwire.log_to(SummaryWriter(), every=100)                  # or handle.log_to(...)
handle.log_to(lambda figures, step: wandb.log(figures, step))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gradwire.aggregate.messages.error_probe import CodingError, nmse
from gradwire.errors import GradwireError

Write = Callable[[dict[str, float], int], Any]
TOTALS = ("frame_bytes", "wire_bytes_sent", "wire_bytes_received", "encode_s", "decode_s", "wait_s")


class Monitor:
    """Writes figures to a log every `every` steps: the average of these steps, and the error of the last one.

    With `layers`, the error and the bytes of each layer are written too. It is called by the training thread.
    """

    def __init__(self, to: Any, every: int = 100, layers: bool = False):
        if not isinstance(every, int) or every < 1:
            raise GradwireError(f"every must be a number of steps from 1 on, not {every!r}")
        self.every, self.layers = every, layers
        self._write = _writer(to)
        self._before: dict[str, float] = {}

    def due(self, step: int) -> bool:
        """Tell whether figures are to be written after this step; the first step is number 1."""
        return step % self.every == 0

    def write(self, step: int, stats: Mapping[str, float], errors: Mapping[str, CodingError]) -> None:
        """Hand figures to the log; `stats` are totals since the start, `errors` those of the last step by layer."""
        before, self._before = self._before, dict(stats)
        steps = stats["steps"] - before.get("steps", 0)
        if steps <= 0:  # the totals have been reset
            return
        figures = {key: (stats[key] - before.get(key, 0)) / steps for key in TOTALS}
        frames = figures["frame_bytes"]
        if frames:
            figures["ratio"] = (stats["dense_bytes"] - before.get("dense_bytes", 0)) / steps / frames
        figures["nmse"] = nmse(errors.values())
        if self.layers:
            for name, error in errors.items():
                figures[f"nmse/{name}"] = nmse([error])
                figures[f"frame_bytes/{name}"] = error.frame_bytes
        self._write(figures, step)


def _writer(to: Any) -> Write:
    if hasattr(to, "add_scalar"):

        def write(figures: dict[str, float], step: int) -> None:
            for key, value in figures.items():
                to.add_scalar(f"gradwire/{key}", value, step)

        return write
    if not callable(to):
        raise GradwireError("log_to takes a TensorBoard SummaryWriter, or a function of (figures, step)")
    function: Write = to
    return function
