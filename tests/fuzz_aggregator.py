"""Sends hostile packets to an aggregator and to workers, beside honest jobs: nothing may come of it.

    python tests/fuzz_aggregator.py --packets 1000000 --seed 0

What counts as a finding: an exception; a wrong sum, or the end of a session, of an honest job; an answer that is longer
than the packet that caused it; any answer, or any change, by a packet whose code is wrong, but for GONE; more jobs or
memory than the limits allow; memory of the process that grows. Packets go by real sockets through the userspace engine,
the registry, the native client and the code that joins.

An episode is a new aggregator and a thousand packets, made from --seed and its number: --start goes straight to one.
The packets of an episode with a finding are saved, one in a line, in hexadecimal.
"""

from __future__ import annotations

import argparse
import collections
import random
import resource
import socket
import sys
import time
from pathlib import Path

import torch
from gradwire._native import AggregatorClient

from gradwire import AggregateError
from gradwire.aggregate.sums import aggregator_join
from gradwire.aggregator.engine import Peer
from gradwire.aggregator.jobs import Limits
from gradwire.aggregator.packet import packet_format
from gradwire.aggregator.packet.packet_format import NOBODY, WORDS, Accept, Join, Kind, Packet, hello_payload
from gradwire.aggregator.registry import BYTES_PER_SLOT, Registry
from gradwire.aggregator.userspace_engine import UserspaceEngine
from support.hostile_packets import KEY, Hostile, Knowledge, to_aggregator, to_worker

EPISODE = 1000
"""Packets to one aggregator."""
HONEST_EVERY = 50
"""Packets between two sums of the honest jobs."""
LIMITS = Limits(jobs=6, slots=16, memory=64 * BYTES_PER_SLOT, idle=300.0, joining=30.0)
Counts = collections.Counter[str]


class Finding(AssertionError):
    """Something that must not come of a packet."""


def expect(holds: bool, what: str) -> None:
    if not holds:
        raise Finding(what)


class HonestJob:
    """Workers that join a job and add up words, as the documentation says."""

    def __init__(self, target: Target, name: bytes, world: int) -> None:
        self.target, self.world, self.round = target, world, 0
        self.sockets = [target.connected() for _ in range(world)]
        for worker, sock in enumerate(self.sockets):
            nonce = bytes([worker]) * 16
            [challenge] = self._told(sock, Packet(Kind.HELLO, worker=worker, payload=hello_payload(nonce)).pack(KEY))
            cookie = challenge.payload[16:]
            told = self._told(
                sock,
                Packet(Kind.JOIN, worker=worker, payload=Join(nonce, cookie, name, world, 4, 9, 0).pack()).pack(KEY),
            )
        accept = Accept.unpack(told[-1].payload)
        self.session, self.slots = accept.session, accept.slots
        self.key = packet_format.session_key(KEY, name, accept.session_nonce)

    def _told(self, sock: socket.socket, datagram: bytes) -> list[Packet]:
        self.target.known.recorded.append(datagram)
        sock.send(datagram)
        self.target.serve(Hostile(datagram, True))
        return [packet_format.unpack(answer) for answer in received(sock)]

    def sum_once(self, rng: random.Random) -> None:
        """Add up a packet of each worker in one slot, and check that all get the sum."""
        given = [rng.randbytes(4 * WORDS) for _ in range(self.world)]
        words = [torch.frombuffer(bytearray(one), dtype=torch.int32) for one in given]
        expected = torch.stack(words).sum(0, dtype=torch.int32).numpy().tobytes()
        slot, round_ = self.round % self.slots, self.round // self.slots
        self.round += 1
        for sock in self.sockets:
            received(sock)  # what replays have brought
        for worker, (sock, payload) in enumerate(zip(self.sockets, given, strict=True)):
            datagram = Packet(Kind.DATA, self.session, round_, slot, worker, 0, payload).pack(self.key)
            self.target.known.recorded[-1:] = [datagram]
            sock.send(datagram)
            self.target.engine.poll(0.0)
        expect(self.session in self.target.registry.sessions, "an honest session has ended")
        for sock in self.sockets:
            results = [packet_format.unpack(answer) for answer in received(sock)]
            own = [r for r in results if (r.kind, r.round, r.slot) == (Kind.RESULT, round_, slot)]
            expect(len(own) == 1 and own[0].payload == expected, "a wrong sum of an honest job, or none")
            expect(own[0].has_code_of(self.key), "a result with a wrong code")


