"""How a worker joins a job at the aggregator: HELLO, CHALLENGE, JOIN, and the wait for the others."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gradwire.aggregator.packet import packet_format
from gradwire.aggregator.packet.packet_format import Accept, Join, Kind, Packet
from gradwire.errors import AggregateError

if TYPE_CHECKING:
    from gradwire._native import AggregatorClient

SLOTS = 2048
"""Slots that a worker asks for."""
RESEND_AFTER = 0.1
"""Seconds until a packet is sent again."""
COOKIE_LIFE = 4.0
"""Seconds until a worker asks for a new cookie; the aggregator takes one for five seconds at least."""


@dataclass(frozen=True)
class Membership:
    """Which worker joins which job at which aggregator."""

    address: str
    key: bytes
    job: bytes
    worker: int
    world: int
    clock_offset: int = field(default_factory=lambda: time.time_ns() - time.monotonic_ns())
    """Nanoseconds to add to the monotonic clock for the time of day; that clock may be set back, and this worker's next
    JOIN would then count as an earlier one."""


def join(client: AggregatorClient, who: Membership, operations: int, deadline: float) -> Accept:
    """Join, and return the ACCEPT that comes when all workers have.

    `operations` is how many this worker has done, `deadline` a time of time.monotonic(). AggregateError says what to do
    if the aggregator refuses, or does not answer in time.
    """
    nonce, started = os.urandom(packet_format.NONCE_BYTES), who.clock_offset + time.monotonic_ns()
    cookie, cookie_until, next_send = b"", 0.0, 0.0
    joined: list[int] | None = None  # the workers that had, when the aggregator last said WAIT
    nobody_listens = False
    while (now := time.monotonic()) < deadline:
        if client.stopped():
            raise AggregateError("the connection to the aggregator was closed while joining")
        if now >= next_send:
            next_send = now + RESEND_AFTER
            if now > cookie_until:
                cookie = b""
            wanted = Join(nonce, cookie, who.job, who.world, SLOTS, started, operations).pack() if cookie else b""
            kind, payload = (Kind.JOIN, wanted) if cookie else (Kind.HELLO, packet_format.hello_payload(nonce))
            client.send(Packet(kind, worker=who.worker, payload=payload).pack(who.key))
        for packet in receive(client, min(next_send, deadline) - now, who.key):
            if packet.payload[: packet_format.NONCE_BYTES] != nonce:
                continue
            rest = packet.payload[packet_format.NONCE_BYTES :]
            if packet.kind == Kind.CHALLENGE and not cookie and len(rest) == packet_format.COOKIE_BYTES:
                cookie, cookie_until, next_send = rest, now + COOKIE_LIFE, 0.0
            elif packet.kind == Kind.WAIT and len(rest) == 8:
                bits = int.from_bytes(rest, "little")
                joined = [worker for worker in range(who.world) if bits >> worker & 1]
            elif packet.kind == Kind.REFUSE:
                raise AggregateError(f"the aggregator at {who.address} refuses: {rest.decode(errors='replace')}")
            elif packet.kind == Kind.ACCEPT and len(packet.payload) == packet_format.ACCEPT.size:
                return _checked(Accept.unpack(packet.payload), who)
        nobody_listens = nobody_listens or client.refused()
    raise AggregateError(_explain(who, joined, nobody_listens))


def receive(client: AggregatorClient, seconds: float, key: bytes) -> list[Packet]:
    """Return the packets of the control plane that come within this time and bear the right code."""
    packets = []
    for datagram in client.receive(max(0.0, seconds)):
        try:
            packet = packet_format.unpack(datagram)
        except packet_format.BadPacket:
            continue
        if packet.kind not in packet_format.SESSION_KINDS and packet.has_code_of(key):
            packets.append(packet)
    return packets


def _checked(accept: Accept, who: Membership) -> Accept:
    if not 1 <= accept.slots <= SLOTS:
        raise AggregateError(f"the aggregator at {who.address} grants {accept.slots} slots: is it of another version?")
    return accept


def _explain(who: Membership, joined: list[int] | None, nobody_listens: bool) -> str:
    """Return why there was no ACCEPT in time."""
    if joined is not None:
        missing = ", ".join(str(worker) for worker in range(who.world) if worker not in joined)
        return f"workers that have not joined the aggregator at {who.address} in time: {missing}"
    if nobody_listens:
        return (
            f"nothing listens at {who.address}: start it with `gradwire aggregator`, or mend the address; UDP must"
            " pass in both directions"
        )
    return (
        f"no answer from an aggregator at {who.address}: either none runs there (start it with `gradwire"
        " aggregator`) or UDP does not pass, or its key is another one: GRADWIRE_KEY must be the same there and here"
    )
