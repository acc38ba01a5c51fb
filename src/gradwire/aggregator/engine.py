"""What the control plane asks of an engine, the part of an aggregator that serves packets of data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from gradwire.aggregator.addresses import Address


class Peer(NamedTuple):
    """Where packets come from, and where answers go."""

    ip: str
    """The IPv4 or IPv6 address as text."""
    port: int
    local: str = ""
    """The address of this host that the packets came to, and that answers leave from: a worker takes no others. Empty
    where the engine listens at one address only."""


@dataclass(frozen=True)
class Session:
    """One job's workers, from the time all have joined until one of them leaves or joins again."""

    number: int
    key: bytes
    """16 bytes; the codes of DATA and RESULT are made with it."""
    addresses: tuple[Peer, ...]
    """Where worker i's results are sent."""
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
    """Where it listens: an IP address and a port."""
    most_slots: int
    """Slots that one session may have now."""

    def open(self, session: Session) -> None:
        """Serve a session from now on, with empty slots.

        GradwireError, and no other error, if it cannot be served; the engine then goes on as before.
        """

    def close(self, number: int) -> None:
        """Forget a session; its number is not used again."""

    def poll(self, seconds: float) -> list[tuple[bytes, Peer]]:
        """Serve data for at most this long, and return the packets that are not DATA of an open session.

        They are packets of the control plane, and a few of the DATA packets whose session is unknown. It returns early
        when there is one.
        """
        ...

    def send(self, datagram: bytes, to: Peer) -> None:
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
