"""The XDP engine and its surroundings: interfaces, other traffic, the control plane, errors."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from gradwire import AggregateError, GradwireError
from gradwire.aggregate.sums.aggregator_client import InNetwork
from gradwire.aggregator.engine import Peer, Session
from gradwire.aggregator.server import Server
from gradwire.aggregator.xdp import libbpf
from gradwire.aggregator.xdp.engine import XdpEngine
from support import xdp_hosts
from support.aggregation import JOB, at_once, equal, some_words, sums
from support.xdp_hosts import SWITCH, XdpHosts, run
from support.xdp_jobs import HOSTS, KEY, job, one_round, serving
from support.xdp_workers import ADD, DATA, WORDS, exchange, packets

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


@pytest.mark.thorough
def test_the_program_with_real_workers(hosts, tmp_path):
    """`gradwire aggregator --engine xdp` in one namespace, workers of `homomorphic` in others."""
    report = tmp_path / "figures.json"
    command = [sys.executable, "-m", "gradwire.cli", "aggregator", "--engine", "xdp", "--json", str(report)]
    command += ["--bind", f"{hosts.address}:9999", *(part for port in hosts.ports for part in ("--interface", port))]
    with hosts.inside(SWITCH):
        environment = {**os.environ, "GRADWIRE_KEY": KEY.hex()}
        program = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    given = [[some_words(10 * operation + worker, 700, 30_000) for worker in range(HOSTS)] for operation in range(5)]

    def work(worker: int) -> list[bool]:
        with hosts.inside(worker):
            client = InNetwork(f"{hosts.address}:9999", worker, HOSTS, JOB, 30, KEY)
        client.join()
        try:
            return [equal(client.finish(client.start(*words[worker])), sums(words)) for words in given]
        finally:
            client.close()

    with program:
        try:
            assert f"(xdp) at {hosts.address}:9999" in program.stdout.readline()
            assert at_once(HOSTS, work) == [[True] * 5] * HOSTS
        finally:
            program.terminate()
        program.communicate()
    assert program.returncode == 0
    figures = json.loads(report.read_text())
    assert figures["engine"] == "xdp"
    assert figures["results"] == 5 * (3 + 90)  # packets of 336 words


def test_a_job_that_cannot_be_served_is_refused_and_others_go_on(hosts):
    with hosts.inside(SWITCH):
        server = Server(XdpEngine((hosts.address, 0), hosts.ports[1:]), KEY)
    address = f"{hosts.address}:{server.engine.address[1]}"
    over = threading.Event()
    with hosts.inside(SWITCH):
        serve = threading.Thread(target=server.serve, args=(lambda: not over.is_set(),))
        serve.start()

    def work(host: int, job_name: bytes) -> bool:
        with hosts.inside(host):
            client = InNetwork(address, 0, 1, job_name, 5, KEY)
        try:
            client.join()
            words = some_words(0, 10, 10)
            return equal(client.finish(client.start(*words)), words)
        finally:
            client.close()

    try:
        with pytest.warns(UserWarning, match=r"refused: worker 10\.88\.0\.1 .* --interface port0"):
            with pytest.raises(AggregateError, match=r"refuses: worker 10\.88\.0\.1 is reached by port0"):
                work(0, JOB)
            assert work(1, b"another job here")
    finally:
        over.set()
        serve.join()
        server.shut()


@pytest.mark.parametrize("failing", ["descriptors", "memory"])
def test_a_session_that_the_kernel_has_no_room_for_is_refused(hosts, engine, failing, monkeypatch):
    """The aggregator goes on, and serves the next job."""
    with job(hosts, engine, on=[0, 1]) as workers, hosts.inside(SWITCH):
        one_more = Session(78, KEY, workers.addresses, 16)
        if failing == "descriptors":
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 6, hard))
            held = []
            with contextlib.suppress(OSError):
                while True:
                    held.append(os.dup(0))
            try:
                with pytest.raises(GradwireError, match=r"cannot open a session: .*Too many open files"):
                    engine.open(one_more)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
                for descriptor in held:
                    os.close(descriptor)
        else:
            with monkeypatch.context() as patched:
                patched.setattr(libbpf.BpfMap, "set", lambda *_: (_ for _ in ()).throw(MemoryError))
                with pytest.raises(GradwireError, match="cannot open a session: no memory"):
                    engine.open(one_more)
        engine.open(one_more)
        engine.close(78)
        sent, results = one_round(0, 16, 2, seed=0)
        assert exchange(workers, sent, random.Random(0)) == [results] * 2


def test_ipv6_is_refused(hosts):
    with hosts.inside(SWITCH), pytest.raises(GradwireError, match=r"IPv4 alone, not ::1.*--engine userspace"):
        XdpEngine(("::1", 0), hosts.ports)


def test_everything_else_passes(hosts, engine):
    """Control packets, those of unknown sessions (few of a flood), other ports, TCP to the switch and to others."""
    with job(hosts, engine, on=[0, 1]) as workers:
        lost = packets(KEY, DATA, 5, 0, 0, 0, ADD, np.ones((1, WORDS), np.uint32))[0]
        for _ in range(200):
            workers.sockets[0].send(lost)
        told = engine.poll(0.1)
        assert set(told) == {(lost, workers.addresses[0])}
        assert len(told) < 100
        assert engine.counters()["unknown"] == 200
        for where, ip in ((SWITCH, hosts.address), (1, "10.88.0.2")):
            assert echo(hosts, where, ip) == b"x" * 300_000
        before = engine.silences(77)
        assert len(before) == 2
        workers.sockets[1].send(packets(KEY, DATA, 77, 0, 0, 1, ADD, np.ones((1, WORDS), np.uint32))[0])
        assert engine.silences(77)[1] < before[1] < 5
        assert engine.silences(77)[0] > before[0]


def echo(hosts: XdpHosts, where: object, ip: str) -> bytes:
    """What a TCP server there received from worker 0."""
    with hosts.inside(where):
        server = socket.create_server((ip, 0))
    with hosts.inside(0):
        client = socket.create_connection(server.getsockname(), timeout=2)
    with server, client, server.accept()[0] as peer:
        sender = threading.Thread(target=lambda: (client.sendall(b"x" * 300_000), client.shutdown(socket.SHUT_WR)))
        sender.start()
        received = b"".join(iter(lambda: peer.recv(65536), b""))
        sender.join()
    return received


def test_generic_mode_where_an_interface_has_no_native_one(hosts):
    """A bridge itself."""
    with pytest.warns(UserWarning, match=r"br0.* natively: using generic XDP"), serving(hosts, ["br0"]) as engine:
        assert links(hosts).count("xdpgeneric") == 1
        with job(hosts, engine) as workers:
            sent, results = one_round(0, 16, HOSTS, seed=0)
            assert exchange(workers, sent, random.Random(0), loss=0.1) == [results] * HOSTS


def test_an_mtu_that_is_too_large(hosts):
    ends = ((hosts.name(2), "eth0"), (hosts.name(SWITCH), "port2"))
    for namespace, device in ends:
        run("ip", "-n", namespace, "link", "set", device, "mtu", "9000")
    try:
        with pytest.raises(GradwireError, match=r"port2.* mtu 1500"), serving(hosts):
            pass
        assert "prog/xdp" not in links(hosts)
    finally:
        for namespace, device in ends:
            run("ip", "-n", namespace, "link", "set", device, "mtu", "1500")


def test_a_worker_that_would_not_get_results_is_found_at_the_start(hosts):
    with hosts.inside(2):
        xdp_hosts.receive_in_batches("eth0", False)
    try:
        with pytest.raises(GradwireError, match=r"^port2: .*ethtool.*gro on"), serving(hosts):
            pass
        assert "prog/xdp" not in links(hosts)
    finally:
        with hosts.inside(2):
            xdp_hosts.receive_in_batches("eth0")


def test_nothing_stays_attached(hosts):
    with serving(hosts) as engine, pytest.raises(GradwireError, match=r"has an XDP program already.*xdp off"):
        assert links(hosts).count("prog/xdp") == HOSTS
        with hosts.inside(SWITCH):
            XdpEngine((hosts.address, 0), hosts.ports)
    assert engine.address[1] > 0
    assert "prog/xdp" not in links(hosts)
    ready, told = os.pipe()
    with hosts.inside(SWITCH):
        child = os.fork()
        if not child:
            engine = XdpEngine((hosts.address, 0), hosts.ports)
            os.write(told, b"1")
            signal.pause()
    try:
        os.close(told)
        assert os.read(ready, 1) == b"1"
        assert links(hosts).count("prog/xdp") == HOSTS
    finally:
        os.close(ready)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    for _ in range(100):
        if "prog/xdp" not in links(hosts):
            return
        time.sleep(0.02)
    raise AssertionError("a killed aggregator is still attached")


def links(hosts: XdpHosts) -> str:
    return run("ip", "-n", hosts.name(SWITCH), "link", "show")


def test_errors_name_the_fix(hosts, engine, monkeypatch):
    with hosts.inside(SWITCH):
        with pytest.raises(GradwireError, match=r"no interface 'eth9' here \(there are: .*port0"):
            XdpEngine((hosts.address, 0), ["eth9"])
        with pytest.raises(GradwireError, match="--interface"):
            XdpEngine((hosts.address, 0), [])
        with pytest.raises(GradwireError, match=r"not 0\.0\.0\.0: --bind"):
            XdpEngine(("0.0.0.0", 0), ["port0"])
        with pytest.raises(GradwireError, match="cannot listen"):
            XdpEngine(engine.address, ["port0"])
        with pytest.raises(GradwireError, match=r"worker 10\.88\.0\.99.*--engine userspace"):
            engine.open(Session(1, KEY, (Peer("10.88.0.99", 1),), 16))
        with pytest.raises(GradwireError, match="2048 a job"):
            engine.open(Session(1, KEY, (Peer("10.88.0.1", 1),), 2049))
        with pytest.raises(GradwireError, match="65 workers"):
            engine.open(Session(1, KEY, (Peer("10.88.0.1", 1),) * 65, 16))
    engine.shut()
    with hosts.inside(SWITCH):
        narrow = XdpEngine((hosts.address, 0), hosts.ports[1:])
        with pytest.raises(GradwireError, match="--interface port0"):
            narrow.open(Session(1, KEY, (Peer("10.88.0.1", 1),), 16))
        narrow.shut()
        monkeypatch.setenv("PATH", "/nonexistent")
        with pytest.raises(GradwireError, match="which was not found: install it"):
            XdpEngine((hosts.address, 0), ["port0"])


def test_slots_are_given_out_as_long_as_there_are_any(hosts, engine):
    with ExitStack() as jobs:
        for number in range(7):
            jobs.enter_context(job(hosts, engine, number, slots=2048, on=[0]))
        jobs.enter_context(job(hosts, engine, 7, slots=2000, on=[0]))
        assert engine.most_slots == 48
        with pytest.raises(GradwireError, match="no room for 49 slots"), job(hosts, engine, 8, slots=49, on=[0]):
            pass
        with job(hosts, engine, 9, slots=48, on=[0, 1]) as last:
            assert engine.most_slots == 0
            sent, results = one_round(0, 48, 2, 1, 9)
            assert exchange(last, sent, random.Random(0)) == [results] * 2
    assert engine.most_slots == 2048


def test_without_permission(hosts):
    ends = os.pipe()
    child = os.fork()
    if not child:
        os.setuid(65534)
        try:
            XdpEngine((hosts.address, 0), hosts.ports)
        except GradwireError as error:
            os.write(ends[1], str(error).encode())
        finally:
            os._exit(0)
    os.close(ends[1])
    with open(ends[0]) as said:
        assert "CAP_BPF" in said.read()
    os.waitpid(child, 0)


def test_a_cache_that_cannot_be_used(hosts, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "gradwire").write_text("a file")
    with hosts.inside(SWITCH), pytest.raises(GradwireError, match="set XDG_CACHE_HOME"):
        XdpEngine((hosts.address, 0), hosts.ports)
    (tmp_path / "gradwire").unlink()
    (tmp_path / "gradwire" / "xdp").mkdir(parents=True)
    (tmp_path / "gradwire" / "xdp").chmod(0o777)
    with hosts.inside(SWITCH), pytest.raises(GradwireError, match="others can write there"):
        XdpEngine((hosts.address, 0), hosts.ports)
