"""Attacks on the aggregator's sessions: what strangers may get hold of, clocks, processes that end."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from gradwire.aggregate.sums import aggregator_join
from gradwire.aggregate.sums.aggregator_client import InNetwork
from gradwire.aggregator.packet.packet_format import WORDS, Kind, Packet
from gradwire.aggregator.registry import Registry
from gradwire.aggregator.userspace_engine import UserspaceEngine
from support.aggregation import JOB, KEY, equal, joined, serving, some_words

pytest.importorskip("gradwire._native")


def test_nobody_gets_a_farewell_for_a_session_to_come() -> None:
    """GONE bears the right code: who had it for the next session could end that one."""
    clock = time.monotonic
    registry = Registry(KEY, UserspaceEngine(("127.0.0.1", 0)), clock=lambda: 1000 * clock())
    answered = []
    for ahead in range(-3, 4):
        number = registry._last_session + ahead
        packet = Packet(Kind.DATA, number, payload=bytes(4 * WORDS)).pack(bytes(16))
        answered += [ahead for _ in registry.handle(packet, ("127.0.0.1", 5))]
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


ENDINGS = [
    "client.start(words, words)",
    *(pytest.param(e, marks=pytest.mark.thorough) for e in ("pass", "raise SystemExit(3)")),
]


@pytest.mark.parametrize("last", ENDINGS)
def test_a_process_that_ends_without_leaving(last: str) -> None:
    """Its thread does not outlive the interpreter; the aggregator is told."""
    program = textwrap.dedent("""
        import sys, torch
        from gradwire.aggregate.sums.aggregator_client import InNetwork
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
