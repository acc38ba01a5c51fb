"""A thread that encodes, exchanges and decodes beside the backward pass, which goes on meanwhile.

A job is a generator: it starts a collective, and yields a `Pause` until that has come through. Jobs that are waiting
let others begin. But collectives must be started in the same order on every rank, whatever arrives first, so a job
that goes on to start another one (`ordered`) does so at a fixed place: one pause after each new job, newest first.
All others go on as soon as they can.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass

import torch

POLL = 0.002  # seconds between looks at collectives under way, while nothing else is to do


@dataclass
class Pause:
    """A job waits; `ready()` tells whether it could go on without waiting and without starting a collective."""

    ready: Callable[[], bool] | None  # None where it will start a collective

    @property
    def ordered(self) -> bool:
        return self.ready is None


Exchange = Generator[Pause, None, None]


class _Running:
    def __init__(self, job: Exchange):
        self.job = job
        self.pause: Pause | None = None
        self.advance()

    def advance(self) -> None:
        """To its next pause, or to its end (None)."""
        self.pause = next(self.job, None)

    @property
    def ordered(self) -> bool:
        return self.pause is not None and self.pause.ordered


class ExchangeThread:
    """The thread is started by the first job, and ended by `close`."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Callable[[], Exchange] | None, threading.Event | None]] = (
            queue.SimpleQueue()
        )
        self._running: deque[_Running] = deque()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        # A rank that computes with one thread has no core to spare: there the encoding would only be late, and the
        # link idle, while it shares the core with the backward pass.
        self.inline = torch.get_num_threads() == 1 and not torch.cuda.is_available()

    def submit(self, job: Callable[[], Exchange]) -> None:
        if self.inline:
            self._run(job)
            return
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._work, name="gradwire", daemon=True)
            self._thread.start()
        self._queue.put((job, None))

    def drain(self) -> None:
        """Wait until all jobs are done; raises what went wrong in one of them."""
        if self.inline:
            self._run(None)
        elif self._thread is not None:
            done = threading.Event()
            self._queue.put((None, done))
            done.wait()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        if self._thread is not None:
            self._queue.put((None, None))
            self._thread = None

    # ── in the thread ──

    @torch.no_grad()
    def _work(self) -> None:
        while True:
            job, done = self._next()
            if job is None and done is None:
                return
            self._run(job)
            if done is not None:
                done.set()

    @torch.no_grad()
    def _run(self, job: Callable[[], Exchange] | None) -> None:
        """Begin a job, or finish all of them."""
        try:
            if self._error is None:
                self._begin(job) if job is not None else self._finish_all()
        except BaseException as error:
            self._error = error
            self._running.clear()

    def _next(self) -> tuple[Callable[[], Exchange] | None, threading.Event | None]:
        while True:
            try:
                return self._queue.get(timeout=POLL) if self._running else self._queue.get()
            except queue.Empty:
                self._go_on()

    def _begin(self, job: Callable[[], Exchange]) -> None:
        begun = _Running(job())
        for other in reversed(self._running):
            if other.ordered:
                other.advance()
        self._running.append(begun)
        self._go_on()

    def _go_on(self) -> None:
        """Let the oldest jobs go on that can do so without waiting."""
        try:
            while self._running:
                first = self._running[0]
                if first.pause is not None:
                    if first.pause.ready is None or not first.pause.ready():
                        return
                    first.advance()
                if first.pause is None:
                    self._running.popleft()
        except BaseException as error:
            self._error = error
            self._running.clear()

    def _finish_all(self) -> None:
        while any(running.ordered for running in self._running):
            for running in reversed(self._running):
                if running.ordered:
                    running.advance()
        while self._running:
            running = self._running.popleft()
            while running.pause is not None:
                running.advance()
