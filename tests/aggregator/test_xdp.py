"""The XDP engine, in network namespaces: every packet here is a real one, on a real (virtual) wire."""

from __future__ import annotations

import mmap
import os
import random
import signal
import socket
import time
from collections.abc import Iterator

import numpy as np
import pytest

from gradwire.aggregator.xdp.engine import XdpEngine
from support import xdp_hosts
from support.xdp_hosts import XdpHosts
from support.xdp_jobs import HOSTS, KEY, OTHER_KEY, job, one_round, serving
from support.xdp_workers import ADD, DATA, OR, WORDS, exchange, packets, siphash

WHY_NOT = xdp_hosts.missing()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


@pytest.fixture(scope="module")
def hosts() -> Iterator[XdpHosts]:
    with XdpHosts(HOSTS) as made:
        yield made


@pytest.fixture
def engine(hosts: XdpHosts) -> Iterator[XdpEngine]:
    with serving(hosts) as made:
        yield made


def test_the_siphash_of_these_tests_is_the_published_one():
    assert siphash(KEY, np.arange(15, dtype=np.uint8)[None])[0] == 0xA129CA6149BE45E5


@pytest.mark.parametrize("count", [1, 2, 4])
def test_sums_are_exact(hosts, engine, count):
    with job(hosts, engine, on=range(count)) as workers:
        for round_ in range(5):
            sent, results = one_round(round_, 16, count, seed=round_)
            assert exchange(workers, sent, random.Random(round_)) == [results] * count
    assert engine.counters()["results"] == 5 * 16


def test_lost_duplicated_and_reordered_packets_are_harmless(hosts, engine):
    with job(hosts, engine) as workers:
        for round_ in range(10):
            sent, results = one_round(round_, 16, HOSTS, seed=round_)
            chance = random.Random(round_)
            assert exchange(workers, sent, chance, loss=0.1, twice=0.1) == [results] * HOSTS
    counted = engine.counters()
    assert counted["results"] == 160
    assert counted["resent"] > 0
    assert counted["duplicates"] > 0


def test_packets_of_all_workers_at_the_same_time(hosts, engine):
    """Two processes, on a processor each, wait for each other before every packet: both reach a slot at once."""
    slots = 1024
    with job(hosts, engine, slots=slots, on=range(2)) as workers:
        for round_ in range(2):
            sent, results = one_round(round_, slots, 2, seed=round_)
            at = np.frombuffer(mmap.mmap(-1, 64 * 2), np.int64)[::8]
            senders = [send_together(workers.sockets[own], sent[own], at, own) for own in range(2)]
            assert [os.waitpid(child, 0)[1] for child in senders] == [0, 0]
            assert [set(workers.received(worker, 0.05)) == results for worker in range(2)] == [True, True]


def send_together(end: socket.socket, own_packets: list[bytes], at: np.ndarray, own: int) -> int:
    child = os.fork()
    if child:
        return child
    processors = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {processors[own % len(processors)]})
    deadline = time.monotonic() + 20
    for number, packet in enumerate(own_packets, 1):
        at[own] = number
        while at[1 - own] < number:
            if time.monotonic() > deadline:
                os._exit(1)
        end.send(packet)
    os._exit(0)


def test_forged_packets_change_nothing(hosts, engine):
    with job(hosts, engine) as workers:
        sent, results = one_round(0, 1, HOSTS, seed=0)
        good = sent[0][0]
        forged = [flipped(good, bit) for bit in [*range(4 * 8, 18 * 8, 5), *range(24 * 8, len(good) * 8, 401)]]
        forged += packets(OTHER_KEY, DATA, 77, 0, 0, 0, ADD, np.ones((1, WORDS), np.uint32))
        forged += [good[:-1], good[:32], good[:31], good + b"\0", good + bytes(60), b"", b"GW", bytes(1376)]
        forged += [packet[:3] + bytes([DATA]) + packet[4:] for packet in results]
        before = engine.counters()
        for packet in forged:
            workers.sockets[0].send(packet)
        assert exchange(workers, sent, random.Random(0)) == [results] * HOSTS
        after = engine.counters()
        refused = sum(after[why] - before[why] for why in ("forged", "malformed", "unknown"))
        assert refused == len(forged)
        assert after["forged"] > before["forged"] + 20


