"""What the aggregator remembers of a job: its workers, and the session that serves them."""

from __future__ import annotations

from dataclasses import dataclass, field

from gradwire.aggregator.engine import Peer, Session
from gradwire.aggregator.packet.packet_format import Join


@dataclass(frozen=True)
class Limits:
    """What one aggregator takes upon itself."""

    jobs: int = 64
    """Jobs at a time."""
    slots: int = 4096
    """Slots of one job."""
    memory: int = 1 << 30
    """Bytes of all slots together."""
    idle: float = 300.0
    """Seconds without any packet until a job is forgotten."""
    joining: float = 30.0
    """The same for a job whose workers have not all joined."""


@dataclass
class Member:
    """One worker of a job, by its last JOIN."""

    join: Join
    address: Peer
    answer: bytes | None = None
    """The ACCEPT or REFUSE that it was sent; None while it waits for the others."""
    left: bool = False
    """Whether it has sent LEAVE since."""

    def set_answer(self, answer: bytes) -> None:
        """Note the ACCEPT or REFUSE that this worker is sent."""
        self.answer = answer

    def move(self, address: Peer) -> None:
        """Note that the worker's packets come from another address now."""
        self.address = address

    def leave(self) -> None:
        """Note that the worker has sent LEAVE."""
        self.left = True


@dataclass
class Job:
    """The workers that sum words together. The registry calls its methods, in the server's thread."""

    world: int
    members: dict[int, Member] = field(default_factory=dict)
    session: Session | None = None
    last_control: float = 0.0
    """When its last packet of the control plane came, by the registry's clock."""

    def waiting(self) -> list[int]:
        """Return the workers that have joined and wait for the others."""
        return [worker for worker, member in self.members.items() if member.answer is None]

    def note_control(self, now: float) -> None:
        """Note that a packet of the control plane has come."""
        self.last_control = now

    def add(self, worker: int, member: Member) -> None:
        """Let a worker join, in place of an earlier process with its number."""
        self.members[worker] = member

    def begin(self, session: Session) -> None:
        """Note that the engine serves this session for the job."""
        self.session = session

    def end(self) -> Session | None:
        """Return the session, if there is one, and forget it."""
        session, self.session = self.session, None
        return session


def why_too_far_apart(members: list[Member]) -> str | None:
    """Return why these workers cannot go on together, or None if they can.

    When a session ends, some workers may have done one operation more than others. A larger distance means that they
    do not belong to the same run.
    """
    done = [member.join.operations for member in members]
    low, high = min(done), max(done)
    if high - low <= 1:
        return None
    return f"worker {done.index(low)} has done {low}, worker {done.index(high)} {high}"
