"""The aggregator's packets, as docs/aggregator.md has them: the control plane's side, in plain Python.

Packets of data are made and verified by native code; what is here for them is for the tests.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

MAGIC = b"GW"
VERSION = 1
HEADER_BYTES = 32
WORDS = 336
PACKET_BYTES = HEADER_BYTES + 4 * WORDS
NOBODY = 65535
MOST_WORKERS = 64
KEY_BYTES = NONCE_BYTES = JOB_BYTES = 16
REASON_BYTES = 48
HELLO_BYTES = 64

_HEADER = struct.Struct("<2sBBIIHHB7x")
_JOIN = struct.Struct("<16s8s16sH2xIQQ")
_ACCEPT = struct.Struct("<16s16sIIQ")
_MASK = (1 << 64) - 1


class Kind(IntEnum):
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


OF_SESSION = frozenset({Kind.DATA, Kind.RESULT, Kind.LEAVE, Kind.ASK, Kind.TELL})
"""Kinds whose code is of the session's key."""


class BadPacket(ValueError):
    """Not a packet of this format."""


@dataclass(frozen=True)
class Packet:
    kind: Kind
    session: int = 0
    round: int = 0
    slot: int = 0
    worker: int = NOBODY
    adding: int = 0
    """0 adds, 1 ORs."""
    payload: bytes = b""
    code: int | None = None
    """Of a packet that was read."""

    def pack(self, key: bytes) -> bytes:
        head = _HEADER.pack(
            MAGIC, VERSION, self.kind, self.session, self.round & 0xFFFFFFFF, self.slot, self.worker, self.adding
        )
        return head + code(key, head + self.payload).to_bytes(8, "little") + self.payload

    def is_coded_with(self, key: bytes) -> bool:
        head = self.pack(bytes(KEY_BYTES))[:24]
        return code(key, head + self.payload) == self.code


def is_coded(datagram: bytes, key: bytes) -> bool:
    """The same of a packet that nobody has looked at yet: it is garbage, mostly, while someone floods."""
    return datagram[24:32] == code(key, datagram[:24] + datagram[32:]).to_bytes(8, "little")


def unpack(datagram: bytes) -> Packet:
    if not HEADER_BYTES <= len(datagram) <= PACKET_BYTES:
        raise BadPacket(f"{len(datagram)} bytes")
    magic, version, kind, session, round_, slot, worker, adding = _HEADER.unpack_from(datagram)
    if magic != MAGIC or version != VERSION or any(datagram[17:24]):
        raise BadPacket("not of this format")
    try:
        kind = Kind(kind)
    except ValueError:
        raise BadPacket(f"kind {kind}") from None
    stated = int.from_bytes(datagram[24:32], "little")
    return Packet(kind, session, round_, slot, worker, adding, bytes(datagram[32:]), stated)


@dataclass(frozen=True)
class Join:
    nonce: bytes
    cookie: bytes
    job: bytes
    world: int
    slots: int
    time: int
    operations: int

    def pack(self) -> bytes:
        return _JOIN.pack(self.nonce, self.cookie, self.job, self.world, self.slots, self.time & _MASK, self.operations)

    @staticmethod
    def unpack(payload: bytes) -> Join:
        if len(payload) != _JOIN.size:
            raise BadPacket("a JOIN of another length")
        return Join(*_JOIN.unpack(payload))


@dataclass(frozen=True)
class Accept:
    nonce: bytes
    session_nonce: bytes
    session: int
    slots: int
    first_operation: int

    def pack(self) -> bytes:
        return _ACCEPT.pack(self.nonce, self.session_nonce, self.session, self.slots, self.first_operation)

    @staticmethod
    def unpack(payload: bytes) -> Accept:
        if len(payload) != _ACCEPT.size:
            raise BadPacket("an ACCEPT of another length")
        return Accept(*_ACCEPT.unpack(payload))


def hello(nonce: bytes) -> bytes:
    return nonce + bytes(HELLO_BYTES - NONCE_BYTES)


def wait(nonce: bytes, joined: Sequence[int]) -> bytes:
    return nonce + sum(1 << worker for worker in joined).to_bytes(8, "little")


def refuse(nonce: bytes, reason: str) -> bytes:
    return nonce + reason.encode()[:REASON_BYTES]


def gone(session: int, worker: int = NOBODY) -> bytes:
    return struct.pack("<II", session, worker)


def tell(seconds: Sequence[float]) -> bytes:
    return b"".join(min(65535, int(1000 * s)).to_bytes(2, "little") for s in seconds)


def session_key(key: bytes, job: bytes, session_nonce: bytes) -> bytes:
    return b"".join(code(key, job + session_nonce + bytes([half])).to_bytes(8, "little") for half in (0, 1))


def plain_siphash(key: bytes, message: bytes) -> int:
    """SipHash-2-4 (Aumasson and Bernstein 2012, section 2)."""
    k0, k1 = struct.unpack("<QQ", key)
    v = [k0 ^ 0x736F6D6570736575, k1 ^ 0x646F72616E646F6D, k0 ^ 0x6C7967656E657261, k1 ^ 0x7465646279746573]
    padded = message + bytes(7 - len(message) % 8) + bytes([len(message) & 255])
    for (word,) in struct.iter_unpack("<Q", padded):
        v[3] ^= word
        _sip_round(v)
        _sip_round(v)
        v[0] ^= word
    v[2] ^= 0xFF
    for _ in range(4):
        _sip_round(v)
    return v[0] ^ v[1] ^ v[2] ^ v[3]


def _sip_round(v: list[int]) -> None:
    v0, v1, v2, v3 = v
    v0 = (v0 + v1) & _MASK
    v1 = _rotate(v1, 13) ^ v0
    v0 = _rotate(v0, 32)
    v2 = (v2 + v3) & _MASK
    v3 = _rotate(v3, 16) ^ v2
    v0 = (v0 + v3) & _MASK
    v3 = _rotate(v3, 21) ^ v0
    v2 = (v2 + v1) & _MASK
    v1 = _rotate(v1, 17) ^ v2
    v[:] = v0, v1, _rotate(v2, 32), v3


def _rotate(x: int, bits: int) -> int:
    return ((x << bits) | (x >> (64 - bits))) & _MASK


try:
    from gradwire._native import siphash as code
except ImportError:
    code = plain_siphash
