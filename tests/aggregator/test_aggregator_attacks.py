"""Attacks on the aggregator's sessions: what strangers may get hold of, clocks, processes that end."""

from __future__ import annotations

import atexit
import resource
import socket
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gradwire import AggregateError, GradwireError
from gradwire.aggregate.sums import aggregator_join
from gradwire.aggregate.sums.aggregator_client import InNetwork, Operation
from gradwire.aggregator.engine import Peer, Session
from gradwire.aggregator.packet.packet_format import (
    HEADER_BYTES,
    HELLO_BYTES,
    MOST_WORKERS,
    PACKET_BYTES,
    WORDS,
    Kind,
    Packet,
)
from gradwire.aggregator.registry import Registry
from gradwire.aggregator.userspace_engine import UserspaceEngine
from support.aggregation import JOB, KEY, equal, in_a_child, joined, serving, some_words
from support.lossy import Faults, LossyProxy

pytest.importorskip("gradwire._native")


def test_nobody_gets_a_farewell_for_a_session_to_come() -> None:
    """GONE bears the right code: who had it for the next session could end that one."""
    clock = time.monotonic
    registry = Registry(KEY, UserspaceEngine(("127.0.0.1", 0)), clock=lambda: 1000 * clock())
    answered = []
    for ahead in range(-3, 4):
        number = registry._last_session + ahead
        packet = Packet(Kind.DATA, number, payload=bytes(4 * WORDS)).pack(bytes(16))
        answered += [ahead for _ in registry.handle(packet, Peer("127.0.0.1", 5))]
        time.sleep(0.001)
    assert answered == [-3, -2, -1, 0]


