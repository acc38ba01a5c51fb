"""What a rank says about itself when it is asked (`roll_call.py`): the board it stands on, and the thread that answers.

A message, question and answer alike, is the token, a length (4 bytes) and a report as JSON (docs/wire-format.md).
"""

from __future__ import annotations

import hmac
import json
import os
import socket
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass, field

from gradwire.aggregate.peers.addresses import own_address

TOKEN = 16  # bytes
LONGEST = 1 << 16  # of a message

_listeners: weakref.WeakSet[socket.socket] = weakref.WeakSet()


@dataclass
class Report:
    """What a rank says about itself."""

    rank: int
    step: int = 0
    doing: str = "has just attached"
    seconds: float = 0.0  # for how long
    failed: bool = False
    cause: str = ""  # why, once it is known


@dataclass
class Board:
    """What the answering thread shares with its rank; it must not keep the rest of it alive."""

    token: bytes
    own: Report
    since: float = field(default_factory=time.monotonic)
    others: dict[int, Report] = field(default_factory=dict)  # the last that was heard of them
    news: threading.Condition = field(default_factory=threading.Condition)

    def report(self) -> bytes:
        with self.news:
            own = {**vars(self.own), "seconds": time.monotonic() - self.since}
        text = json.dumps(own).encode()
        return self.token + len(text).to_bytes(4, "little") + text

    def hear(self, report: Report) -> None:
        with self.news:
            before = self.others.get(report.rank)
            if before is None or not before.cause:  # the first cause is the true one; later ones follow from it
                self.others[report.rank] = report
            self.news.notify_all()


def listen() -> socket.socket | None:
    """None where there is no address to listen at: then nobody can be named, but all else works."""
    try:
        address = own_address()
        listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        listener.bind((address, 0))
        listener.listen(1024)
        _listeners.add(listener)
        return listener
    except OSError:
        return None


def close(listener: socket.socket) -> None:
    with suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
    listener.close()


def _close_in_child() -> None:
    # A forked worker of a data loader would hold the socket of a killed rank open.
    for listener in list(_listeners):
        listener.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


def answer(listener: socket.socket, board: Board) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return  # closed
        with connection, suppress(OSError, ValueError):
            # Questions are short and sent at once: a peer that hesitates must not keep the others waiting.
            board.hear(receive(connection, board.token, time.monotonic() + 0.5))
            connection.sendall(board.report())


def receive(connection: socket.socket, token: bytes, deadline: float) -> Report:
    head = _exactly(connection, TOKEN + 4, deadline)
    length = int.from_bytes(head[TOKEN:], "little")
    if not hmac.compare_digest(head[:TOKEN], token) or length > LONGEST:
        raise ValueError("not one of us")
    values = json.loads(_exactly(connection, length, deadline))
    report = Report(**{name: values[name] for name in Report.__dataclass_fields__})
    if not isinstance(report.rank, int):
        raise ValueError("no rank")
    return report


def _exactly(connection: socket.socket, length: int, deadline: float) -> bytes:
    data = b""
    while len(data) < length:
        connection.settimeout(left(deadline))
        part = connection.recv(length - len(data))
        if not part:
            raise ConnectionResetError("closed")
        data += part
    return data


def left(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())
