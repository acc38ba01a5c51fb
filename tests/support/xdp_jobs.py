"""An XDP engine on the switch of `XdpHosts`, jobs of plain workers, and what they send."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from gradwire.aggregator.engine import Session
from gradwire.aggregator.xdp.engine import XdpEngine
from support.xdp_hosts import SWITCH, XdpHosts
from support.xdp_workers import DATA, RESULT, WORDS, Workers, hello, packets

KEY, OTHER_KEY = bytes(range(16)), bytes(range(1, 17))
HOSTS = 4


@contextmanager
def serving(hosts: XdpHosts, interfaces: Sequence[str] = ()) -> Iterator[XdpEngine]:
    with hosts.inside(SWITCH):
        engine = XdpEngine((hosts.address, 0), interfaces or hosts.ports)
    try:
        yield engine
    finally:
        engine.shut()


@contextmanager
def job(hosts: XdpHosts, engine: XdpEngine, number=77, key=KEY, slots=16, on=range(HOSTS)) -> Iterator[Workers]:
    """Workers that have said hello, and a session for them."""
    workers = Workers(hosts, engine.address, on)
    try:
        for worker, end in enumerate(workers.sockets):
            end.send(hello(worker))
        said: set = set()
        while len(said) < len(workers.sockets):
            came = engine.poll(2)
            assert came
            said |= {address for _, address in came}
        assert said == set(workers.addresses)
        for address in workers.addresses:  # an aggregator answers: now the kernel knows where they are
            engine.send(b"hello", address)
        assert [end.recv(9) for end in workers.sockets] == [b"hello"] * len(workers.sockets)
        with hosts.inside(SWITCH):
            engine.open(Session(number, key, workers.addresses, slots))
        yield workers
        engine.close(number)
    finally:
        workers.close()


def one_round(round_: int, slots: int, count: int, seed: int, number=77, key=KEY):
    """Packets of all workers, and the results that they must get. Even slots add, odd ones OR."""
    words = np.random.default_rng(seed).integers(0, 1 << 32, (count, slots, WORDS), np.uint32)
    slot = np.arange(slots)
    sums = np.where(slot[:, None] & 1, np.bitwise_or.reduce(words), words.sum(0, dtype=np.uint32))
    who, where = np.divmod(np.arange(count * slots), slots)
    all_sent = packets(key, DATA, number, round_, where, who, where & 1, words.reshape(-1, WORDS))
    sent = [all_sent[worker * slots : (worker + 1) * slots] for worker in range(count)]
    return sent, set(packets(key, RESULT, number, round_, slot, 65535, slot & 1, sums))