def test_a_clock_that_is_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker joins again as the same one, not as an earlier one."""
    words = some_words(1, 10, 1000)
    with serving() as aggregator, joined(aggregator.address, 0, 1) as client:
        client.finish(client.start(*words))
        now = time.time_ns()
        monkeypatch.setattr(aggregator_join.time, "time_ns", lambda: now - 3600 * 10**9)
        registry = aggregator.server.registry
        registry._end_session(next(iter(registry.jobs.values())))
        assert equal(client.finish(client.start(*words)), words)


def test_lost_once_more_between_operations() -> None:
    """A worker between operations is there for the others, however often the session ends."""
    words = some_words(1, 10, 1000)
    with serving() as aggregator, ThreadPoolExecutor(1) as pool:
        peer = InNetwork(aggregator.address, 1, 2, JOB, 10.0, KEY)
        other = pool.submit(peer.join)
        with joined(aggregator.address, 0, 2) as client:
            other.result()
            first = peer.start(*words)
            client.finish(client.start(*words))
            peer.finish(first)
            client._joined = False  # as after a session that ended while the last operation was repeated
            registry = aggregator.server.registry
            registry._end_session(next(iter(registry.jobs.values())))
            deadline = time.monotonic() + 8
            while not client._joined and time.monotonic() < deadline:
                time.sleep(0.05)
            assert client._joined
            peer.close()


def test_no_answer_is_longer_than_what_caused_it() -> None:
    """A stranger must not be able to make the aggregator send more, to an address of its choice, than it sends.

    Nor may one who has the key, whose packets a stranger can send again.
    """
    registry = Registry(KEY, UserspaceEngine(("127.0.0.1", 0)), clock=iter(range(10**6)).__next__)
    past, answered = registry._last_session - 1, set()
    for key in (bytes(16), KEY):
        for kind in Kind:
            for length in (*range(130), 4 * WORDS):
                packet = Packet(kind, past, worker=0, payload=bytes(length)).pack(key)
                for reply, _ in registry.handle(packet, Peer("127.0.0.1", 5)):
                    assert len(reply) <= len(packet), f"{len(reply)} bytes for {len(packet)} of {kind.name}"
                    answered.add((kind, length))
    assert len(answered) > 100 and (Kind.HELLO, HELLO_BYTES) in answered


def test_packets_of_a_worker_replayed_by_a_stranger_are_no_amplifier() -> None:
    """ASK is as long as the longest answer, and the answer goes to the worker."""
    with serving() as aggregator, LossyProxy(("127.0.0.1", aggregator.port), Faults(), seed=1) as proxy:
        proxy.recorded = []
        with joined(proxy.address, 0, 1) as client:
            client._client.ask()
            deadline = time.monotonic() + 5
            while proxy.recorded[-1][3] != Kind.ASK and time.monotonic() < deadline:
                time.sleep(0.01)
            asked = proxy.recorded[-1]
            assert len(asked) == HEADER_BYTES + 2 * MOST_WORKERS
            assert client._client.look_for_end() == "done"
            registry = aggregator.server.registry
            [(reply, to)] = registry.handle(asked, Peer("127.0.0.9", 9))
            assert len(reply) <= len(asked)
            assert to.ip == "127.0.0.1"


def test_a_forked_child_does_not_leave_in_its_parents_name() -> None:
    words = some_words(1, 10, 1000)
    with serving() as aggregator, joined(aggregator.address, 0, 1) as client:
        done = client.finish(client.start(*words))
        before = list(aggregator.server.registry.sessions)

        def check() -> None:
            with pytest.raises(AggregateError, match="forked"):
                client.start(*words)
            with pytest.raises(AggregateError, match="forked"):
                client.finish(Operation(*words))
            atexit._run_exitfuncs()  # as the end of a child that was not made by multiprocessing

        assert in_a_child(check)
        assert equal(client.finish(client.start(*words)), done)
        assert list(aggregator.server.registry.sessions) == before  # a LEAVE of all workers would have ended it


def test_a_session_that_there_is_no_memory_for() -> None:
    """It is refused, and packets that bear its number are those of a stranger."""
    engine = UserspaceEngine(("127.0.0.1", 0))
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.connect(engine.address)
    sock.settimeout(5)
    peers = (Peer(*sock.getsockname()),)

    def check() -> None:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (32 << 20), resource.RLIM_INFINITY))
        with pytest.raises(GradwireError, match="cannot open a session of 65536 slots"):
            engine.open(Session(7, KEY, peers, 65536))
        stranger = Packet(Kind.DATA, 7, worker=0, payload=bytes(4 * WORDS)).pack(KEY)
        sock.send(stranger)
        assert engine.poll(5.0) == [(stranger, peers[0])]
        engine.open(Session(8, KEY, peers, 4))
        sock.send(Packet(Kind.DATA, 8, worker=0, payload=bytes(4 * WORDS)).pack(KEY))
        engine.poll(0.1)
        assert len(sock.recv(2000)) == PACKET_BYTES

    assert in_a_child(check)
    engine.shut()
    sock.close()


ENDINGS = [
    "client.start(words, words)",
    *(pytest.param(e, marks=pytest.mark.thorough) for e in ("pass", "raise SystemExit(3)")),
]


@pytest.mark.parametrize("last", ENDINGS)
def test_a_process_that_ends_without_leaving(last: str) -> None:
    """Its thread does not outlive the interpreter; the aggregator is told."""
    program = textwrap.dedent("""
        import sys, torch
        from gradwire.aggregate.sums.aggregator_client import InNetwork, Operation
        client = InNetwork(sys.argv[1], 0, 2, sys.argv[2].encode(), 20.0, bytes(range(16)))
        client.join()
        words = torch.ones(10_000, dtype=torch.int32)
        client.start(words, words)
    """)
    with serving() as aggregator, ThreadPoolExecutor(1) as pool:
        command = [sys.executable, "-c", program + last, aggregator.address, JOB.decode()]
        process = pool.submit(subprocess.run, command, capture_output=True, text=True, timeout=30, check=False)
        other = InNetwork(aggregator.address, 1, 2, JOB, 20.0, KEY)
        other.join()
        ended = process.result()
        assert (ended.returncode, ended.stderr) == (3 if "Exit" in last else 0, "")
        assert any(member.left for job in aggregator.server.registry.jobs.values() for member in job.members.values())
        other.close()
