"""The engine that runs anywhere: a UDP socket, and native code that adds."""

from __future__ import annotations

from gradwire.aggregator.engine import Address, Session
from gradwire.errors import GradwireError

try:
    from gradwire._native import Aggregator as _Aggregator
except ImportError:
    _Aggregator = None


class UserspaceEngine:
    """See `engine.Engine`."""

    most_slots = 65536

    def __init__(self, bind: Address) -> None:
        if _Aggregator is None:
            raise GradwireError(
                "the aggregator needs gradwire's native module, on Linux: install gradwire from its source folder"
                " (pip install .) or a wheel"
            )
        ip, port = bind
        try:
            self._native = _Aggregator(ip, port)
        except (RuntimeError, ValueError) as error:
            raise GradwireError(f"cannot listen at {ip}:{port}: {error}") from None
        self.address: Address = self._native.address()
        self.receive_buffer: int = self._native.receive_buffer()
        """Bytes; packets that find it full are lost, and sent again."""

    def open(self, session: Session) -> None:
        self._native.open(session.number, session.key, list(session.addresses), session.slots)

    def close(self, number: int) -> None:
        self._native.close(number)

    def poll(self, seconds: float) -> list[tuple[bytes, Address]]:
        return self._native.poll(seconds)

    def send(self, datagram: bytes, to: Address) -> None:
        self._native.send(datagram, to)

    def counters(self) -> dict[str, int]:
        return self._native.counters()

    def heard(self, number: int) -> list[float]:
        return self._native.heard(number)

    def shut(self) -> None:
        """The socket is closed; nothing else may be called after this."""
        del self._native
