"""The aggregator's main loop: an engine that serves data, a registry for everything else."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from gradwire.aggregator.engine import Engine
from gradwire.aggregator.jobs import Limits
from gradwire.aggregator.registry import Registry

POLL = 0.05


@dataclass(frozen=True)
class JobReport:
    name: str
    world: int
    joined: int
    slots: int
    """0: the job has no session now."""
    heard: list[float]
    """Seconds since each worker's last packet."""


class Server:
    def __init__(self, engine: Engine, key: bytes, limits: Limits | None = None) -> None:
        self.engine = engine
        self.registry = Registry(key, engine, limits)
        self.started = self._ticked = time.monotonic()

    def serve(self, go_on: Callable[[], bool]) -> None:
        """Until `go_on` says no; it is asked some twenty times a second."""
        while go_on():
            self.serve_once(POLL)

    def serve_once(self, seconds: float) -> None:
        for datagram, address in self.engine.poll(seconds):
            for reply, to in self.registry.handle(datagram, address):
                self.engine.send(reply, to)
        now = time.monotonic()
        if now - self._ticked > 1:
            self._ticked = now
            self.registry.tick()

    def jobs(self) -> list[JobReport]:
        return [
            JobReport(
                name.hex()[:8],
                job.world,
                job.world if job.session else len(job.waiting()),
                job.session.slots if job.session else 0,
                self.engine.heard(job.session.number) if job.session else [],
            )
            for name, job in self.registry.jobs.items()
        ]

    def counters(self) -> dict[str, int]:
        """The engine's, with what the control plane has found forged, and refused."""
        counters = self.engine.counters()
        forged = counters.get("forged", 0) + self.registry.forged
        return {**counters, "forged": forged, "refused": self.registry.refused}

    def shut(self) -> None:
        self.engine.shut()
