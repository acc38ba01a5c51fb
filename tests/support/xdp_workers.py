"""Plain workers for tests of the XDP engine: packets built from docs/aggregator.md, with a SipHash of their own."""

from __future__ import annotations

import random
import socket
import struct
from collections.abc import Iterable

import numpy as np

from gradwire.aggregator.addresses import Address
from gradwire.aggregator.engine import Peer
from support.xdp_hosts import XdpHosts

WORDS, BYTES = 336, 1376
DATA, RESULT, ADD, OR = 7, 8, 0, 1
SO_RCVBUFFORCE = 33
U64 = np.uint64
FIELDS = "magic:S2 version:u1 kind:u1 session:<u4 round:<u4 slot:<u2 worker:<u2 operation:<u8"
HEAD = np.dtype([tuple(field.split(":")) for field in FIELDS.split()])


def siphash(key: bytes, messages: np.ndarray) -> np.ndarray:
    """SipHash-2-4 of each row of bytes; all rows at once."""
    rows, length = messages.shape
    padded = np.zeros((rows, length // 8 * 8 + 8), np.uint8)
    padded[:, :length], padded[:, -1] = messages, length & 255
    blocks = padded.view("<u8").T
    key0, key1 = np.frombuffer(key, "<u8")
    constants = (0x736F6D6570736575, 0x646F72616E646F6D, 0x6C7967656E657261, 0x7465646279746573)
    v = [np.full(rows, U64(c) ^ k) for c, k in zip(constants, (key0, key1, key0, key1), strict=True)]

    def rounds(count: int) -> None:
        for _ in range(count):
            for first, second, by in ((0, 1, 13), (2, 3, 16), (0, 3, 21), (2, 1, 17)):
                v[first] = v[first] + v[second]
                v[second] = rotate(v[second], by) ^ v[first]
                if (first, second) in ((0, 1), (2, 1)):
                    v[first] = rotate(v[first], 32)

    for block in blocks:
        v[3] = v[3] ^ block
        rounds(2)
        v[0] = v[0] ^ block
    v[2] = v[2] ^ U64(255)
    rounds(4)
    return v[0] ^ v[1] ^ v[2] ^ v[3]


def rotate(x: np.ndarray, by: int) -> np.ndarray:
    return x << U64(by) | x >> U64(64 - by)


def packets(key: bytes, kind: int, session: int, rounds, slots, workers, operations, words: np.ndarray) -> list[bytes]:
    """One for each row of words; the numbers are given once, or for each row."""
    heads = np.zeros(len(words), HEAD)
    values = (b"GW", 1, kind, session, rounds, slots, workers, operations)
    for field, value in zip(heads.dtype.names, values, strict=True):
        heads[field] = value
    before = heads.view(np.uint8).reshape(len(words), 24)
    after = np.ascontiguousarray(words, "<u4").view(np.uint8)
    codes = siphash(key, np.hstack([before, after])).view(np.uint8).reshape(len(words), 8)
    return [row.tobytes() for row in np.hstack([before, codes, after])]


class Workers:
    """Sockets of a job's workers, each on the host it was given, connected to the aggregator."""

    def __init__(self, hosts: XdpHosts, aggregator: Address, on: Iterable[int]):
        self.sockets = []
        for host in on:
            with hosts.inside(host):
                worker = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            worker.bind((f"10.88.0.{host + 1}", 0))
            worker.connect(aggregator)
            worker.settimeout(2)
            worker.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 8 << 20)
            self.sockets.append(worker)

    @property
    def addresses(self) -> tuple[Peer, ...]:
        return tuple(Peer(*worker.getsockname()) for worker in self.sockets)

    def received(self, worker: int, seconds: float = 0.0) -> list[bytes]:
        """All that has come until nothing came for so long."""
        found, end = [], self.sockets[worker]
        end.settimeout(max(seconds, 1e-3))
        try:
            while True:
                found.append(end.recv(2048))
        except TimeoutError:
            end.settimeout(2)
            return found

    def close(self) -> None:
        for worker in self.sockets:
            worker.close()


def exchange(workers: Workers, sent: list[list[bytes]], chance: random.Random, loss=0.0, twice=0.0) -> list[set[bytes]]:
    """Send each worker's packets in an order of its own, some never and some twice, and again what was not answered,
    until all have all results. What each worker received."""
    got: list[dict[bytes, set[bytes]]] = [{} for _ in sent]
    for _ in range(200):
        under_way = [
            (worker, packet) for worker, own in enumerate(sent) for packet in own if packet[8:14] not in got[worker]
        ]
        if not under_way:
            return [set().union(*answers.values()) for answers in got]
        under_way += [one for one in under_way if chance.random() < twice]
        chance.shuffle(under_way)
        for position, (worker, packet) in enumerate(under_way):
            if chance.random() >= loss:
                workers.sockets[worker].send(packet)
            if position % 64 == 63:
                take(workers, got)
        take(workers, got)
    raise AssertionError("not all results have come")


def take(workers: Workers, got: list[dict[bytes, set[bytes]]]) -> None:
    for worker, answers in enumerate(got):
        for packet in workers.received(worker):
            answers.setdefault(packet[8:14], set()).add(packet)


def hello(worker: int) -> bytes:
    """Of a control packet, the engine looks at no more than this."""
    return struct.pack("<2sBBIIHHQ", b"GW", 1, 1, 0, 0, 0, worker, 0) + bytes(8 + 64)
