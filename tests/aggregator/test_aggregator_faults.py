"""The aggregator on a bad day: lost, repeated, late and forged packets; workers and aggregators that die."""

from __future__ import annotations

import os
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

from gradwire import AggregateError
from gradwire.aggregate.sums import aggregator_join
from gradwire.aggregate.sums.aggregator_client import InNetwork
from gradwire.aggregator.engine import Peer, Session
from gradwire.aggregator.packet import packet_format, siphash
from gradwire.aggregator.packet.packet_format import NOBODY, PACKET_BYTES, WORDS, Kind, Packet
from gradwire.aggregator.registry import Registry
from gradwire.aggregator.userspace_engine import UserspaceEngine
from support.aggregation import JOB, KEY, Serving, at_once, equal, joined, serving, some_words, sums
from support.lossy import Faults, LossyProxy

native = pytest.importorskip("gradwire._native")
SESSION_KEY = bytes(range(16, 32))


class Bench:
    """An engine with one session of two slots, and a socket for each of its two workers."""

    def __init__(self) -> None:
        self.engine = UserspaceEngine(("127.0.0.1", 0))
        self.sockets = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2)]
        for sock in self.sockets:
            sock.bind(("127.0.0.1", 0))
            sock.settimeout(0)
        self.engine.open(Session(5, SESSION_KEY, tuple(Peer(*sock.getsockname()) for sock in self.sockets), 2))

    def send(self, datagram: bytes, sender: int = 0) -> list[tuple[bytes, Peer]]:
        """What the engine hands on."""
        self.sockets[sender].sendto(datagram, self.engine.address)
        return self.engine.poll(0.2) if len(datagram) < PACKET_BYTES else self.engine.poll(0.0)

    def received(self, worker: int) -> list[Packet]:
        found = []
        while True:
            try:
                packet = packet_format.unpack(self.sockets[worker].recv(2000))
            except BlockingIOError:
                return found
            assert packet.has_code_of(SESSION_KEY) and packet.kind == Kind.RESULT and packet.worker == NOBODY
            found.append(packet)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.engine.shut()
    for sock in made.sockets:
        sock.close()


def data(worker: int, round_: int, value: int, slot: int = 0, adding: int = 0, key: bytes = SESSION_KEY) -> bytes:
    payload = struct.pack("<I", value & 0xFFFFFFFF) * WORDS
    return Packet(Kind.DATA, 5, round_, slot, worker, adding, payload).pack(key)


def values(found: list[Packet]) -> list[tuple[int, int]]:
    """Round and word of each result; all words are the same."""
    assert all(packet.payload == packet.payload[:4] * WORDS for packet in found)
    return [(packet.round, struct.unpack("<i", packet.payload[:4])[0]) for packet in found]


def test_a_slot_by_the_book(bench: Bench) -> None:
    bench.send(data(0, 0, 3))
    bench.send(data(0, 0, 3))  # again: nothing is added, and there is no result yet
    assert bench.received(0) == []
    bench.send(data(1, 0, -5), 1)
    assert values(bench.received(0)) == values(bench.received(1)) == [(0, -2)]
    bench.send(data(0, 1, 1)), bench.send(data(1, 1, 1), 1)
    assert values(bench.received(0)) == values(bench.received(1)) == [(1, 2)]
    bench.send(data(1, 0, -5), 1)  # lost the result of round 0: the bank still has it
    assert values(bench.received(1)) == [(0, -2)]
    assert bench.received(0) == []
    bench.send(data(0, 2, 40)), bench.send(data(1, 0, -5), 1)  # round 2 has begun: 0 is old
    assert bench.received(0) == bench.received(1) == []
    bench.send(data(1, 2, 2), 1)
    assert values(bench.received(0)) == [(2, 42)]
    counters = bench.engine.counters()
    assert (counters["results"], counters["duplicates"], counters["old"], counters["resent"]) == (3, 2, 1, 1)


