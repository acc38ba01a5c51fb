"""Sums through the aggregator, over sockets: exact, for any number of workers and words, several jobs at once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from gradwire import AggregateError, GradwireError, SpecError
from gradwire.aggregate.sums import aggregator_join
from gradwire.aggregate.sums.aggregator_client import InNetwork
from gradwire.aggregator import keys
from gradwire.aggregator.jobs import Limits
from gradwire.aggregator.packet import siphash
from gradwire.aggregator.packet.packet_format import WORDS, Kind, Packet
from support.aggregation import JOB, KEY, at_once, equal, joined, serving, some_words, sums

native = pytest.importorskip("gradwire._native")

# The paper's appendix: key 00 01 … 0f, message 00 01 … 0e; and the first lines of the authors' vectors.h.
SIPHASH = {15: 0xA129CA6149BE45E5, 0: 0x726FDB47DD0E0E31, 1: 0x74F839C593DC67FD, 8: 0x93F5F5799A932462}


@pytest.mark.parametrize(("length", "expected"), SIPHASH.items())
def test_siphash_is_that_of_the_paper(length: int, expected: int) -> None:
    message = bytes(range(length))
    assert siphash.plain_siphash(KEY, message) == expected
    assert native.siphash(KEY, message) == expected


@pytest.mark.parametrize("kernels", native.available())
def test_codes_of_many_packets_are_those_of_each(kernels: str) -> None:
    native.use(kernels)
    try:
        for count in (1, 2, 3, 7, 8, 9, 16, 31):
            made = [Packet(Kind.DATA, 7, slot=i, worker=i, payload=os.urandom(4 * WORDS)) for i in range(count)]
            of_each = [os.urandom(16) for _ in range(count)]
            data = [packet.pack(key) for packet, key in zip(made, of_each, strict=True)]
            expected = [siphash.plain_siphash(key, p[:24] + p[32:]) for key, p in zip(of_each, data, strict=True)]
            assert native.packet_codes(of_each, data) == expected
    finally:
        native.use(native.available()[-1])


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_sums_are_exact(world: int) -> None:
    cases = [(0, 0), (0, 1), (1, 0), (WORDS, WORDS), (WORDS + 1, 3 * WORDS - 1), (5, 90 * WORDS), (1000, 100_000)]
    given = [[some_words(100 * case + worker, *sizes) for worker in range(world)] for case, sizes in enumerate(cases)]
    with serving() as aggregator:

        def work(worker: int) -> tuple[list, int]:
            with joined(aggregator.address, worker, world) as client:
                tickets = [client.start(*words[worker]) for words in given]
                results = [client.finish(ticket) for ticket in tickets]
                assert all(client.ready(ticket) for ticket in tickets)
                return results, client.operations

        for results, operations in at_once(world, work):
            assert operations == len(cases) - 1  # one has no words
            for result, words in zip(results, given, strict=True):
                assert equal(result, sums(words))
        assert aggregator.counters()["forged"] == aggregator.counters()["malformed"] == 0


def test_jobs_do_not_meet() -> None:
    with serving() as aggregator:

        def work(number: int) -> bool:
            job, worker = divmod(number, 2)
            right = True
            with joined(aggregator.address, worker, 2, job.to_bytes(16, "big")) as client:
                for step in range(20):
                    given = [some_words(1000 * job + 10 * step + peer, 50, 5000) for peer in range(2)]
                    right &= equal(client.finish(client.start(*given[worker])), sums(given))
            return right

        assert all(at_once(8, work))
        deadline = time.monotonic() + 5
        while aggregator.server.jobs() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert aggregator.server.jobs() == []  # all have left


def test_more_rounds_than_banks_with_few_slots() -> None:
    with serving(limits=Limits(slots=4)) as aggregator:

        def work(worker: int) -> bool:
            with joined(aggregator.address, worker, 3) as client:
                given = [some_words(peer, 30, 200 * WORDS + 7) for peer in range(3)]
                return all(equal(client.finish(client.start(*given[worker])), sums(given)) for _ in range(3))

        assert all(at_once(3, work))


def test_bytes_are_those_of_ip_packets() -> None:
    with serving() as aggregator, joined(aggregator.address, 0, 1) as client:
        before = client.bytes_sent, client.bytes_received, client.resent
        client.finish(client.start(*some_words(0, 1, 10 * WORDS)))
        again = client.resent - before[2]
        assert client.bytes_sent - before[0] == (11 + again) * 1404
        assert client.bytes_received - before[1] >= 11 * 1404


def test_what_cannot_join() -> None:
    with serving(limits=Limits(jobs=1)) as aggregator:

        def refusal(worker: int, world: int, job: bytes = JOB) -> str:
            with pytest.raises(AggregateError) as caught, joined(aggregator.address, worker, world, job, timeout=0.5):
                pass
            return str(caught.value)

        assert "65 workers: it takes 1 to 64" in refusal(0, 65)
        assert "have not joined" in refusal(0, 3) and refusal(0, 3).endswith(": 1, 2")
        assert "this job has 3 workers, not 2" in refusal(1, 2)
        assert "full: it takes 1 jobs" in refusal(0, 1, b"another job, too")
        with pytest.raises(AggregateError, match="GRADWIRE_KEY must be the same"):
            InNetwork(aggregator.address, 0, 1, JOB, 0.3, key=bytes(16)).join()
    with pytest.raises(AggregateError, match="nothing listens at"):
        InNetwork(aggregator.address, 0, 1, JOB, 0.3, key=KEY).join()


def test_memory_is_limited_and_given_back() -> None:
    with serving(limits=Limits(memory=2816 * 2048)) as aggregator:
        second = InNetwork(aggregator.address, 0, 1, b"the second a job", 5, KEY)
        with joined(aggregator.address, 0, 1), pytest.raises(AggregateError, match="full: other jobs have all its"):
            second.join()
        time.sleep(0.2)
        with joined(aggregator.address, 0, 1, b"the second a job"):
            pass


def test_idle_jobs_are_forgotten() -> None:
    with serving(limits=Limits(idle=0.5, joining=0.5)) as aggregator:
        for world in (1, 2):  # one that begins, one that waits for a worker; neither is heard of again
            who = aggregator_join.Membership(aggregator.address, KEY, bytes([world]) * 16, 0, world)
            client = native.AggregatorClient("127.0.0.1", aggregator.port, KEY)
            try:
                aggregator_join.join(client, who, 0, time.monotonic() + 0.3)
            except AggregateError:
                assert world == 2
        assert sorted(job.world for job in aggregator.server.jobs()) == [1, 2]
        time.sleep(2.5)
        assert aggregator.server.jobs() == []


def test_bad_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(keys.VARIABLE, raising=False)
    for address in ("nowhere", "host:", ":1", "127.0.0.1:0", "127.0.0.1:65536", "127.0.0.1:x"):
        with pytest.raises(SpecError, match="HOST:PORT"):
            InNetwork(address, 0, 1, JOB, key=KEY)
    with pytest.raises(SpecError, match="export GRADWIRE_KEY"):
        InNetwork("127.0.0.1:9", 0, 1, JOB)
    monkeypatch.setenv(keys.VARIABLE, "zz")
    with pytest.raises(SpecError, match="32 hexadecimal digits"):
        InNetwork("127.0.0.1:9", 0, 1, JOB)
    with serving() as aggregator, joined(aggregator.address, 0, 1) as client:
        for words in (torch.zeros(3), torch.zeros(2, 2, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)[::2]):
            with pytest.raises(GradwireError, match="int32"):
                client.start(words, words)


def test_command(tmp_path) -> None:
    """Started as users do; killed as users do."""
    figures = tmp_path / "figures.json"
    command = [sys.executable, "-m", "gradwire.cli", "aggregator", "--bind", "127.0.0.1:0", "--json", str(figures)]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    environment.pop(keys.VARIABLE, None)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    address = process.stdout.readline().split()[-1]
    key = keys.read_key(process.stdout.readline().split("=")[1], "what it printed")
    client = InNetwork(address, 0, 1, JOB, 10, key)
    client.join()
    words = some_words(1, 10, 1000)
    assert equal(client.finish(client.start(*words)), words)
    client.close()
    process.send_signal(signal.SIGTERM)
    assert "sums complete" in process.communicate(timeout=20)[0]
    assert process.returncode == 0
    assert json.loads(figures.read_text())["results"] == 4
