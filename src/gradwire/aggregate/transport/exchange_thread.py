"""A thread that encodes, exchanges and decodes beside the backward pass, which goes on meanwhile.

An exchange is a generator: it starts a collective, and yields a `Pause` until that has come through. Exchanges that are
waiting let others begin. But collectives must be started in the same order on every rank, whatever arrives first. So an
exchange that will start another collective (its pause is `ordered`) goes on at a fixed place: each time a new exchange
has begun, all ordered ones go on by one pause, newest first. All others go on as soon as they can, also while an
ordered one would have to wait.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass

import torch

from gradwire.aggregate.peers import interpreter_exit

POLL = 0.002  # seconds between looks at collectives under way, while nothing else is to do


@dataclass
class Pause:
    """An exchange waits for a collective."""

    ready: Callable[[], bool] | None
    """Tells whether the exchange could go on without waiting; None if it will start another collective."""

    arrived: Callable[[], bool] | None = None
    """Tells of an ordered exchange whether it could go on without waiting; None if that cannot be told."""

    @property
    def ordered(self) -> bool:
        """Whether the exchange has to go on at the same place in the order on all ranks."""
        return self.ready is None


Exchange = Generator[Pause, None, None]


class _RunningExchange:
    def __init__(self, exchange: Exchange):
        self.exchange = exchange
        self.pause: Pause | None = None
        self.advance()

    def advance(self) -> None:
        """Run to the next pause, or to the end (None)."""
        self.pause = next(self.exchange, None)

    @property
    def ordered(self) -> bool:
        return self.pause is not None and self.pause.ordered

    @property
    def would_wait(self) -> bool:
        """Whether an ordered exchange is known to wait if it goes on now."""
        return self.pause is not None and self.pause.arrived is not None and not self.pause.arrived()


class ExchangeThread:
    """Runs exchanges one after the other in a thread of its own, and several at a time while they wait.

    It promises that exchanges begin in the order of `submit`, and that their collectives are started in an order that
    depends on that alone, so that it is the same on all ranks. After an error nothing else is begun; `drain` raises it.

    `submit`, `drain`, `close` and `end` are called by the training's thread. Exchanges run in the other thread, without
    gradients; the thread is started by the first one and ended by `close`, or
    before the interpreter ends, in the middle of an exchange if need be. Where torch computes with one thread and
    without a GPU, there is no other thread, and exchanges run inside `submit` and `drain`. It never runs an exchange
    from two threads at once, and never knows what an exchange carries.
    """

    def __init__(self) -> None:
        # A new exchange; or None, and what to set when all are done; or None twice, to end the thread.
        self._queue: queue.SimpleQueue[tuple[Callable[[], Exchange] | None, threading.Event | None]] = (
            queue.SimpleQueue()
        )
        self._running: deque[_RunningExchange] = deque()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        # A rank that computes with one thread has no core to spare: there the encoding would only be late, and the
        # link idle, while it shares the core with the backward pass.
        self.inline = torch.get_num_threads() == 1 and not torch.cuda.is_available()

    def submit(self, exchange: Callable[[], Exchange]) -> None:
        """Queue an exchange, as the function that makes its generator; returns at once unless exchanges run inline."""
        if self.inline:
            self._run(exchange)
            return
        if self._thread is None or not self._thread.is_alive():
            # A thread begins on the first GPU and its default stream, whatever the training uses.
            device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
            self._thread = interpreter_exit.start_thread(
                self._work, device, name="gradwire", stop=functools.partial(self._queue.put, (None, None))
            )
        self._queue.put((exchange, None))

    def drain(self) -> None:
        """Wait until all exchanges are done; raise what went wrong in one of them."""
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
        """End the thread when it has begun what was submitted; nothing is waited for."""
        if self._thread is not None:
            self._queue.put((None, None))
            self._thread = None

    def end(self, seconds: float) -> bool:
        """End the thread, and tell whether it has ended within so many seconds: nothing runs in it then."""
        thread = self._thread
        self.close()
        if thread is not None:
            thread.join(seconds)
        return thread is None or not thread.is_alive()

    # ── in the thread ──

    def _work(self, device: int | None) -> None:
        """Work on a stream beside the training's, before whatever the training has queued on the GPU."""
        if device is None:
            self._work_on_current_stream()
        else:
            torch.cuda.set_device(device)
            with torch.cuda.stream(torch.cuda.Stream(priority=-1)):
                self._work_on_current_stream()

    @torch.no_grad()
    def _work_on_current_stream(self) -> None:
        while True:
            exchange, done = self._next()
            if (exchange is None and done is None) or interpreter_exit.has_begun():
                return
            self._run(exchange)
            if done is not None:
                done.set()

    @torch.no_grad()
    def _run(self, exchange: Callable[[], Exchange] | None) -> None:
        """Begin an exchange, or finish all of them."""
        try:
            if self._error is None:
                self._begin(exchange) if exchange is not None else self._finish_all()
        except BaseException as error:
            self._error = error
            self._running.clear()

    def _next(self) -> tuple[Callable[[], Exchange] | None, threading.Event | None]:
        while True:
            try:
                return self._queue.get(timeout=POLL) if self._running else self._queue.get()
            except queue.Empty:
                self._advance_ready()

    def _begin(self, exchange: Callable[[], Exchange]) -> None:
        begun = _RunningExchange(exchange())
        self._advance_ordered()
        self._running.append(begun)
        self._advance_ready()

    def _advance_ordered(self) -> None:
        """Let all ordered exchanges go on by one pause, newest first; before one would wait, others go on that can."""
        for running in list(reversed(self._running)):
            if running.ordered:
                while running.would_wait and self._advance_oldest():
                    pass
                running.advance()

    def _advance_ready(self) -> None:
        """Let the oldest exchanges go on, as far as they can without waiting."""
        try:
            while self._advance_oldest():
                pass
        except BaseException as error:
            self._error = error
            self._running.clear()

    def _advance_oldest(self) -> bool:
        """Let the oldest exchange go on if it can without waiting; tell whether it has."""
        if not self._running:
            return False
        oldest = self._running[0]
        if oldest.pause is not None:
            if oldest.pause.ready is None or not oldest.pause.ready():
                return False
            oldest.advance()
        if oldest.pause is None:
            self._running.popleft()
        return True

    def _finish_all(self) -> None:
        while any(running.ordered for running in self._running):
            self._advance_ordered()
        while self._running:
            running = self._running.popleft()
            while running.pause is not None:
                running.advance()
