"""Waiting for Gloo's sends and receives, which must not be cut short.

A wait for a send or a receive that runs out of time closes the connection, unlike that for a collective. So a thread
waits here as long as it takes, and others wait for the thread, in slices. When the interpreter ends, closing the
connection is just what is wanted: it wakes the thread.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from gradwire.aggregate.peers import interpreter_exit


class ThreadedWait:
    """Several sends and receives as one work, waited for in a thread of its own."""

    def __init__(self, works: Sequence[dist.Work]):
        self._done = threading.Event()
        self._error: RuntimeError | None = None
        self._thread: threading.Thread | None = None
        if works:
            self._thread = interpreter_exit.start_thread(
                self._wait, works, name="gradwire-rests", stop=functools.partial(_cut_short, works)
            )
        else:
            self._done.set()

    def _wait(self, works: Sequence[dist.Work]) -> None:
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            self._error = error
        finally:
            self._done.set()

    def is_completed(self) -> bool:
        """Tell whether all of them have ended, well or not."""
        return self._done.is_set()

    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait until all are done; RuntimeError if one has failed, or if they are not done within the timeout."""
        if not self._done.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError("not done yet")
        if self._thread is not None:
            self._thread.join()  # it lets go of the works, which must not happen while the interpreter ends
        if self._error is not None:
            raise self._error


def _cut_short(works: Sequence[dist.Work]) -> None:
    """Let whoever waits for these sends and receives wait no longer: their connections are closed."""
    for work in works:
        with suppress(RuntimeError):
            work.wait(timedelta(milliseconds=1))
