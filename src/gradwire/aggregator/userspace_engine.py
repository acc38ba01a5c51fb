"""The engine that runs on any Linux without privileges: a UDP socket, and native code that adds."""

from __future__ import annotations

from gradwire.aggregator.addresses import Address, in_text
from gradwire.aggregator.engine import Peer, Session
from gradwire.errors import GradwireError

try:
    from gradwire._native import Aggregator as _Aggregator
except ImportError:
    _Aggregator = None


class UserspaceEngine:
    """Serves packets of data by a UDP socket; `engine.Engine` has the contract.

    While `poll` waits or adds, native code runs without the interpreter's lock.
    """

    most_slots = 65536

    def __init__(self, bind: Address) -> None:
        if _Aggregator is None:
            raise GradwireError(
                "the aggregator needs gradwire's native module, on Linux: install gradwire from its source folder"
                " (pip install .) or a wheel"
            )
        try:
            self._native = _Aggregator(*bind)
        except (RuntimeError, ValueError) as error:
            raise GradwireError(f"cannot listen at {in_text(bind)}: {error}") from None
        self.address: Address = self._native.address()
        self.receive_buffer: int = self._native.receive_buffer()
        """Bytes of the socket's buffer; packets that find it full are lost, and sent again."""

    def open(self, session: Session) -> None:
        """Serve a session from now on, with empty slots. GradwireError if there is no memory for them."""
        try:
            self._native.open(session.number, session.key, [Peer(*peer) for peer in session.addresses], session.slots)
        except (MemoryError, ValueError) as error:
            raise GradwireError(
                f"cannot open a session of {session.slots} slots: {str(error) or 'no memory'}"
            ) from None

    def close(self, number: int) -> None:
        """Forget a session, and give back the memory of its slots."""
        self._native.close(number)

    def poll(self, seconds: float) -> list[tuple[bytes, Peer]]:
        """Serve data for at most this long, and return the packets that the control plane has to answer."""
        return [(datagram, Peer(*peer)) for datagram, peer in self._native.poll(seconds)]

    def send(self, datagram: bytes, to: Peer) -> None:
        """Send a packet of the control plane."""
        self._native.send(datagram, to)

    def counters(self) -> dict[str, int]:
        """Return what was counted since the start."""
        counters: dict[str, int] = self._native.counters()
        return counters

    def silences(self, number: int) -> list[float]:
        """Return the seconds since each worker's last packet of data."""
        silences: list[float] = self._native.silences(number)
        return silences

    def shut(self) -> None:
        """Close the socket; nothing else may be called after this."""
        del self._native
