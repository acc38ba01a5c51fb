"""Where an aggregator listens, and where its answers come from: hosts with several addresses, IPv4 and IPv6."""

from __future__ import annotations

import socket

import pytest

from gradwire import GradwireError, SpecError
from gradwire.aggregate.sums.aggregator_client import InNetwork
from gradwire.aggregator import addresses
from gradwire.aggregator.engine import Peer, Session
from gradwire.aggregator.packet.packet_format import Kind, Packet
from gradwire.aggregator.userspace_engine import UserspaceEngine
from support.aggregation import JOB, KEY, at_once, equal, joined, serving, some_words, sums
from support.train_runs import wait_for

pytest.importorskip("gradwire._native")


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this host has no IPv6")


@pytest.mark.parametrize(
    ("bind", "reached_at"),
    [
        ("0.0.0.0", ("127.0.0.2", "127.0.0.3", "127.0.0.1")),
        pytest.param("::1", ("[::1]", "[::1]", "[::1]"), marks=needs_ipv6),
        pytest.param("::", ("[::1]", "127.0.0.2", "127.0.0.1"), marks=needs_ipv6),
    ],
)
def test_every_worker_hears_from_the_address_that_it_knows(bind: str, reached_at: tuple[str, ...]) -> None:
    """A worker's socket is connected: what comes from another address of the aggregator's host does not reach it."""
    world = len(reached_at)
    given = [[some_words(10 * step + worker, 400, 60_000) for worker in range(world)] for step in range(2)]
    with serving(bind=bind) as aggregator:

        def work(worker: int) -> list[bool]:
            with joined(f"{reached_at[worker]}:{aggregator.port}", worker, world, timeout=20) as client:
                return [equal(client.finish(client.start(*words[worker])), sums(words)) for words in given]

        assert at_once(world, work) == [[True] * 2] * world


@needs_ipv6
def test_bytes_are_those_of_ipv6_packets() -> None:
    with serving(bind="::1") as aggregator, joined(f"[::1]:{aggregator.port}", 0, 1) as client:
        before, counted = client.bytes_sent - 1424 * client.resent, aggregator.counters()
        client.finish(client.start(*some_words(0, 0, 300)))
        assert client.bytes_sent - 1424 * client.resent - before == 1424  # 1376, and 48 of IPv6 and UDP
        wait_for(lambda: aggregator.counters()["bytes_out"] - counted["bytes_out"] >= 1424)  # it sends, then counts


def test_addresses_as_users_write_them() -> None:
    assert addresses.split("10.0.0.1:9999", "--bind") == ("10.0.0.1", 9999)
    assert addresses.split("[fe80::1%eth0]:1", "--bind") == ("fe80::1%eth0", 1)
    assert addresses.in_text(("::", 9999)) == "[::]:9999"
    for text in (
        "",
        ":",
        "host",
        "host:",
        ":1",
        "[]:1",
        "host:-1",
        "host:65536",
        "host:x",
        "host:٣",
        "host:" + "9" * 5000,
    ):
        with pytest.raises(SpecError, match="HOST:PORT"):
            addresses.split(text, "--bind")
    for text in ("::1:9999", "::", "fd00::1"):
        with pytest.raises(SpecError, match=r"in brackets.*\[fd00::1\]:9999"):
            addresses.split(text, "--bind")
    assert addresses.resolve(("127.0.0.1", 5), "--bind") == ("127.0.0.1", 5)
    assert addresses.resolve(("localhost", 5), "--bind") == ("127.0.0.1", 5)  # although it may have ::1, too
    for host in ("no-such-host.invalid", "a..b", "x" * 300, "fe80::1%nowhere"):
        with pytest.raises(SpecError, match="no address of"):
            InNetwork(f"[{host}]:9", 0, 1, JOB, key=KEY)


def test_where_it_cannot_listen() -> None:
    engine = UserspaceEngine(("127.0.0.1", 0))
    with pytest.raises(GradwireError, match=rf"127\.0\.0\.1:{engine.address[1]}.*in use"):
        UserspaceEngine(engine.address)
    for ip in ("203.0.113.7", "2001:db8::7", "localhost", ""):
        with pytest.raises(GradwireError, match="cannot listen at"):
            UserspaceEngine((ip, 0))
    with pytest.raises(GradwireError, match="cannot open a session"):  # a peer that this socket cannot reach
        engine.open(Session(1, KEY, (Peer("::1", 5),), 4))
    engine.shut()


@needs_ipv6
def test_the_same_peer_by_both_versions() -> None:
    """An IPv4 peer of a socket that carries both has its plain address, and what is sent there arrives."""
    engine = UserspaceEngine(("::", 0))
    hello = Packet(Kind.HELLO, payload=bytes(64)).pack(KEY)
    for family, ip in ((socket.AF_INET, "127.0.0.2"), (socket.AF_INET6, "::1")):
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.settimeout(5)
            sock.connect((ip, engine.address[1]))
            sock.send(hello)
            [(datagram, peer)] = engine.poll(5)
            assert (datagram, peer) == (hello, Peer(*sock.getsockname()[:2], ip))
            engine.send(b"answer", peer)
            assert sock.recv(100) == b"answer"
    engine.shut()
