"""The ledger of a rank's exchanges: how many steps, how many bytes, how many seconds, and whether all was finite."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class StepLedger:
    """Counts what the exchanges of this rank took, and knows whether the step under way is finite on all ranks.

    It is written by whoever encodes and decodes: the exchange thread during a step, the training's thread at its end.
    The training's thread reads it between steps. It never looks at a tensor.
    """

    def __init__(self) -> None:
        self.steps = 0  # exchanges that are over, those of a loaded checkpoint among them
        self.frame_bytes = 0
        self.encode_s = self.decode_s = 0.0
        self.wait_s = 0.0  # how long the training stood still for exchanges
        self.finite = True  # whether all that any rank has sent in this step is finite, as far as is known

    @contextmanager
    def encoding(self) -> Iterator[None]:
        """Count the seconds of this block as encoding."""
        start = time.perf_counter()
        yield
        self.encode_s += time.perf_counter() - start

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """Count the seconds of this block as decoding."""
        start = time.perf_counter()
        yield
        self.decode_s += time.perf_counter() - start

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the seconds of this block as time in which the training stands still."""
        start = time.perf_counter()
        yield
        self.wait_s += time.perf_counter() - start

    def count_frame_bytes(self, count: int) -> None:
        """Count bytes of frames, or of what is sent in place of frames."""
        self.frame_bytes += count

    def note_finite(self, finite: bool) -> None:
        """Take note of whether something that was sent is finite; one NaN or infinity spoils the whole step."""
        self.finite &= finite

    def count_step(self) -> None:
        """Count a step that is over; whether it was finite may be learnt later."""
        self.steps += 1

    def begin_step(self) -> None:
        """Begin the next step, when everything about the last one is known."""
        self.finite = True

    def end_step(self) -> None:
        """Count a step of which everything is known, and begin the next one."""
        self.count_step()
        self.begin_step()

    def abandon_step(self) -> None:
        """Forget what is known of a step that failed; it does not count."""
        self.finite = True

    def resume_at(self, steps: int) -> None:
        """Go on from the step of a checkpoint."""
        self.steps = steps

    def stats(self) -> dict[str, float]:
        """Return the totals."""
        return {
            "frame_bytes": self.frame_bytes,
            "encode_s": self.encode_s,
            "decode_s": self.decode_s,
            "wait_s": self.wait_s,
        }
