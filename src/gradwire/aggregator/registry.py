"""Jobs, joining and sessions: the aggregator's slow path (docs/aggregator.md, "Joining").

Nothing is kept for a sender that has not shown the key and that it receives what is sent to its address.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable

from gradwire.aggregator.engine import Address, Engine, Session
from gradwire.aggregator.jobs import Job, Limits, Member, distance
from gradwire.aggregator.packet import packet_format
from gradwire.aggregator.packet.packet_format import Join, Kind, Packet
from gradwire.errors import GradwireError

BYTES_A_SLOT = 2 * 1408
"""Two banks."""
FEWEST_SLOTS = 16
COOKIE_SECONDS = 5.0
"""A cookie is valid for this long at least, and twice as long at most."""
GONE_EVERY = 0.01

_SHARED_KEY = (bytes([Kind.HELLO]), bytes([Kind.JOIN]))
Replies = list[tuple[bytes, Address]]


class Registry:
    def __init__(
        self, key: bytes, engine: Engine, limits: Limits | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.key, self.engine, self.limits, self.clock = key, engine, limits or Limits(), clock
        self.jobs: dict[bytes, Job] = {}
        self.sessions: dict[int, tuple[bytes, Job]] = {}
        self._secret = os.urandom(packet_format.KEY_BYTES)
        # Seconds since 1970: a number that no aggregator of before a restart has used.
        self._last_session = int(time.time()) & 0x7FFFFFFF
        self._last_gone = 0.0
        self.refused = self.forged = 0

    def handle(self, datagram: bytes, address: Address) -> Replies:
        """What to answer to a packet that the engine has not served."""
        if datagram[3:4] in _SHARED_KEY and not packet_format.is_coded(datagram, self.key):
            self.forged += 1
            return []
        try:
            packet = packet_format.unpack(datagram)
            match packet.kind:
                case Kind.HELLO:
                    return self._hello(packet, address)
                case Kind.JOIN:
                    return self._join(Join.unpack(packet.payload), packet.worker, address)
                case Kind.ASK | Kind.LEAVE:
                    return self._of_session(packet, address)
                case Kind.DATA:
                    return self._gone(packet.session, address)
        except packet_format.BadPacket:
            pass
        return []

    def tick(self) -> None:
        """Forget jobs that nobody is heard of; call this now and then."""
        for name, job in list(self.jobs.items()):
            limit = self.limits.idle if job.session else self.limits.joining
            if self.silence(job) > limit:
                self._end_session(job)
                del self.jobs[name]

    def silence(self, job: Job) -> float:
        """Seconds since anything of a job was heard."""
        seconds = self.clock() - job.last_heard
        return min([seconds, *self.engine.heard(job.session.number)]) if job.session else seconds

    def _pack(self, kind: Kind, payload: bytes, session: int = 0) -> bytes:
        return Packet(kind, session, payload=payload).pack(self.key)

    def _cookie(self, nonce: bytes, address: Address, ago: int = 0) -> bytes:
        period = int(self.clock() / COOKIE_SECONDS) - ago
        text = f"{address[0]} {address[1]} {period} ".encode()
        return packet_format.code(self._secret, text + nonce).to_bytes(8, "little")

    def _hello(self, packet: Packet, address: Address) -> Replies:
        if len(packet.payload) != packet_format.HELLO_BYTES:
            return []
        nonce = packet.payload[: packet_format.NONCE_BYTES]
        return [(self._pack(Kind.CHALLENGE, nonce + self._cookie(nonce, address)), address)]

    def _join(self, join: Join, worker: int, address: Address) -> Replies:
        if join.cookie not in (self._cookie(join.nonce, address), self._cookie(join.nonce, address, 1)):
            return []  # the worker says HELLO again
        reason = self._objection(join, worker)
        if reason:
            self.refused += 1
            return [(self._pack(Kind.REFUSE, packet_format.refuse(join.nonce, reason)), address)]
        job = self.jobs.setdefault(join.job, Job(join.world))
        job.last_heard = self.clock()
        known = job.members.get(worker)
        if known is None or join.time > known.join.time:
            gone = self._end_session(job)
            job.members[worker] = Member(join, address)
            if len(job.waiting()) == job.world:
                return gone + self._begin_session(join.job, job)
        elif known.join.nonce != join.nonce:
            reason = f"worker {worker} has joined elsewhere, later"
            return [(self._pack(Kind.REFUSE, packet_format.refuse(join.nonce, reason)), address)]
        else:
            gone = []
            known.address = address
        answer = job.members[worker].answer
        waiting = self._pack(Kind.WAIT, packet_format.wait(join.nonce, job.waiting()))
        return [*gone, (answer or waiting, address)]

    def _objection(self, join: Join, worker: int) -> str | None:
        if not 1 <= join.world <= packet_format.MOST_WORKERS:
            return f"{join.world} workers: it takes 1 to {packet_format.MOST_WORKERS}"
        if worker >= join.world:
            return f"worker {worker} of {join.world}: they count from 0"
        job = self.jobs.get(join.job)
        if job is None:
            return f"full: it takes {self.limits.jobs} jobs" if len(self.jobs) >= self.limits.jobs else None
        if job.world != join.world:
            return f"this job has {job.world} workers, not {join.world}"
        return None

    def _begin_session(self, name: bytes, job: Job) -> Replies:
        members = [job.members[worker] for worker in range(job.world)]
        reason = distance(members)
        used = sum(other.session.slots for other in self.jobs.values() if other.session)
        room = self.limits.memory // BYTES_A_SLOT - used
        wanted = min(member.join.slots for member in members)
        most = min(wanted, self.limits.slots)
        slots = min(most, room, self.engine.most_slots)
        if reason is None and slots < min(most, FEWEST_SLOTS):
            reason = "full: other jobs have all its memory"
        if reason is None and slots < 1:
            reason = "a job wants a slot at least"
        if reason is not None:
            return self._refuse(members, reason)
        self._last_session = self._last_session % 0xFFFFFFFF + 1
        nonce = os.urandom(packet_format.NONCE_BYTES)
        key = packet_format.session_key(self.key, name, nonce)
        session = Session(self._last_session, key, tuple(member.address for member in members), slots)
        try:
            self.engine.open(session)
        except GradwireError as error:  # all of it for who runs the aggregator, its beginning for the workers
            warnings.warn(f"a job was refused: {error}", stacklevel=2)
            return self._refuse(members, str(error))
        job.session = session
        self.sessions[job.session.number] = name, job
        first = min(member.join.operations for member in members)
        for member in members:
            accept = packet_format.Accept(member.join.nonce, nonce, job.session.number, slots, first)
            member.answer = self._pack(Kind.ACCEPT, accept.pack())
        return [(member.answer, member.address) for member in members if member.answer]

    def _refuse(self, members: list[Member], reason: str) -> Replies:
        self.refused += len(members)
        for member in members:
            member.answer = self._pack(Kind.REFUSE, packet_format.refuse(member.join.nonce, reason))
        return [(member.answer, member.address) for member in members if member.answer]

    def _end_session(self, job: Job) -> Replies:
        """The session is over; its workers are told, so that they join again."""
        session, job.session = job.session, None
        if session is None:
            return []
        self.engine.close(session.number)
        del self.sessions[session.number]
        gone = self._pack(Kind.GONE, packet_format.gone(session.number), session.number)
        return [(gone, address) for address in session.addresses]

    def _gone(self, session: int, address: Address) -> Replies:
        """Senders of DATA for sessions that are no more; anyone can send that, so there are few answers.

        And none for sessions to come: who had collected those could end them.
        """
        now = self.clock()
        to_come = (self._last_session - session) % 2**32 >= 2**31
        if now - self._last_gone < GONE_EVERY or to_come or session in self.sessions:
            return []
        self._last_gone = now
        return [(self._pack(Kind.GONE, packet_format.gone(session), session), address)]

    def _of_session(self, packet: Packet, address: Address) -> Replies:
        name, job = self.sessions.get(packet.session, (b"", None))
        if job is None or job.session is None:
            return self._gone(packet.session, address)
        session = job.session
        if packet.worker >= job.world or packet.payload or not packet.is_coded_with(session.key):
            self.forged += 1
            return []
        if packet.kind == Kind.LEAVE:
            job.members[packet.worker].left = True
            if all(member.left for member in job.members.values()):
                self._end_session(job)
                del self.jobs[name]
            return []
        job.last_heard = self.clock()
        left = [worker for worker, member in job.members.items() if member.left and worker != packet.worker]
        if left:
            answer = self._pack(Kind.GONE, packet_format.gone(session.number, left[0]), session.number)
        else:
            told = packet_format.tell(self.engine.heard(session.number))
            answer = Packet(Kind.TELL, session.number, payload=told).pack(session.key)
        return [(answer, session.addresses[packet.worker])]