class Target:
    """An aggregator with two honest jobs, and what an attacker knows of it."""

    def __init__(self) -> None:
        self.engine = UserspaceEngine(("127.0.0.1", 0))
        self.now = 1000.0
        self.registry = Registry(KEY, self.engine, LIMITS, clock=lambda: self.now)
        self.known = Knowledge()
        self._sockets: list[socket.socket] = []
        names = {b"an honest job, 2": 2, b"an honest job, 3": 3}
        self.jobs = [HonestJob(self, name, world) for name, world in names.items()]
        self.attackers = [self.connected() for _ in range(2)]
        self.known.honest_jobs.update(names)
        self.known.honest_sessions += [job.session for job in self.jobs]

    def connected(self) -> socket.socket:
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._sockets.append(sock)
        sock.bind(("127.0.0.1", 0))
        sock.connect(self.engine.address)
        sock.setblocking(False)
        return sock

    def close(self) -> None:
        self.engine.shut()
        for sock in self._sockets:
            sock.close()

    def attack(self, hostile: Hostile, rng: random.Random) -> str:
        """Deliver a packet, mostly by a socket, sometimes in the name of another address; return what came of it."""
        self.now += rng.choice((0.0, 0.001, 0.02)) if rng.random() < 0.999 else rng.choice((6.0, 40.0, 1000.0))
        if rng.random() < 0.1:
            spoofed = Peer(rng.choice(("10.0.0.1", "::1", "255.255.255.255")), rng.choice((0, 1, 65535)))
            return self._check(hostile, self.registry.handle(hostile.datagram, spoofed), spoofed)
        sock = self.attackers[rng.random() < 0.1]
        sock.send(hostile.datagram)
        came = self.serve(hostile)
        if rng.random() < 0.01:
            self.registry.forget_silent_jobs()
            received(sock)
        return came

    def serve(self, hostile: Hostile) -> str:
        """Let the aggregator serve what has come, as `Server.serve_once` does, and check what it answers."""
        before = self.engine.counters()
        handed_on = self.engine.poll(0.0)
        after = self.engine.counters()
        expect(hostile.coded or after["bytes_out"] == before["bytes_out"], "a result for a packet with a wrong code")
        came = next((name for name in COUNTED if after[name] > before[name]), "added")
        for datagram, peer in handed_on:
            replies = self.registry.handle(datagram, peer)
            came = self._check(hostile, replies, peer)
            for reply, to in replies:
                self.engine.send(reply, to)
        used = [job.session.slots for job in self.registry.jobs.values() if job.session]
        expect(len(self.registry.jobs) <= LIMITS.jobs, "more jobs than the limit")
        expect(sum(used) * BYTES_PER_SLOT <= LIMITS.memory, "more memory than the limit")
        expect(len(self.registry.sessions) == len(used), "sessions without a job")
        return came

    def _check(self, hostile: Hostile, replies: list[tuple[bytes, Peer]], sender: Peer) -> str:
        size = len(hostile.datagram)
        expect(all(len(reply) <= size for reply, _ in replies), "an answer longer than its cause")
        if not hostile.coded:
            expect(sum(len(reply) for reply, _ in replies) <= size, "answers longer than a packet with a wrong code")
            expect(all(to == sender for _, to in replies), "an answer to somebody else")
            expect(all(reply[3] == Kind.GONE for reply, _ in replies), "an answer to a packet with a wrong code")
        for reply, to in replies:
            self._learn(packet_format.unpack(reply), to)
        return f"answered {Kind(replies[-1][0][3]).name}" if replies else "ignored"

    def _learn(self, packet: Packet, to: Peer) -> None:
        if (to.ip, to.port) not in [sock.getsockname() for sock in getattr(self, "attackers", [])]:
            return
        if packet.kind == Kind.CHALLENGE:
            self.known.cookies[:] = [*self.known.cookies[-4:], (packet.payload[:16], packet.payload[16:])]
        elif packet.kind == Kind.ACCEPT:
            accept = Accept.unpack(packet.payload)
            name = self.registry.sessions[accept.session][0]
            self.known.own_sessions[accept.session] = packet_format.session_key(KEY, name, accept.session_nonce)


COUNTED = ("forged", "malformed", "unknown", "old", "duplicates", "results")


def received(sock: socket.socket) -> list[bytes]:
    found = []
    while True:
        try:
            found.append(sock.recv(2048))
        except (BlockingIOError, ConnectionError):
            return found