def test_or_and_add_do_not_mix(bench: Bench) -> None:
    bench.send(data(0, 0, 5, adding=1)), bench.send(data(1, 0, 9, adding=0), 1)
    assert bench.received(0) == []
    bench.send(data(1, 0, 9, adding=1), 1)
    assert values(bench.received(0)) == [(0, 13)]


def test_nothing_forged_is_added(bench: Bench) -> None:
    right = data(1, 0, 7)
    bad = [right[:i] + bytes([right[i] ^ 1]) + right[i + 1 :] for i in (*range(32), 32, 700, PACKET_BYTES - 1)]
    bad += [data(1, 0, 7, key=os.urandom(16)), data(1, 0, 7, slot=2), data(2, 0, 7), data(1, 0, 7, adding=2)]
    bad += [right[:-1], right[:-4], right + b"\0", right[:32], right[:31], b"", right * 2, right + right[:40]]
    bad += [data(1, 4, 7), data(1, 0xFFFFFFFF, 7), data(NOBODY, 0, 7), data(1, 0, 7, slot=65535)]
    bad += [Packet(Kind.RESULT, 5, 0, 0, 1, 0, right[32:]).pack(SESSION_KEY)]
    bad += [Packet(Kind.DATA, 6, 0, 0, 1, 0, right[32:]).pack(SESSION_KEY)]  # another session
    bench.send(data(0, 0, 1))
    for datagram in bad:
        bench.send(datagram, 1)
    assert bench.received(0) == bench.received(1) == []
    bench.send(right, 1)
    assert values(bench.received(0)) == [(0, 8)]


def test_replay_of_a_whole_round_changes_nothing(bench: Bench) -> None:
    sent = [data(worker, round_, 1 + worker, slot) for round_ in range(4) for slot in range(2) for worker in range(2)]
    for datagram in sent:
        bench.send(datagram)
    for _ in range(2):
        bench.received(0), bench.received(1)
        for datagram in sent:  # everything once more: at most results of the banks are sent again
            bench.send(datagram)
        assert all(found == (found[0], 3) and found[0] >= 2 for found in values(bench.received(0)))
    bench.send(data(0, 4, 10)), bench.send(data(1, 4, 20))
    assert values(bench.received(0)) == [(4, 30)]


def test_control_is_bounded(bench: Bench) -> None:
    """What one poll hands on has a limit; a flood does not grow memory."""
    hello = Packet(Kind.HELLO, worker=0, payload=bytes(64)).pack(KEY)
    stranger = Packet(Kind.DATA, 77, worker=0, payload=bytes(4 * WORDS)).pack(KEY)
    for _ in range(600):
        bench.sockets[0].sendto(hello, bench.engine.address)
        bench.sockets[0].sendto(stranger, bench.engine.address)
    handed_on = [len(bench.engine.poll(0.0)) for _ in range(200)]
    assert 0 < max(handed_on) <= 256
    assert bench.engine.counters()["unknown"] == 600


def test_the_registry_survives_noise() -> None:
    engine = UserspaceEngine(("127.0.0.1", 0))
    registry = Registry(KEY, engine)
    generator = random.Random(0)
    for _ in range(3000):
        kind, payload = generator.randrange(16), generator.randbytes(generator.choice((0, 8, 24, 48, 63, 64, 65)))
        head = struct.pack("<2sBBIIHHB7x", b"GW", 1, kind, generator.choice((0, 1)), 0, 0, generator.randrange(70), 0)
        coded = siphash.code(generator.choice((KEY, SESSION_KEY)), head + payload).to_bytes(8, "little")
        registry.handle(head + coded + payload, Peer("127.0.0.1", generator.randrange(65536)))
        registry.handle(generator.randbytes(generator.randrange(100)), Peer("127.0.0.1", 1))
    assert registry.jobs == {}
    engine.shut()


