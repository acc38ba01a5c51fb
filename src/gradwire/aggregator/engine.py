"""What the control plane asks of an engine, the part of an aggregator that serves packets of data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

Address = tuple[str, int]
"""An IPv4 address as text, and a port."""


@dataclass(frozen=True)
class Session:
    """One job's workers, from the time all have joined until one of them leaves or joins again."""

    number: int
    key: bytes
    """16 bytes; the codes of DATA and RESULT are made with it."""
    addresses: tuple[Address, ...]
    """The address that worker i's results are sent to."""
    slots: int
    """Packets that a worker may have under way."""


class Engine(Protocol):
    """Adds and ORs the packets of open sessions, and hands all others to its caller.

    An engine promises that nothing of a packet counts before its code was found right, that a worker's words enter a
    sum once however often they arrive, and that every worker of a session gets the same sum. It never opens or closes a
    session by itself, and it may lose packets, as a network does: workers send them again.

    One thread, the one that calls `Server.serve`, calls all of its methods.
    """

    address: Address
    """Where it listens."""
    most_slots: int
    """Slots that one session may have now."""

    def open(self, session: Session) -> None:
        """Serve a session from now on, with empty slots. GradwireError if it cannot be served."""

    def close(self, number: int) -> None:
        """Forget a session; its number is not used again."""

    def poll(self, seconds: float) -> list[tuple[bytes, Address]]:
        """Serve data for at most this long, and return the packets that are not DATA of an open session.

        They are packets of the control plane, and a few of the DATA packets whose session is unknown. It returns early
        when there is one.
        """
        ...

    def send(self, datagram: bytes, to: Address) -> None:
        """Send a packet of the control plane."""

    def counters(self) -> dict[str, int]:
        """Return what was counted since the start.

        The names are packets, results, resent, duplicates, old, forged, malformed, unknown, control, bytes_in and
        bytes_out; an engine may have more.
        """
        ...

    def silences(self, number: int) -> list[float]:
        """Return the seconds since each worker's last packet of data, or since `open` if there was none."""
        ...

    def shut(self) -> None:
        """Give back sockets and memory; nothing else may be called after this."""
