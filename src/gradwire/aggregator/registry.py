"""Jobs, joining and sessions: the aggregator's control plane (docs/aggregator.md, "Joining a job")."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable

from gradwire.aggregator.engine import Engine, Peer, Session
from gradwire.aggregator.jobs import Job, Limits, Member, why_too_far_apart
from gradwire.aggregator.packet import packet_format, siphash
from gradwire.aggregator.packet.packet_format import Join, Kind, Packet
from gradwire.errors import GradwireError

BYTES_PER_SLOT = 2 * 1408
"""A slot has two banks."""
FEWEST_SLOTS = 16
"""A job that would get fewer, and wanted more, is refused."""
COOKIE_SECONDS = 5.0
"""A cookie is valid for this long at least, and twice as long at most."""
GONE_EVERY = 0.01
"""Seconds between answers to senders whose session is unknown."""

_KINDS_BEFORE_A_SESSION = (bytes([Kind.HELLO]), bytes([Kind.JOIN]))
Replies = list[tuple[bytes, Peer]]


class Registry:
    """Decides who may join which job, and opens and closes sessions of the engine.

    It promises that nothing is kept for a sender that has not shown two things: that it has the shared key, and that it
    receives what is sent to its address (it returns a cookie). It promises, too, that the workers of a job get the same
    session or none, that a sender gets no reply that is longer than the packet that it sent, and that session numbers
    are never used again.

    `handle` and `forget_silent_jobs` are called by the server's thread alone. It never sends anything itself: replies
    are returned. `jobs`, `sessions`, `refused` and `forged` are for others to read, and not to change.
    """

    def __init__(
        self, key: bytes, engine: Engine, limits: Limits | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.key, self.engine, self.limits, self.clock = key, engine, limits or Limits(), clock
        self.jobs: dict[bytes, Job] = {}
        """By the job's name."""
        self.sessions: dict[int, tuple[bytes, Job]] = {}
        """Name and job of every open session, by its number."""
        self._secret = os.urandom(packet_format.KEY_BYTES)
        # Seconds since 1970: a number that no aggregator of before a restart has used.
        self._last_session = int(time.time()) & 0x7FFFFFFF
        self._last_gone = 0.0
        self.refused = self.forged = 0

    def handle(self, datagram: bytes, address: Peer) -> Replies:
        """Return the replies to a packet that the engine has handed on."""
        if datagram[3:4] in _KINDS_BEFORE_A_SESSION and not packet_format.has_code_of(datagram, self.key):
            self.forged += 1
            return []
        try:
            packet = packet_format.unpack(datagram)
            match packet.kind:
                case Kind.HELLO:
                    return self._answer_hello(packet, address)
                case Kind.JOIN:
                    return self._answer_join(Join.unpack(packet.payload), packet.worker, address)
                case Kind.ASK | Kind.LEAVE:
                    return self._answer_in_session(packet, address)
                case Kind.DATA:
                    return self._answer_unknown_session(packet, address)
        except packet_format.BadPacket:
            pass
        return []

    def forget_silent_jobs(self) -> None:
        """Forget jobs of which no packet came for a long time (`Limits`); call this now and then."""
        for name, job in list(self.jobs.items()):
            limit = self.limits.idle if job.session else self.limits.joining
            if self.silence(job) > limit:
                self._end_session(job)
                del self.jobs[name]

    def silence(self, job: Job) -> float:
        """Return the seconds since the last packet of any of the job's workers."""
        seconds = self.clock() - job.last_control
        return min([seconds, *self.engine.silences(job.session.number)]) if job.session else seconds

    # ── joining ──

    def _answer_hello(self, packet: Packet, address: Peer) -> Replies:
        if len(packet.payload) != packet_format.HELLO_BYTES:
            return []
        nonce = packet.payload[: packet_format.NONCE_BYTES]
        challenge = packet_format.challenge_payload(nonce, self._cookie(nonce, address))
        return [(self._pack(Kind.CHALLENGE, challenge), address)]

    def _cookie(self, nonce: bytes, address: Peer, periods_ago: int = 0) -> bytes:
        period = int(self.clock() / COOKIE_SECONDS) - periods_ago
        text = f"{address.ip} {address.port} {period} ".encode()
        return siphash.code(self._secret, text + nonce).to_bytes(packet_format.COOKIE_BYTES, "little")

    def _answer_join(self, join: Join, worker: int, address: Peer) -> Replies:
        if join.cookie not in (self._cookie(join.nonce, address), self._cookie(join.nonce, address, 1)):
            return []  # the worker says HELLO again
        reason = self._objection(join, worker)
        if reason:
            self.refused += 1
            return [(self._pack(Kind.REFUSE, packet_format.refuse_payload(join.nonce, reason)), address)]
        job = self.jobs.setdefault(join.job, Job(join.world))
        job.note_control(self.clock())
        member = job.members.get(worker)
        if member is None or join.time > member.join.time:
            gone = self._end_session(job)
            job.add(worker, Member(join, address))
            if len(job.waiting()) == job.world:
                return gone + self._begin_session(join.job, job)
        elif member.join.nonce != join.nonce:
            reason = f"worker {worker} has joined elsewhere, later"
            return [(self._pack(Kind.REFUSE, packet_format.refuse_payload(join.nonce, reason)), address)]
        else:
            gone = []
            member.move(address)
        answer = job.members[worker].answer
        waiting = self._pack(Kind.WAIT, packet_format.wait_payload(join.nonce, job.waiting()))
        return [*gone, (answer or waiting, address)]

    def _objection(self, join: Join, worker: int) -> str | None:
        """Return why a worker cannot join, or None if it can."""
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

    # ── sessions ──

    def _begin_session(self, name: bytes, job: Job) -> Replies:
        members = [job.members[worker] for worker in range(job.world)]
        reason = why_too_far_apart(members)
        used = sum(other.session.slots for other in self.jobs.values() if other.session)
        room = self.limits.memory // BYTES_PER_SLOT - used
        wanted = min(self.limits.slots, *(member.join.slots for member in members))
        slots = min(wanted, room, self.engine.most_slots)
        if reason is None and slots < min(wanted, FEWEST_SLOTS):
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
        except GradwireError as error:  # who runs the aggregator reads all of it; the workers, its beginning
            warnings.warn(f"a job was refused: {error}", stacklevel=2)
            return self._refuse(members, str(error))
        job.begin(session)
        self.sessions[session.number] = name, job
        first = min(member.join.operations for member in members)
        for member in members:
            accept = packet_format.Accept(member.join.nonce, nonce, session.number, slots, first)
            member.set_answer(self._pack(Kind.ACCEPT, accept.pack()))
        return [(member.answer, member.address) for member in members if member.answer]

    def _refuse(self, members: list[Member], reason: str) -> Replies:
        self.refused += len(members)
        for member in members:
            member.set_answer(self._pack(Kind.REFUSE, packet_format.refuse_payload(member.join.nonce, reason)))
        return [(member.answer, member.address) for member in members if member.answer]

    def _end_session(self, job: Job) -> Replies:
        """Close the job's session, if it has one; the replies tell its workers, so that they join again."""
        session = job.end()
        if session is None:
            return []
        self.engine.close(session.number)
        del self.sessions[session.number]
        gone = self._pack(Kind.GONE, packet_format.gone_payload(session.number), session.number)
        return [(gone, address) for address in session.addresses]

    def _answer_in_session(self, packet: Packet, address: Peer) -> Replies:
        """Reply to ASK, and take note of LEAVE."""
        name, job = self.sessions.get(packet.session, (b"", None))
        if job is None or job.session is None:
            return self._answer_unknown_session(packet, address)
        session = job.session
        zeros = packet_format.ASK_BYTES if packet.kind == Kind.ASK else 0
        if packet.worker >= job.world or packet.payload != bytes(zeros) or not packet.has_code_of(session.key):
            self.forged += 1
            return []
        if packet.kind == Kind.LEAVE:
            job.members[packet.worker].leave()
            if all(member.left for member in job.members.values()):
                self._end_session(job)
                del self.jobs[name]
            return []
        job.note_control(self.clock())
        left = [worker for worker, member in job.members.items() if member.left and worker != packet.worker]
        if left:
            answer = self._pack(Kind.GONE, packet_format.gone_payload(session.number, left[0]), session.number)
        else:
            silences = packet_format.tell_payload(self.engine.silences(session.number))
            answer = Packet(Kind.TELL, session.number, payload=silences).pack(session.key)
        return [(answer, session.addresses[packet.worker])]

    def _answer_unknown_session(self, packet: Packet, address: Peer) -> Replies:
        """Reply GONE to a packet whose session has ended.

        Anyone can send such packets, in anyone's name, so there are few replies, and none to a packet that is shorter
        than the reply. There is none for a session that is still to come: who had collected those could end it.
        """
        now, session = self.clock(), packet.session
        to_come = (self._last_session - session) % 2**32 >= 2**31
        too_short = len(packet.payload) < packet_format.GONE.size
        if now - self._last_gone < GONE_EVERY or too_short or to_come or session in self.sessions:
            return []
        self._last_gone = now
        return [(self._pack(Kind.GONE, packet_format.gone_payload(session), session), address)]

    def _pack(self, kind: Kind, payload: bytes, session: int = 0) -> bytes:
        return Packet(kind, session, payload=payload).pack(self.key)
