"""The aggregator's main loop: an engine that serves data, a registry for everything else."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from gradwire.aggregator.engine import Engine
from gradwire.aggregator.jobs import Limits
from gradwire.aggregator.registry import Registry

POLL = 0.05  # seconds
TICK = 1.0  # seconds between looks for jobs to forget


@dataclass(frozen=True)
class JobReport:
    """What is shown of a job."""

    name: str
    """The first eight hexadecimal digits of its name."""
    world: int
    joined: int
    slots: int
    """0 if the job has no session now."""
    silences: list[float]
    """Seconds since each worker's last packet of data; empty if the job has no session now."""


class Server:
    """An aggregator: it lends an engine its thread, and answers the packets that the engine hands on.

    It promises to serve as long as `serve` or `serve_once` is being called, and nothing in between: there is no thread
    of its own. All methods are called from the same thread. It never trusts a packet; what counts as proof is decided
    by the engine for data and by the registry for everything else.
    """

    def __init__(self, engine: Engine, key: bytes, limits: Limits | None = None) -> None:
        self.engine = engine
        self.registry = Registry(key, engine, limits)
        self.started = self._ticked = time.monotonic()

    def serve(self, go_on: Callable[[], bool]) -> None:
        """Serve until `go_on` returns False; it is asked some twenty times a second."""
        while go_on():
            self.serve_once(POLL)

    def serve_once(self, seconds: float) -> None:
        """Serve for at most this long, or until the engine hands on packets, which are answered."""
        for datagram, address in self.engine.poll(seconds):
            for reply, to in self.registry.handle(datagram, address):
                self.engine.send(reply, to)
        now = time.monotonic()
        if now - self._ticked > TICK:
            self._ticked = now
            self.registry.forget_silent_jobs()

    def jobs(self) -> list[JobReport]:
        """Return a report of every job."""
        return [
            JobReport(
                name.hex()[:8],
                job.world,
                job.world if job.session else len(job.waiting()),
                job.session.slots if job.session else 0,
                self.engine.silences(job.session.number) if job.session else [],
            )
            for name, job in self.registry.jobs.items()
        ]

    def counters(self) -> dict[str, int]:
        """Return the engine's counters, with what the control plane has found forged, and refused."""
        counters = self.engine.counters()
        forged = counters.get("forged", 0) + self.registry.forged
        return {**counters, "forged": forged, "refused": self.registry.refused}

    def shut(self) -> None:
        """Give back the engine's sockets and memory; nothing else may be called after this."""
        self.engine.shut()
