"""What a rank says about itself when another one asks (`roll_call.py`), and the thread that answers.

A message, question and answer alike, is the token, a length (4 bytes) and a report as JSON (docs/wire-format.md).
"""

from __future__ import annotations

import errno
import hmac
import json
import os
import socket
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import asdict, dataclass, replace

from gradwire.aggregate.peers import interpreter_exit
from gradwire.aggregate.peers.addresses import own_address

TOKEN_BYTES = 16
LONGEST = 1 << 16  # bytes of a message
QUESTION_SECONDS = 0.5  # that a peer has to send its question
MOST_QUESTIONS = 256  # at a time; more are turned away
# Errors of accept() that say that the socket is closed. All others pass: too many files are open, a peer has left
# already, a firewall forbids it, or the network has failed, which Linux tells here, too.
CLOSED = {errno.EBADF, errno.EINVAL, errno.ENOTSOCK}

ENDING = "ends: its program is over, or has raised an error"  # what a rank is doing when its interpreter ends

_listeners: weakref.WeakSet[socket.socket] = weakref.WeakSet()


@dataclass(frozen=True)
class Report:
    """What a rank says about itself."""

    rank: int
    step: int = 0
    doing: str = "has just attached"
    seconds: float = 0.0  # for how long it has been doing so
    failed: bool = False
    cause: str = ""  # why it has failed, once that is known
    meetings: int = 0  # calls that all ranks must make, to which this rank has come; on rank 0: all ranks


