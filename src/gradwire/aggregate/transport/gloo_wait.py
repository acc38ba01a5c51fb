"""Waiting for Gloo's sends and receives: one that runs out of time closes the connections, so it must not be cut short.

Those of collectives can. So here a thread waits, as long as it takes, and we wait for the thread.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist


class ThreadedWait:
    """Several works as one."""

    def __init__(self, works: Sequence[dist.Work]):
        self._done = threading.Event()
        self._error: RuntimeError | None = None
        self._thread: threading.Thread | None = None
        if works:
            self._thread = threading.Thread(target=self._wait, args=(works,), name="gradwire-rests", daemon=True)
            self._thread.start()
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
        return self._done.is_set()

    def wait(self, timeout: timedelta | None = None) -> None:
        """RuntimeError if it has failed, or is not done by then."""
        if not self._done.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError("not done yet")
        if self._thread is not None:
            self._thread.join()  # it lets go of the works, which must not happen while the interpreter ends
        if self._error is not None:
            raise self._error