def test_what_a_worker_may_not_say_is_dropped_though_its_code_is_right(hosts, engine):
    words = np.ones((1, WORDS), np.uint32)
    with job(hosts, engine, slots=4) as workers:
        before = engine.counters()["malformed"]
        wrong = [packets(KEY, DATA, 77, 0, 4, 0, ADD, words), packets(KEY, DATA, 77, 0, 0, HOSTS, ADD, words)]
        wrong += [packets(KEY, DATA, 77, 0, 0, 65535, ADD, words), packets(KEY, DATA, 77, 0, 0, 0, 2, words)]
        wrong += [packets(KEY, DATA, 77, 0, 0, 0, 1 << 40, words)]
        for (packet,) in wrong:
            workers.sockets[0].send(packet)
        assert engine.counters()["malformed"] == before + 5
        workers.sockets[0].send(packets(KEY, DATA, 77, 0, 1, 0, ADD, words)[0])
        workers.sockets[1].send(packets(KEY, DATA, 77, 0, 1, 1, OR, words)[0])  # one adds, another one ORs
        assert engine.counters()["malformed"] == before + 6


def test_old_and_replayed_packets_change_nothing(hosts, engine):
    with job(hosts, engine) as workers:
        recorded = []
        for round_ in range(5):
            sent, results = one_round(round_, 16, HOSTS, seed=round_)
            if round_ >= 2:
                workers.sockets[0].send(sent[0][0])  # the bank goes on to this round
                workers.sockets[3].send(recorded[round_ - 2][3][0])
            assert exchange(workers, sent, random.Random(0)) == [results] * HOSTS
            recorded.append(sent)
        assert engine.counters()["old"] == 3
        far = one_round(9, 16, HOSTS, seed=9)[0][0][0]
        workers.sockets[0].send(far)
        assert engine.counters()["old"] == 4
        assert workers.received(0) == []


def test_two_jobs_and_a_session_after_another(hosts, engine):
    with job(hosts, engine, 1, KEY) as first, job(hosts, engine, 2, OTHER_KEY, on=[0, 1]) as second:
        mine, my_results = one_round(0, 16, HOSTS, 1, 1, KEY)
        yours, your_results = one_round(0, 16, 2, 2, 2, OTHER_KEY)
        for packet in yours[0]:
            second.sockets[0].send(packet)
        assert exchange(first, mine, random.Random(0)) == [my_results] * HOSTS
        assert exchange(second, yours, random.Random(0)) == [your_results] * 2
        stranger = packets(OTHER_KEY, DATA, 1, 0, 0, 0, ADD, np.ones((1, WORDS), np.uint32))[0]
        second.sockets[0].send(stranger)  # the key of one job opens no other
        assert second.received(0, 0.02) == []
    with job(hosts, engine, 3, KEY) as third:  # in the slots of the first, with nothing of it left
        sent, results = one_round(0, 16, HOSTS, 3, 3, KEY)
        assert exchange(third, sent, random.Random(0)) == [results] * HOSTS


def test_several_workers_behind_one_interface(hosts, engine):
    with job(hosts, engine, on=[0, 0, 1]) as workers:
        sent, results = one_round(0, 16, 3, seed=0)
        assert exchange(workers, sent, random.Random(0)) == [results] * 3


def test_a_flood_of_garbage_leaves_sums_right(hosts, engine):
    with job(hosts, engine, on=[0, 1]) as workers:
        garbage = [os.urandom(n) for n in (1, 31, 500, 1376, 1400)] + [b"GW\1\7" + os.urandom(1372)]
        garbage += [flipped(packet, 300) for packet in one_round(0, 4, 2, seed=0)[0][0]]
        with hosts.inside(3):
            flood = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        child = os.fork()
        if not child:
            while True:
                for packet in garbage:
                    flood.sendto(packet, engine.address)
        try:
            for round_ in range(20):
                sent, results = one_round(round_, 16, 2, seed=round_)
                assert exchange(workers, sent, random.Random(round_)) == [results] * 2
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            flood.close()
        assert engine.counters()["malformed"] > 1000
        assert engine.counters()["forged"] > 1000


def flipped(packet: bytes, bit: int) -> bytes:
    changed = bytearray(packet)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)