class ScriptedAggregator:
    """Stands in for the native client while a worker joins: every packet is answered by hostile ones."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.known, self.nonce, self.sent = rng, Knowledge(), bytes(16), []
        self.rounds = 0

    def send(self, datagram: bytes) -> None:
        self.nonce = datagram[32:48]

    def receive(self, seconds: float) -> list[bytes]:
        self.rounds += 1
        made = [to_worker(self.rng, self.known, self.nonce, 7, bytes(16)).datagram for _ in range(10)]
        self.sent += made
        return made

    def stopped(self) -> bool:
        return self.rounds >= 3

    def refused(self) -> bool:
        return self.rng.random() < 0.5


def attack_joining(rng: random.Random, sent: list[bytes]) -> str:
    """A worker that joins ends with a session that it can begin, or with an AggregateError."""
    aggregator, who = ScriptedAggregator(rng), aggregator_join.Membership("here:1", KEY, bytes(16), 0, 2)
    try:
        accept = aggregator_join.join(aggregator, who, 0, time.monotonic() + 5)  # type: ignore[arg-type]
    except AggregateError:
        return "a worker that joins: error"
    finally:
        sent += aggregator.sent
    expect(1 <= accept.slots <= aggregator_join.SLOTS, "a session with absurd slots")
    return "a worker that joins: accepted"


class Worker:
    """A worker in a session, whose aggregator is the attacker."""

    def __init__(self) -> None:
        self.aggregator = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.aggregator.bind(("127.0.0.1", 0))
        self.aggregator.setblocking(False)
        self.client = AggregatorClient(*self.aggregator.getsockname(), KEY)
        self.client.send(b"")
        self.to = self.aggregator.recvfrom(10)[1]
        self.session = 0

    def attack(self, rng: random.Random, sent: list[bytes]) -> str:
        """Results whose code is wrong change nothing; right ones among them are taken."""
        self.session += 1
        key, known = rng.randbytes(16), Knowledge()
        received(self.aggregator)
        self.client.begin(self.session, key, rng.randrange(64), rng.choice((1, 2, 2048)))
        words = torch.full((WORDS,), -7, dtype=torch.int32, device="cpu")
        none = torch.empty(0, dtype=torch.int32, device="cpu")
        out = words.clone()
        hostile = [to_worker(rng, known, bytes(16), self.session, key) for _ in range(10)]
        farewell = any(h.coded and h.datagram[3] == Kind.GONE for h in hostile)
        hostile = [h for h in hostile if not (h.coded and h.datagram[3] == Kind.RESULT)]
        right = rng.randbytes(4 * WORDS)
        if is_answered := rng.random() < 0.5:
            result = Packet(Kind.RESULT, self.session, 0, 0, NOBODY, 0, right).pack(key)
            hostile.insert(rng.randrange(len(hostile) + 1), Hostile(result, True))
        for one in hostile:
            sent.append(one.datagram)
            self.aggregator.sendto(one.datagram, self.to)
        outcome = self.client.run(none, words, none.clone(), out, 0.0005, 10.0)
        if is_answered and outcome == "done":
            expect(out.numpy().tobytes() == right, "a worker has taken a result that was not sent to it")
        else:
            expect(bool((out == words).all()), "a worker has taken a result with a wrong code")
            expect(outcome == "late" or (farewell and outcome == "gone"), f"a worker's operation is {outcome}")
        expect(len(self.client.silences()) <= 64, "silences of more workers than there can be")
        expect(self.client.look_for_end() == "done" or farewell, "a farewell that nobody sent")
        return f"a worker's operation: {outcome}"

    def close(self) -> None:
        self.aggregator.close()


def episode(number: int, options: argparse.Namespace, counts: Counts, sent: list[bytes]) -> None:
    """One aggregator, and a thousand packets; a tenth of them go to workers."""
    rng = random.Random(f"{options.seed} {number}")
    target, worker = Target(), Worker()
    try:
        while len(sent) < EPISODE:
            hostile = to_aggregator(rng, target.known)
            sent.append(hostile.datagram)
            counts[target.attack(hostile, rng)] += 1
            if len(sent) % HONEST_EVERY == 0:
                for job in target.jobs:
                    job.sum_once(rng)
                    counts["sums of honest jobs"] += 1
            if rng.random() < 0.005:
                counts[attack_joining(rng, sent)] += 1
            if rng.random() < 0.01:
                counts[worker.attack(rng, sent)] += 1
    finally:
        target.close()
        worker.close()


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def run(options: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    counts: Counts = collections.Counter()
    findings = packets = 0
    start = said = time.perf_counter()
    number, before = options.start, 0.0
    while packets < options.packets:
        sent: list[bytes] = []
        try:
            episode(number, options, counts, sent)
        except Exception as error:  # whatever it is, it is a finding
            findings += 1
            counts[f"FINDING: {type(error).__name__}: {error}"[:100]] += 1
            path = options.save / f"finding-{options.seed}-{number}.packets"
            path.write_text("".join(datagram.hex() + "\n" for datagram in sent))
            print(f"episode {number}: {type(error).__name__}: {error}; its {len(sent)} packets are in {path}")
        packets += len(sent)
        number += 1
        before = before or peak_mb()  # after the first one, which loads what all need
        if time.perf_counter() - said > 5 and sys.stderr.isatty():
            said = time.perf_counter()
            print(f"\r{packets:,} packets, {findings} findings", end="", file=sys.stderr)
    seconds, growth = time.perf_counter() - start, peak_mb() - before
    for what, count in counts.most_common():
        print(f"{count:10,d}  {what}")
    print(
        f"{packets:,} packets in {number - options.start:,} episodes, {findings} findings, {packets / seconds:,.0f}"
        f" packets/s, peak memory {peak_mb():.0f} MB, {growth:.0f} MB more than after the first"
    )
    if growth > options.max_growth_mb:
        print(f"FINDING: memory grew by more than {options.max_growth_mb:g} MB")
        findings += 1
    return 1 if findings else 0


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packets", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="number of the first episode")
    parser.add_argument("--save", type=Path, default=Path(), help="folder for packets of episodes with findings")
    parser.add_argument("--max-growth-mb", type=float, default=50, help="how much the peak memory may grow")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(run(parse()))
