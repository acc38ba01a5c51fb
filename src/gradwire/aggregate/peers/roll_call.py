"""Who is still there: asked of every rank, over sockets of our own, when a collective has failed.

Gloo and NCCL say that a connection was closed or that time is up; not who is to blame. And the group that has failed
cannot be used to find out. So every rank has a listening socket and a thread that answers on it:

1. A rank whose collective has failed connects to all others. From one that was killed the connection is refused; one
   that is stopped accepts it, since its kernel does, and is silent; all others answer what they are doing.
2. Having asked is also an announcement: who was asked knows that the other has failed by itself. If that process has
   ended a moment later, it is not taken for the lost one.
3. When it has made up its mind (`diagnosis.py`), it tells the others why, before it raises.

All of that takes PATIENCE seconds at most, and nothing at all while training goes well. Addresses and the token that
a question must bear come with the handshake. A peer that could not be reached then (a firewall) is never named.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from gradwire.aggregate.peers.addresses import pack_address, unpack_address
from gradwire.aggregate.peers.status_server import LONGEST, TOKEN, Board, Report, answer, close, left, listen, receive

PATIENCE = 3.0  # seconds for all answers

ALIVE, GONE, SILENT, UNREACHABLE = "alive", "gone", "silent", "unreachable"


class RollCall:
    """`ranks` are the numbers that the user knows the ranks of the group by."""

    def __init__(self, rank: int, ranks: Sequence[int]):
        self.rank, self.ranks = rank, list(ranks)
        self.board = Board(os.urandom(TOKEN), Report(rank))
        self._listener = listen()
        self._addresses: list[tuple[str, int] | None] = []
        self._reached: set[int] = set()
        self._probed = threading.Event()
        if self._listener is not None:
            weakref.finalize(self, close, self._listener)

    @property
    def address(self) -> bytes:
        """Where this rank answers: 18 bytes, zeros if nowhere."""
        return pack_address(self._listener)

    def meet(self, addresses: list[bytes], token: bytes) -> None:
        """From now on, answer the others; and see whether they can be reached, without waiting for it."""
        if self._addresses:
            return  # they have met before
        self._addresses = [unpack_address(a) for a in addresses]
        self.board.token = token
        if self._listener is not None:
            threading.Thread(target=answer, args=(self._listener, self.board), daemon=True).start()
        threading.Thread(target=_probe, args=(weakref.proxy(self),), daemon=True).start()

    def at(self, doing: str, step: int | None = None) -> None:
        """What this rank says if it is asked."""
        self.board.own.doing, self.board.since = doing, time.monotonic()
        if step is not None:
            self.board.own.step = step

    def ask(self, seconds: float = PATIENCE) -> dict[int, str]:
        """For every other rank that could ever be reached, whether it is there. What they say is on the board."""
        self._probed.wait(seconds if self._addresses else 0)
        return self._speak(sorted(self._reached), seconds)

    def tell(self, cause: str, peers: Iterable[int] | None = None) -> None:
        """This rank has failed, and why. Nobody's answer is waited for: who is stopped now may read it later."""
        with self.board.news:
            self.board.own.failed, self.board.own.cause = True, cause[: LONGEST // 16]
            self.board.news.notify_all()
        self._speak(self._reached if peers is None else peers, PATIENCE / 3, answer=False)

    @property
    def reaches_all(self) -> bool:
        return len(self._reached) == len(self.ranks) - 1

    def somebody_failed(self) -> bool:
        """Whether another rank has said so: then there is nothing to wait for."""
        return any(report.failed for report in list(self.board.others.values()))

    def _probe(self) -> None:
        peers = [r for r, address in enumerate(self._addresses) if r != self.rank and address is not None]
        found = self._speak(peers, PATIENCE)
        self._reached = {rank for rank, state in found.items() if state == ALIVE}
        self._probed.set()

    def _speak(self, peers: Iterable[int], seconds: float, answer: bool = True) -> dict[int, str]:
        peers, deadline = list(peers), time.monotonic() + seconds
        if not peers:
            return {}
        try:
            with ThreadPoolExecutor(min(len(peers), 64), "gradwire-roll-call") as pool:
                return dict(zip(peers, pool.map(lambda r: self._speak_to(r, deadline, answer), peers), strict=True))
        except RuntimeError:  # the interpreter is shutting down and starts no threads
            return {}

    def _speak_to(self, rank: int, deadline: float, answer: bool) -> str:
        """Say what this rank does, and hear what that one does."""
        address = self._addresses[rank]
        assert address is not None
        state = UNREACHABLE
        try:
            with socket.create_connection(address, timeout=left(deadline)) as connection:
                state = SILENT
                connection.sendall(self.board.report())
                if not answer:
                    return state
                report = receive(connection, self.board.token, deadline)
        except ConnectionError:  # refused, reset, or closed before it had answered
            return GONE
        except (OSError, ValueError):
            return state
        self.board.hear(report)
        return ALIVE if report.rank == rank else GONE  # another process may have got its port


def _probe(roll_call: RollCall) -> None:
    with suppress(ReferenceError):
        roll_call._probe()
