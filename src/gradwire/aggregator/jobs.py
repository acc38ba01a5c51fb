"""What the aggregator remembers of a job."""

from __future__ import annotations

from dataclasses import dataclass, field

from gradwire.aggregator.engine import Address, Session
from gradwire.aggregator.packet.packet_format import Join


@dataclass(frozen=True)
class Limits:
    jobs: int = 64
    slots: int = 4096
    """Of one job."""
    memory: int = 1 << 30
    """Of all slots, in bytes."""
    idle: float = 300.0
    """Seconds until a job that nobody is heard of is forgotten."""
    joining: float = 30.0
    """… one whose workers have not all come, and of which nobody is heard any more."""


@dataclass
class Member:
    """The last JOIN of a worker."""

    join: Join
    address: Address
    answer: bytes | None = None
    """None: it waits for the others."""
    left: bool = False


@dataclass
class Job:
    world: int
    members: dict[int, Member] = field(default_factory=dict)
    session: Session | None = None
    last_heard: float = 0.0
    """Of anything but DATA."""

    def waiting(self) -> list[int]:
        return [worker for worker, member in self.members.items() if member.answer is None]


def distance(members: list[Member]) -> str | None:
    """Why workers cannot go on together: they were at most one operation apart when the session ended."""
    done = [member.join.operations for member in members]
    low, high = min(done), max(done)
    if high - low <= 1:
        return None
    return f"worker {done.index(low)} has done {low}, worker {done.index(high)} {high}"