class SharedStatus:
    """What this rank says about itself, and what it knows of the others.

    The rank's threads and the thread that answers questions share it: every method may be called from any thread. It
    refers to nothing else of the rank, so that the answering thread does not keep a model alive. The first cause that a
    rank reports is kept, since later ones only follow from it.
    """

    def __init__(self, rank: int, token: bytes):
        self._changed = threading.Condition()
        self._token = token
        self._report = Report(rank)
        self._since = time.monotonic()
        self._peers: dict[int, Report] = {}  # the last report of each other rank

    @property
    def token(self) -> bytes:
        """The secret that every question must bear."""
        return self._token

    def set_token(self, token: bytes) -> None:
        """Take over the token that the ranks have agreed on."""
        self._token = token

    # ── this rank ──

    @property
    def report(self) -> Report:
        """What this rank says now."""
        with self._changed:
            doing = ENDING if interpreter_exit.has_begun() else self._report.doing
            return replace(self._report, doing=doing, seconds=time.monotonic() - self._since)

    def set_activity(self, doing: str, step: int | None = None) -> None:
        """Say from now on that this rank is doing this, in this step, or in the same step as before."""
        with self._changed:
            self._since = time.monotonic()
            self._report = replace(self._report, doing=doing, step=self._report.step if step is None else step)

    def count_meeting(self) -> None:
        """Say from now on that this rank has come to one more meeting; rank 0, that all have."""
        with self._changed:
            self._report = replace(self._report, meetings=self._report.meetings + 1)

    def has_failed(self) -> bool:
        """Tell whether this rank has failed."""
        return self._report.failed

    def begin_failure(self) -> bool:
        """Say from now on that this rank has failed. False if it had said so before."""
        with self._changed:
            first = not self._report.failed
            self._report = replace(self._report, failed=True)
            return first

    def set_cause(self, cause: str) -> None:
        """Say from now on that this rank has failed, and why."""
        with self._changed:
            self._report = replace(self._report, failed=True, cause=cause[: LONGEST // 16])
            self._changed.notify_all()

    def wait_for_cause(self, seconds: float) -> str:
        """Return why this rank has failed, once another thread has found out; empty if that takes too long."""
        with self._changed:
            self._changed.wait_for(lambda: self._report.cause, seconds)
            return self._report.cause

    # ── the other ranks ──

    def record(self, report: Report) -> None:
        """Note what another rank has said."""
        with self._changed:
            before = self._peers.get(report.rank)
            if before is None or not before.cause:
                self._peers[report.rank] = report
            self._changed.notify_all()

    def peer_reports(self, failed: bool) -> list[Report]:
        """Return the last reports of the other ranks that have failed, or that have not, in rank order."""
        with self._changed:
            return [report for _, report in sorted(self._peers.items()) if report.failed == failed]

    def wait_for_peer_cause(self, deadline: float) -> str:
        """Return the first cause that another rank has found.

        Ranks that have failed without saying why are given until `deadline` (of time.monotonic()) to find out. It is
        empty if none has failed, or none says why.
        """
        with self._changed:
            while True:
                failed = [report for _, report in sorted(self._peers.items()) if report.failed]
                causes = [report.cause for report in failed if report.cause]
                seconds = deadline - time.monotonic()
                if causes or not failed or seconds <= 0:
                    return causes[0] if causes else ""
                self._changed.wait(seconds)

    # ── on the wire ──

    def message(self) -> bytes:
        """Return this rank's report as it is sent, question and answer alike."""
        text = json.dumps(asdict(self.report)).encode()
        return self._token + len(text).to_bytes(4, "little") + text


def open_listener() -> socket.socket | None:
    """Return a socket that listens at an address of this machine.

    It is None where there is no such address: then no rank can be named, but all else works.
    """
    try:
        address = own_address()
        listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        listener.bind((address, 0))
        listener.listen(1024)
        _listeners.add(listener)
        return listener
    except OSError:
        return None


def close_listener(listener: socket.socket) -> None:
    """Close the socket, and end the thread that answers there."""
    with suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
    listener.close()


def _close_in_child() -> None:
    # A forked worker of a data loader would hold the socket of a killed rank open.
    for listener in list(_listeners):
        listener.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


def answer_questions(listener: socket.socket, status: SharedStatus) -> None:
    """Answer every question with this rank's report, until the socket is closed; runs in a thread of its own.

    Each question gets a thread, for half a second at most: whoever connects and says nothing keeps nobody waiting.
    """
    places = threading.Semaphore(MOST_QUESTIONS)
    while True:
        try:
            connection, _ = listener.accept()
        except OSError as error:
            if error.errno in CLOSED:
                return
            time.sleep(0.05)
            continue
        if not places.acquire(blocking=False):
            connection.close()
            continue
        try:
            threading.Thread(
                target=_answer, args=(connection, status, places), name="gradwire roll call", daemon=True
            ).start()
        except RuntimeError:  # no more threads
            _answer(connection, status, places)


def _answer(connection: socket.socket, status: SharedStatus, places: threading.Semaphore) -> None:
    try:
        with connection, suppress(OSError, ValueError, KeyError, TypeError):
            status.record(read_report(connection, status.token, time.monotonic() + QUESTION_SECONDS))
            connection.sendall(status.message())
    finally:
        places.release()


def read_report(connection: socket.socket, token: bytes, deadline: float) -> Report:
    """Read a message. ValueError if it bears another token or is damaged; OSError if it does not come in time."""
    head = _read_exactly(connection, TOKEN_BYTES + 4, deadline)
    length = int.from_bytes(head[TOKEN_BYTES:], "little")
    if not hmac.compare_digest(head[:TOKEN_BYTES], token) or length > LONGEST:
        raise ValueError("the message bears another token, or is too long")
    values = json.loads(_read_exactly(connection, length, deadline))
    report = Report(**{name: values[name] for name in Report.__dataclass_fields__})
    if not isinstance(report.rank, int) or not isinstance(report.meetings, int):
        raise ValueError("the message names no rank, or no number of meetings")
    return report


def _read_exactly(connection: socket.socket, length: int, deadline: float) -> bytes:
    data = b""
    while len(data) < length:
        connection.settimeout(seconds_until(deadline))
        part = connection.recv(length - len(data))
        if not part:
            raise ConnectionResetError("closed")
        data += part
    return data


def seconds_until(deadline: float) -> float:
    """Return the seconds until `deadline` (of time.monotonic()), a millisecond at least."""
    return max(0.001, deadline - time.monotonic())