@pytest.mark.parametrize("faults", [Faults(0.05, 0.05, 0.05), Faults(loss=0.2)])
def test_sums_over_a_bad_network(faults: Faults) -> None:
    with serving() as aggregator, LossyProxy(("127.0.0.1", aggregator.port), faults, seed=1) as proxy:

        def work(worker: int) -> bool:
            right = True
            with joined(proxy.address, worker, 3, timeout=30) as client:
                for step in range(12):
                    given = [some_words(10 * step + peer, 100 * step, 30 * WORDS) for peer in range(3)]
                    right &= equal(client.finish(client.start(*given[worker])), sums(given))
            return right

        assert all(at_once(3, work))
        assert proxy.lost > 50


def test_packets_of_an_operation_replayed_later_change_nothing() -> None:
    with serving() as aggregator, LossyProxy(("127.0.0.1", aggregator.port), Faults(), seed=1) as proxy:
        proxy.recorded = []
        stranger = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        replayed = threading.Event()

        def work(worker: int) -> bool:
            right = True
            with joined(proxy.address, worker, 2) as client:
                for step in range(8):
                    given = [some_words(10 * step + peer, 10, 20 * WORDS) for peer in range(2)]
                    ticket = client.start(*given[worker])
                    if worker == 0 and proxy.recorded:
                        for datagram in list(proxy.recorded)[-400:]:
                            stranger.sendto(datagram, ("127.0.0.1", aggregator.port))
                        replayed.set()
                    right &= equal(client.finish(ticket), sums(given))
            return right

        assert all(at_once(2, work)) and replayed.is_set()
        stranger.close()


def test_an_aggregator_restarted_in_mid_operation() -> None:
    first = Serving()
    restarted: list[Serving] = []

    def work(worker: int) -> tuple[bool, int]:
        right = True
        with joined(first.address, worker, 3, timeout=30) as client:
            for step in range(60):
                given = [some_words(10 * step + peer, 1000, 100 * WORDS) for peer in range(3)]
                right &= equal(client.finish(client.start(*given[worker])), sums(given))
                if worker == 0 and step in (10, 30):
                    restarts.append(thread.submit(restart))  # the others are somewhere in this step or the next
            return right, client.operations

    def restart() -> None:
        (restarted or [first])[-1].stop()
        restarted.append(Serving(first.port))

    restarts: list[Future[None]] = []
    try:
        with ThreadPoolExecutor(1) as thread:  # one after the other: the second may be due before the first is over
            assert at_once(3, work) == [(True, 60)] * 3
        for done in restarts:
            done.result()
        assert len(restarted) == 2
    finally:
        for aggregator in (first, *restarted):
            aggregator.stop()


def test_an_idle_worker_catches_up_for_one_that_lost_the_aggregator() -> None:
    with serving() as aggregator:
        given = [some_words(worker, 100, 5000) for worker in range(2)]
        other = native.AggregatorClient("127.0.0.1", aggregator.port, KEY)
        who = aggregator_join.Membership(aggregator.address, KEY, JOB, 1, 2)

        def run_as_the_other() -> bool:
            accept = aggregator_join.join(other, who, 0, time.monotonic() + 10)
            assert accept.first_operation == 0
            other.begin(accept.session, packet_format.session_key(KEY, JOB, accept.session_nonce), 1, accept.slots)
            results = torch.empty_like(given[1][0]), torch.empty_like(given[1][1])
            return other.run(*given[1], *results, 10.0, 5.0) == "done" and equal(results, sums(given))

        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(run_as_the_other)
            with joined(aggregator.address, 0, 2) as client:
                assert equal(client.finish(client.start(*given[0])), sums(given))
                assert first.result()
                # As if the other had not got the last result; this one has nothing to do, and takes part all the same.
                assert pool.submit(run_as_the_other).result()
                assert client.operations == 1


