"""The packet that workers and the aggregator exchange (docs/aggregator.md, "The packets"), for Python.

packet_format.h beside this file is the same for C and C++; a test compares every constant and every field of the two.
The control plane packs and reads its packets here. Packets of data are made and checked by native code or by the XDP
program; here they can be made for tests.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from gradwire.aggregator.packet.siphash import code as siphash

MAGIC = b"GW"
VERSION = 1
HEADER_BYTES = 32
CODED_BYTES = 24
WORDS = 336
PACKET_BYTES = 1376
NOBODY = 65535
MOST_WORKERS = 64
KEY_BYTES = NONCE_BYTES = JOB_BYTES = 16
COOKIE_BYTES = 8
HELLO_BYTES = 64
REASON_BYTES = 48
ASK_BYTES = 2 * MOST_WORKERS
IP_AND_UDP_BYTES = 28
IPV6_AND_UDP_BYTES = 48

HEADER = struct.Struct("<2sBBIIHHQQ")
CHALLENGE = struct.Struct("<16s8s")
JOIN = struct.Struct("<16s8s16sHHIQQ")
WAIT = struct.Struct("<16sQ")
ACCEPT = struct.Struct("<16s16sIIQ")
GONE = struct.Struct("<II")


class Kind(IntEnum):
    """What a packet is for."""

    HELLO = 1
    CHALLENGE = 2
    JOIN = 3
    WAIT = 4
    ACCEPT = 5
    REFUSE = 6
    DATA = 7
    RESULT = 8
    LEAVE = 9
    GONE = 10
    ASK = 11
    TELL = 12


class WordOperation(IntEnum):
    """How the aggregator combines the words of a DATA packet with those of other workers."""

    ADD = 0
    OR = 1


SESSION_KINDS = frozenset({Kind.DATA, Kind.RESULT, Kind.LEAVE, Kind.ASK, Kind.TELL})
"""Kinds whose code is made with the session's key; the code of all others is made with the shared key."""


class BadPacket(ValueError):
    """These bytes are not a packet of this format."""


@dataclass(frozen=True)
class Packet:
    """One packet: the fields of its header, and its payload."""

    kind: Kind
    session: int = 0
    round: int = 0
    slot: int = 0
    worker: int = NOBODY
    operation: int = WordOperation.ADD
    payload: bytes = b""
    code: int | None = None
    """The code that a packet bore when it was read; None in a packet that is still to be packed."""

    def pack(self, key: bytes) -> bytes:
        """Return the bytes of the packet, with a code made with `key`."""
        head = self._coded_header()
        return head + siphash(key, head + self.payload).to_bytes(8, "little") + self.payload

    def has_code_of(self, key: bytes) -> bool:
        """Tell whether the code that the packet bore was made with `key`."""
        return siphash(key, self._coded_header() + self.payload) == self.code

    def _coded_header(self) -> bytes:
        fields = (self.kind, self.session, self.round & 0xFFFFFFFF, self.slot, self.worker, self.operation, 0)
        return HEADER.pack(MAGIC, VERSION, *fields)[:CODED_BYTES]


def has_code_of(datagram: bytes, key: bytes) -> bool:
    """Tell whether the code in the bytes of a packet was made with `key`.

    This is cheaper than to read the packet first, which counts while someone floods the aggregator with garbage.
    """
    code = datagram[CODED_BYTES:HEADER_BYTES]
    return code == siphash(key, datagram[:CODED_BYTES] + datagram[HEADER_BYTES:]).to_bytes(8, "little")


def unpack(datagram: bytes) -> Packet:
    """Read a packet. BadPacket if it is not of this format; its code is for the caller to check."""
    if not HEADER_BYTES <= len(datagram) <= PACKET_BYTES:
        raise BadPacket(f"{len(datagram)} bytes")
    magic, version, kind, session, round_, slot, worker, operation, code = HEADER.unpack_from(datagram)
    if magic != MAGIC or version != VERSION or operation > 255:
        raise BadPacket("not of this format")
    try:
        kind = Kind(kind)
    except ValueError:
        raise BadPacket(f"kind {kind}") from None
    return Packet(kind, session, round_, slot, worker, operation, bytes(datagram[HEADER_BYTES:]), code)


# ── payloads of the control plane ──


@dataclass(frozen=True)
class Join:
    """The payload of JOIN: which worker of which job wants to take part."""

    nonce: bytes
    cookie: bytes
    job: bytes
    world: int
    """Workers of the job."""
    slots: int
    """Slots that the worker wants."""
    time: int
    """Nanoseconds. A later JOIN of the same worker takes the place of an earlier one."""
    operations: int
    """Operations that this worker has done."""

    def pack(self) -> bytes:
        """Return the 64 bytes of the payload."""
        return JOIN.pack(
            self.nonce,
            self.cookie,
            self.job,
            self.world,
            0,
            self.slots,
            self.time & 0xFFFFFFFFFFFFFFFF,
            self.operations,
        )

    @staticmethod
    def unpack(payload: bytes) -> Join:
        """Read a payload; BadPacket if it has another length."""
        if len(payload) != JOIN.size:
            raise BadPacket("a JOIN of another length")
        nonce, cookie, job, world, _, slots, time, operations = JOIN.unpack(payload)
        return Join(nonce, cookie, job, world, slots, time, operations)


@dataclass(frozen=True)
class Accept:
    """The payload of ACCEPT: the session that begins."""

    nonce: bytes
    session_nonce: bytes
    session: int
    slots: int
    first_operation: int

    def pack(self) -> bytes:
        """Return the 48 bytes of the payload."""
        return ACCEPT.pack(self.nonce, self.session_nonce, self.session, self.slots, self.first_operation)

    @staticmethod
    def unpack(payload: bytes) -> Accept:
        """Read a payload; BadPacket if it has another length."""
        if len(payload) != ACCEPT.size:
            raise BadPacket("an ACCEPT of another length")
        return Accept(*ACCEPT.unpack(payload))


def hello_payload(nonce: bytes) -> bytes:
    """Return the payload of HELLO: the nonce and zeros, so that no reply is longer than what caused it."""
    return nonce + bytes(HELLO_BYTES - NONCE_BYTES)


def challenge_payload(nonce: bytes, cookie: bytes) -> bytes:
    """Return the payload of CHALLENGE: the worker's nonce, and the cookie that its JOIN must bear."""
    return CHALLENGE.pack(nonce, cookie)


def wait_payload(nonce: bytes, joined: Sequence[int]) -> bytes:
    """Return the payload of WAIT: the worker's nonce, and a bit for each worker that has joined."""
    return WAIT.pack(nonce, sum(1 << worker for worker in joined))


def refuse_payload(nonce: bytes, reason: str) -> bytes:
    """Return the payload of REFUSE: the worker's nonce, and the first 48 bytes of the reason."""
    return nonce + reason.encode()[:REASON_BYTES]


def gone_payload(session: int, worker: int = NOBODY) -> bytes:
    """Return the payload of GONE: the session that has ended, and the worker that left it, if one did."""
    return GONE.pack(session, worker)


def tell_payload(silences: Sequence[float]) -> bytes:
    """Return the payload of TELL: the milliseconds (two bytes) since each worker's last packet, from seconds."""
    return b"".join(min(65535, int(1000 * seconds)).to_bytes(2, "little") for seconds in silences)


def session_key(key: bytes, job: bytes, session_nonce: bytes) -> bytes:
    """Return the key of a session, which follows from the shared key, the job's name and the session's nonce."""
    return b"".join(siphash(key, job + session_nonce + bytes([half])).to_bytes(8, "little") for half in (0, 1))
