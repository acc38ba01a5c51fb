"""Packets that somebody sends who wants to break an aggregator or a worker: garbage, damaged copies of good packets,
and well-formed ones with absurd fields, with and without the right code."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from gradwire.aggregator.packet.packet_format import (
    CODED_BYTES,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    PACKET_BYTES,
    WORDS,
    Accept,
    Join,
    Kind,
    challenge_payload,
    gone_payload,
    hello_payload,
    tell_payload,
    wait_payload,
)  # fmt: skip
from gradwire.aggregator.packet.siphash import code

KEY = bytes(range(16))
ODD = (0, 1, 2, 3, 63, 64, 65, 255, 256, 65535, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1)


@dataclass(frozen=True)
class Hostile:
    """One packet, and whether its code is right for what it says: if not, nobody may take note of it."""

    datagram: bytes
    coded: bool


@dataclass
class Knowledge:
    """What the attacker has seen: it may have the shared key, but not the keys of honest sessions."""

    honest_jobs: dict[bytes, int] = field(default_factory=dict)
    """The number of workers of each honest job, by its name."""
    honest_sessions: list[int] = field(default_factory=list)
    recorded: list[bytes] = field(default_factory=list)
    """Honest packets that it saw on the network."""
    own_sessions: dict[int, bytes] = field(default_factory=dict)
    """Keys of the sessions that it has got by joining."""
    cookies: list[tuple[bytes, bytes]] = field(default_factory=list)
    """Nonce and cookie of its CHALLENGEs."""


def number(rng: random.Random, bits: int, *likely: int) -> int:
    """A number of so many bits: mostly a likely one, otherwise one at an edge, or any."""
    if likely and rng.random() < 0.7:
        return rng.choice(likely)
    return rng.choice([odd for odd in ODD if odd < 1 << bits]) if rng.random() < 0.9 else rng.getrandbits(bits)


def sealed(rng: random.Random, kind: int, payload: bytes, key: bytes | None, session: int = 0) -> Hostile:
    """A packet with a code made with this key; without one, with a code that is wrong."""
    round_, slot, worker = number(rng, 32, 0, 1, 2, 3), number(rng, 16, 0, 1), number(rng, 16, 0, 0, 1)
    operation = number(rng, 16, 0, 0, 1)
    head = HEADER.pack(MAGIC, 1, kind, session, round_, slot, worker, operation, 0)[:CODED_BYTES]
    right = code(key or rng.randbytes(16), head + payload)
    return Hostile(head + right.to_bytes(8, "little") + payload, key is not None)


def to_aggregator(rng: random.Random, known: Knowledge) -> Hostile:
    """A packet for an aggregator."""
    return rng.choice(FOR_AGGREGATOR)(rng, known)


def garbage(rng: random.Random, known: Knowledge) -> Hostile:
    datagram = rng.randbytes(rng.choice((0, 1, 31, 32, 33, 40, 96, PACKET_BYTES, rng.randrange(2000))))
    return Hostile(MAGIC + b"\1" + datagram if rng.random() < 0.7 else datagram, False)


def damaged(rng: random.Random, known: Knowledge) -> Hostile:
    """A packet from the network, changed in one way or two."""
    if not known.recorded:
        return garbage(rng, known)
    original = rng.choice(known.recorded)
    datagram = bytearray(original)
    for _ in range(rng.choice((1, 1, 2))):
        rng.choice(DAMAGES)(datagram, rng, known)
    return Hostile(bytes(datagram), bytes(datagram) in known.recorded)


def replayed(rng: random.Random, known: Knowledge) -> Hostile:
    return Hostile(rng.choice(known.recorded), True) if known.recorded else garbage(rng, known)


def any_kind(rng: random.Random, known: Knowledge) -> Hostile:
    """Every kind with every length and any session, without the right code."""
    length = rng.choice((0, 1, 7, 8, 24, 48, 63, 64, 65, 128, 224, 225, 4 * WORDS - 1, 4 * WORDS))
    session = number(rng, 32, *known.honest_sessions, *known.own_sessions)
    return sealed(rng, number(rng, 8, *Kind), rng.randbytes(length), None, session)


def hello(rng: random.Random, known: Knowledge) -> Hostile:
    payload = hello_payload(rng.randbytes(16)) if rng.random() < 0.9 else rng.randbytes(rng.randrange(200))
    return sealed(rng, Kind.HELLO, payload, KEY if rng.random() < 0.8 else None)


def join(rng: random.Random, known: Knowledge) -> Hostile:
    """A JOIN; in the name of an honest job, only such as must be refused: who has the key may join."""
    nonce, cookie = rng.choice(known.cookies) if known.cookies and rng.random() < 0.8 else (bytes(16), rng.randbytes(8))
    has_key = rng.random() < 0.8
    if known.honest_jobs and rng.random() < 0.3:
        job, honest_world = rng.choice(list(known.honest_jobs.items()))
        world = number(rng, 16, 1, 5)
        cookie = cookie if world != honest_world or not has_key else rng.randbytes(8)
    else:
        job, world = bytes([rng.randrange(12)]) * 16, number(rng, 16, 1, 1, 2)
    wanted = Join(nonce, cookie, job, world, number(rng, 32, 4, 16), number(rng, 64, 5), number(rng, 64, 0, 1))
    payload = wanted.pack() if rng.random() < 0.95 else wanted.pack()[: rng.randrange(64)]
    return sealed(rng, Kind.JOIN, payload, KEY if has_key else None)


def in_session(rng: random.Random, known: Knowledge) -> Hostile:
    """DATA, ASK and LEAVE with absurd rounds, slots, workers and operations.

    They are of a session that the attacker has joined, or, without the right code, of an honest one.
    """
    sessions: list[tuple[int, bytes | None]] = [*known.own_sessions.items()]
    if not sessions or rng.random() < 0.2:
        sessions = [(session, None) for session in known.honest_sessions]
    session, key = rng.choice(sessions)
    kind = rng.choice((Kind.DATA,) * 8 + (Kind.ASK, Kind.ASK, Kind.LEAVE))
    lengths = {Kind.DATA: 4 * WORDS, Kind.ASK: 128, Kind.LEAVE: 0}
    payload = bytes(lengths[kind]) if rng.random() < 0.9 else rng.randbytes(rng.randrange(4 * WORDS))
    return sealed(rng, kind, payload, key, session)


FOR_AGGREGATOR = (garbage, damaged, replayed, any_kind, any_kind, hello, *[join] * 3, *[in_session] * 4)


def to_worker(rng: random.Random, known: Knowledge, nonce: bytes, session: int, session_key: bytes) -> Hostile:
    """A packet for a worker, while it joins (nonce) or takes part in a session."""
    nonce = nonce if rng.random() < 0.8 else rng.randbytes(16)
    likely = {
        Kind.CHALLENGE: challenge_payload(nonce, rng.randbytes(8)),
        Kind.WAIT: wait_payload(nonce, [rng.randrange(64)]),
        Kind.ACCEPT: Accept(nonce, rng.randbytes(16), number(rng, 32), number(rng, 32, 4), number(rng, 64)).pack(),
        Kind.REFUSE: nonce + rng.randbytes(rng.randrange(60)),
        Kind.GONE: gone_payload(number(rng, 32, session), number(rng, 32, 65535)),
        Kind.TELL: tell_payload([rng.random()] * rng.choice((0, 1, 2, 64, 65))),
        Kind.RESULT: rng.randbytes(4 * WORDS),
    }
    kind, payload = rng.choice(list(likely.items()))
    if rng.random() < 0.2:
        payload = rng.choice((payload[: rng.randrange(len(payload) + 1)], payload + rng.randbytes(9)))
    of_session = kind in (Kind.RESULT, Kind.GONE, Kind.TELL)
    key = None if rng.random() < 0.5 else session_key if kind in (Kind.RESULT, Kind.TELL) else KEY
    made = sealed(rng, kind, payload, key, number(rng, 32, session, session, session) if of_session else 0)
    return garbage(rng, known) if rng.random() < 0.1 else made


# ── ways to damage a packet ──


def cut(datagram: bytearray, rng: random.Random, known: Knowledge) -> None:
    del datagram[rng.randrange(len(datagram) + 1) :]


def flip(datagram: bytearray, rng: random.Random, known: Knowledge) -> None:
    if datagram:
        datagram[rng.randrange(len(datagram))] ^= 1 << rng.randrange(8)


def overwrite_header(datagram: bytearray, rng: random.Random, known: Knowledge) -> None:
    if datagram:
        datagram[rng.randrange(min(HEADER_BYTES, len(datagram)))] = rng.choice((0, 1, 2, 127, 128, 255))


def extend(datagram: bytearray, rng: random.Random, known: Knowledge) -> None:
    datagram += rng.randbytes(rng.choice((1, 4, 32, PACKET_BYTES)))


def splice(datagram: bytearray, rng: random.Random, known: Knowledge) -> None:
    at = rng.randrange(len(datagram) + 1)
    datagram[at:] = rng.choice(known.recorded)[at:]


DAMAGES = (cut, flip, flip, overwrite_header, overwrite_header, extend, splice)