def test_a_worker_that_dies_is_named_and_one_that_comes_back_is_explained() -> None:
    with serving() as aggregator:
        clients = [InNetwork(aggregator.address, worker, 3, JOB, 1.5, KEY) for worker in range(3)]
        at_once(3, lambda worker: clients[worker].join())
        words = some_words(0, 5, 5000)
        for _ in range(3):
            at_once(3, lambda worker: clients[worker].finish(clients[worker].start(*words)))
        start = time.monotonic()

        def fails(worker: int) -> str:
            with pytest.raises(AggregateError) as caught:
                clients[worker].finish(clients[worker].start(*words))
            return str(caught.value)

        for message in at_once(2, fails):  # worker 2 does not come
            assert "worker 2, last heard" in message and "worker 1," not in message
        assert 1 < time.monotonic() - start < 4
        done, under_way = clients[0].last()
        assert done is not None and under_way is not None and torch.equal(under_way.add_words, words[1])
        assert "worker 2, last heard" in fails(0)  # and stays so

        # All join again, but a new process has taken worker 2's place and knows nothing of operations.
        for client in clients:
            client.close()
        again = [InNetwork(aggregator.address, worker, 3, JOB, 5, KEY) for worker in range(3)]
        again[0].operations = again[1].operations = 3

        def refused(worker: int) -> str:
            with pytest.raises(AggregateError) as caught:
                again[worker].join()
            return str(caught.value)

        assert all("worker 2 has done 0, worker 0 3" in message for message in at_once(3, refused))


def test_a_worker_restarted_in_mid_operation_fails_all_clearly() -> None:
    with serving() as aggregator:
        clients = [InNetwork(aggregator.address, worker, 2, JOB, 10, KEY) for worker in range(2)]
        at_once(2, lambda worker: clients[worker].join())
        words = some_words(0, 5, 5000)
        for _ in range(3):
            at_once(2, lambda worker: clients[worker].finish(clients[worker].start(*words)))
        with ThreadPoolExecutor(2) as pool:
            waiting = pool.submit(clients[0].finish, clients[0].start(*words))
            fresh = InNetwork(aggregator.address, 1, 2, JOB, 10, KEY)
            coming = pool.submit(fresh.join)
            for future in (waiting, coming):
                with pytest.raises(AggregateError, match="worker 1 has done 0, worker 0 3"):
                    future.result(timeout=10)
        for client in clients:
            client.close()


def test_a_worker_that_has_left_is_named() -> None:
    with serving() as aggregator:
        clients = [InNetwork(aggregator.address, worker, 2, JOB, 10, KEY) for worker in range(2)]
        at_once(2, lambda worker: clients[worker].join())
        clients[1].close()
        with pytest.raises(AggregateError, match="worker 1 has left"):
            clients[0].finish(clients[0].start(*some_words(0, 5, 5000)))
        clients[0].close()


def test_an_aggregator_that_does_not_come_back() -> None:
    aggregator = Serving()
    with joined(aggregator.address, 0, 1, timeout=2) as client:
        client.finish(client.start(*some_words(0, 5, 5000)))
        aggregator.stop()
        start = time.monotonic()
        with pytest.raises(AggregateError, match="nothing listens at"):
            client.finish(client.start(*some_words(0, 5, 5000)))
        assert time.monotonic() - start < 4


def test_a_late_worker_is_waited_for_without_a_flood() -> None:
    with serving() as aggregator:

        def work(worker: int) -> int:
            with joined(aggregator.address, worker, 2) as client:
                time.sleep(1.5 * worker)
                client.finish(client.start(*some_words(worker, 5, 50_000)))
                return client.resent

        assert max(at_once(2, work)) < 100


def test_a_stranger_gets_nothing() -> None:
    """Another key: no CHALLENGE, no ACCEPT, and results go to the workers alone."""
    with serving() as aggregator:
        stranger = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        stranger.settimeout(0.3)
        for kind in Kind:
            for payload in (bytes(64), b"", bytes(4 * WORDS)):
                datagram = Packet(kind, 0, worker=0, payload=payload).pack(SESSION_KEY)
                stranger.sendto(datagram, ("127.0.0.1", aggregator.port))
        answers = []
        while True:
            try:
                answers.append(packet_format.unpack(stranger.recv(2000)).kind)
            except TimeoutError:
                break
        assert set(answers) <= {Kind.GONE}  # and that tells only that there is no such session
        stranger.close()
