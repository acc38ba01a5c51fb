"""Who is still there: asked of every rank, over sockets of our own, when a collective has failed.

Gloo and NCCL say that a connection was closed or that time is up; not who is to blame. And the group that has failed
cannot be used to find out. So every rank has a listening socket and a thread that answers on it:

1. A rank whose collective has failed connects to all others. From one that was killed the connection is refused; one
   that is stopped accepts it, since its kernel does, and is silent; all others answer what they are doing. One that
   closes the connection is asked again: the question has come late, on a lossy network, or it is asked too much.
2. A question is also an announcement: whoever is asked knows that the other has failed by itself. If that process has
   ended a moment later, it is not taken for the lost one.
3. When the rank has found the cause (`diagnosis.py`), it tells the others, before it raises.

All of that takes PATIENCE seconds at most, and nothing at all while training goes well. Addresses and the token that
a question must bear come with the handshake.

A rank counts as reached when it has answered for the first time. One that has not may be behind a firewall, so that
nothing follows from it if a connection to it is refused or does not come about. But if it accepts a connection and says
nothing when a collective has failed, it is stopped: most likely since just after it attached.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import weakref
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from gradwire.aggregate.peers.addresses import pack_address, unpack_address
from gradwire.aggregate.peers.status_server import (
    TOKEN_BYTES,
    SharedStatus,
    answer_questions,
    close_listener,
    open_listener,
    read_report,
    seconds_until,
)

PATIENCE = 3.0  # seconds for all answers
FINDING = PATIENCE + 1.0  # seconds until a rank that has failed has found the cause: it has to ask, and a little more
PROBE_AGAIN = (3.0, 10.0, 30.0)  # seconds until ranks that could not be reached are tried once more
CONTACT_AGAIN = 0.05  # seconds until a rank is asked again that has closed the connection
OWN_PAUSE = 1.0  # seconds; if asking took so much longer than it may, this process itself was stopped: it asks again

ALIVE, GONE, SILENT, UNREACHABLE = "alive", "gone", "silent", "unreachable"  # states of another rank


class RollCall:
    """One rank's way to ask the others whether they are still there, and to tell them that it has failed.

    It promises to take no longer than the seconds that it is given, to raise nothing, and to say of a rank that it is
    gone only if that one could be reached before. `set_activity`, `ask`, `announce_failure` and the properties may be
    called from any thread. It uses no process group, sends nothing while training goes well, and never keeps its owner
    alive: the socket is closed when this object is collected.
    """

    def __init__(self, rank: int, ranks: Sequence[int]):
        """`rank` counts within the group; `ranks` are the numbers that the user knows the group's ranks by."""
        self.rank, self.ranks = rank, list(ranks)
        self.status = SharedStatus(rank, os.urandom(TOKEN_BYTES))
        self._listener = open_listener()
        self._addresses: list[tuple[str, int] | None] = []
        self._reached: set[int] = set()
        self._reaching = threading.Lock()
        self._probed = threading.Event()
        if self._listener is not None:
            weakref.finalize(self, close_listener, self._listener)

    @property
    def address(self) -> bytes:
        """Where this rank answers: 18 bytes, zeros if nowhere."""
        return pack_address(self._listener)

    def start(self, addresses: list[bytes], token: bytes) -> None:
        """Answer the others from now on; and see whether they can be reached, without waiting for it.

        A second call has no effect.
        """
        if self._addresses:
            return
        self._addresses = [unpack_address(a) for a in addresses]
        self.status.set_token(token)
        if self._listener is not None:
            threading.Thread(target=answer_questions, args=(self._listener, self.status), daemon=True).start()
        threading.Thread(target=_probe, args=(weakref.proxy(self),), daemon=True).start()

    def set_activity(self, doing: str, step: int | None = None) -> None:
        """Set what this rank says if it is asked: what it is doing, and in which step if that has changed."""
        self.status.set_activity(doing, step)

    def ask(self, seconds: float = PATIENCE, peers: Collection[int] | None = None) -> dict[int, str]:
        """Ask every rank that could be reached before, or these, and return their states.

        `status` has what they answered. A process that was stopped meanwhile asks again: the others have closed the
        connections of questions that did not come, which must not look as if they were gone.
        """
        self._probed.wait(seconds if self._addresses else 0)
        return self._ask(self._reached if peers is None else self._reached & set(peers), seconds)

    def ask_unreached(self, seconds: float) -> Future[dict[int, str]] | None:
        """Begin to ask every rank that has not been reached, and return their states to be; None if there is none.

        Those that answer are reached then. Of the others only SILENT says something: a firewall may do the rest.
        """
        peers = self._unreached
        pool = ThreadPoolExecutor(1, "gradwire-roll-call")
        try:
            return pool.submit(self._ask, peers, seconds) if peers else None
        except RuntimeError:  # the interpreter is shutting down and starts no threads
            return None
        finally:
            pool.shutdown(wait=False)

    def _ask(self, peers: Collection[int], seconds: float) -> dict[int, str]:
        while True:
            began = time.monotonic()
            states = self._contact_all(sorted(peers), seconds)
            if time.monotonic() - began < seconds + OWN_PAUSE:
                return states

    def announce_failure(self, cause: str, peers: Iterable[int] | None = None, await_answers: bool = False) -> None:
        """Tell these peers, or all, that this rank has failed and why.

        By default nobody's answer is waited for: a process that is stopped now may read it later. `await_answers` is
        for failures that the peers have not been asked about: whoever finds this process gone must know by then.
        """
        self.status.set_cause(cause)
        self._contact_all(self._reached if peers is None else peers, PATIENCE / 3, await_answers)

    @property
    def reaches_all(self) -> bool:
        """Whether every other rank has been reached."""
        return len(self._reached) == len(self.ranks) - 1

    def somebody_failed(self) -> bool:
        """Tell whether another rank has said that it has failed: then there is nothing to wait for."""
        return bool(self.status.peer_reports(failed=True))

    def _probe(self) -> bool:
        """See which of the ranks that have not been reached yet can be; return whether all have been."""
        self._contact_all(self._unreached, PATIENCE)
        self._probed.set()
        return not self._unreached

    @property
    def _unreached(self) -> set[int]:
        """The ranks that could be asked, and have never answered."""
        peers = {r for r, address in enumerate(self._addresses) if r != self.rank and address is not None}
        return peers - self._reached

    def _contact_all(self, peers: Iterable[int], seconds: float, await_answers: bool = True) -> dict[int, str]:
        peers, deadline = list(peers), time.monotonic() + seconds
        if not peers:
            return {}
        try:
            with ThreadPoolExecutor(min(len(peers), 64), "gradwire-roll-call") as pool:
                states = pool.map(lambda rank: self._contact(rank, deadline, await_answers), peers)
                return dict(zip(peers, states, strict=True))
        except RuntimeError:  # the interpreter is shutting down and starts no threads
            return {}

    def _contact(self, rank: int, deadline: float, await_answer: bool) -> str:
        """Send this rank's report to another one, record its answer, and return its state."""
        while True:
            try:
                return self._contact_once(rank, deadline, await_answer)
            except ConnectionRefusedError:
                return GONE
            except ConnectionError:  # reset, or closed before it had answered
                if time.monotonic() + CONTACT_AGAIN > deadline:
                    return GONE
                time.sleep(CONTACT_AGAIN)

    def _contact_once(self, rank: int, deadline: float, await_answer: bool) -> str:
        address = self._addresses[rank]
        assert address is not None
        state = UNREACHABLE
        try:
            with socket.create_connection(address, timeout=seconds_until(deadline)) as connection:
                state = SILENT
                connection.sendall(self.status.message())
                if not await_answer:
                    return state
                report = read_report(connection, self.status.token, deadline)
        except ConnectionError:  # an OSError, too, but one after which it is worth asking again
            raise
        except (OSError, ValueError):
            return state
        self.status.record(report)
        if report.rank != rank:
            return GONE  # another process has got its port
        with self._reaching:
            self._reached = self._reached | {rank}
        return ALIVE


def _probe(roll_call: RollCall) -> None:
    """Probe until all ranks have been reached, or a few times: on a busy machine the first answers may come late."""
    with suppress(ReferenceError):
        for pause in PROBE_AGAIN:
            if roll_call._probe():
                return
            time.sleep(pause)
        roll_call._probe()
