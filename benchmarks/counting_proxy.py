"""A TCP proxy that counts the bytes of HTTP/1.1 connections, by the path of the request that they belong to."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import Counter
from dataclasses import dataclass, field

CHUNK = 1 << 16


@dataclass
class Connection:
    """On one connection, requests do not overlap: one begins where the other side has answered the last."""

    path: str = ""
    answered: bool = True


@dataclass
class CountingProxy:
    """Listens on a port of its own; counts from when it is made until it is closed."""

    target: tuple[str, int]
    requests: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)  # by those who connect, by path
    received: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:  # closed
                return
            try:
                far = socket.create_connection(self.target)
            except OSError:
                near.close()
                continue
            connection = Connection()
            threading.Thread(target=self._copy, args=(near, far, connection, True), daemon=True).start()
            threading.Thread(target=self._copy, args=(far, near, connection, False), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket, connection: Connection, outward: bool) -> None:
        try:
            while data := source.recv(CHUNK):
                self._count(data, connection, outward)
                sink.sendall(data)
        except OSError:
            pass
        finally:
            for each in (source, sink):
                with contextlib.suppress(OSError):  # where the other direction was first
                    each.shutdown(socket.SHUT_RDWR)
                each.close()

    def _count(self, data: bytes, connection: Connection, outward: bool) -> None:
        with self._lock:
            if outward and connection.answered:
                line = data.split(b"\r\n", 1)[0].split(b" ")
                if len(line) != 3 or not line[2].startswith(b"HTTP/1."):
                    raise ValueError(f"not the first line of an HTTP request: {data[:80]!r}")
                connection.path, connection.answered = line[1].decode(), False
                self.requests[connection.path] += 1
            if outward:
                self.sent[connection.path] += len(data)
            else:
                connection.answered = True
                self.received[connection.path] += len(data)
