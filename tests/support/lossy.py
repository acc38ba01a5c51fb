"""A UDP proxy that loses, repeats and swaps packets in both directions, from a seed."""

from __future__ import annotations

import heapq
import random
import select
import socket
import threading
import time
from dataclasses import dataclass

HELD_BACK = 0.002  # seconds: long enough for many packets to overtake


@dataclass(frozen=True)
class Faults:
    loss: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0

    @property
    def any(self) -> bool:
        return bool(self.loss or self.duplicate or self.reorder)


class LossyProxy:
    """Listens on loopback; every client gets a socket of its own towards the server, as behind a NAT."""

    def __init__(self, server: tuple[str, int], faults: Faults, seed: int) -> None:
        self.server, self.faults, self.random = server, faults, random.Random(seed)
        self.lost = self.repeated = self.held = self.passed = 0
        self.recorded: list[bytes] | None = None
        """Set to a list to keep all packets of clients."""
        self._front = _socket()
        self._front.bind(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._front.getsockname()[1]}"
        self._backs: dict[tuple[str, int], socket.socket] = {}
        self._clients: dict[socket.socket, tuple[str, int]] = {}
        self._later: list[tuple[float, int, socket.socket, tuple[str, int] | None, bytes]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __enter__(self) -> LossyProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        for sock in (self._front, *self._backs.values()):
            sock.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            wait = max(0.0, self._later[0][0] - time.monotonic()) if self._later else 0.05
            ready, _, _ = select.select([self._front, *self._clients], [], [], wait)
            for sock in ready:
                self._forward(sock)
            while self._later and self._later[0][0] <= time.monotonic():
                self._send(*heapq.heappop(self._later)[2:])

    def _forward(self, sock: socket.socket) -> None:
        for _ in range(64):
            try:
                datagram, sender = sock.recvfrom(65536)
            except (BlockingIOError, ConnectionError):
                return
            if sock is self._front:
                if self.recorded is not None:
                    self.recorded.append(datagram)
                self._fate(self._back(sender), None, datagram)
            else:
                self._fate(self._front, self._clients[sock], datagram)

    def _back(self, client: tuple[str, int]) -> socket.socket:
        if client not in self._backs:
            sock = _socket()
            sock.connect(self.server)
            self._backs[client] = sock
            self._clients[sock] = client
        return self._backs[client]

    def _fate(self, sock: socket.socket, to: tuple[str, int] | None, datagram: bytes) -> None:
        if self.random.random() < self.faults.loss:
            self.lost += 1
            return
        copies = 1
        if self.random.random() < self.faults.duplicate:
            self.repeated += 1
            copies = 2
        for _ in range(copies):
            if self.random.random() < self.faults.reorder:
                self.held += 1
                due = time.monotonic() + HELD_BACK * self.random.random()
                heapq.heappush(self._later, (due, self.held, sock, to, datagram))
            else:
                self._send(sock, to, datagram)

    def _send(self, sock: socket.socket, to: tuple[str, int] | None, datagram: bytes) -> None:
        try:
            if to is None:
                sock.send(datagram)
            else:
                sock.sendto(datagram, to)
            self.passed += 1
        except OSError:  # a full buffer, or the server is away: one more loss
            self.lost += 1


def _socket() -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
    sock.setblocking(False)
    return sock
