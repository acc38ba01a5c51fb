"""What the control plane asks of an engine, the part of an aggregator that serves packets of data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

Address = tuple[str, int]
"""IPv4 address as text, and port."""


@dataclass(frozen=True)
class Session:
    """One job's workers, from the time all have joined until one of them is lost."""

    number: int
    key: bytes
    """16 bytes; DATA and RESULT are coded with it."""
    addresses: tuple[Address, ...]
    """Where worker i is sent its results."""
    slots: int


class Engine(Protocol):
    """Adds and ORs packets of open sessions, and hands on all others."""

    address: Address
    """Where it listens."""
    most_slots: int
    """What one session may have."""

    def open(self, session: Session) -> None:
        """Serve a session, with empty slots."""

    def close(self, number: int) -> None:
        """Forget a session; its number is not used again."""

    def poll(self, seconds: float) -> list[tuple[bytes, Address]]:
        """Serve data for at most so long; return what is not DATA of an open session: control, and a few of the
        packets of unknown sessions."""
        ...

    def send(self, datagram: bytes, to: Address) -> None:
        """Send a packet of the control plane."""

    def counters(self) -> dict[str, int]:
        """Since the start: packets, results, resent, duplicates, old, forged, malformed, unknown, bytes_in,
        bytes_out."""
        ...

    def heard(self, number: int) -> list[float]:
        """Seconds since each worker's last packet (since `open` if there was none)."""
        ...

    def shut(self) -> None:
        """Give back sockets and memory."""
