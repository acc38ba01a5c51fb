"""Trials of aggregator_trials.py with the XDP engine: every worker in a network namespace of its own, with a network
that loses, repeats and swaps packets in both directions, or beside a flood of garbage. Linux, root, clang, libbpf.

    python tests/xdp_trials.py --rounds 10000 --loss 0.01 --duplicate 0.01 --reorder 0.01 --workers 3 --seed 0
    python tests/xdp_trials.py --flood 60
"""

from __future__ import annotations

import argparse
import multiprocessing
import threading
from multiprocessing.synchronize import Event

from aggregator_trials import flood, read_options, trial, work
from gradwire.aggregator.server import Server
from gradwire.aggregator.xdp.engine import XdpEngine
from support.aggregation import KEY
from support.lossy import LossyProxy
from support.xdp_hosts import SWITCH, XdpHosts, enter, missing

PORT = 9999
ADDRESS = f"{XdpHosts.address}:{PORT}"


def work_there(
    namespace: str, worker: int, options: argparse.Namespace, out: multiprocessing.SimpleQueue, enough: Event
) -> None:
    enter_named(namespace)
    with LossyProxy((XdpHosts.address, PORT), options.faults, 1000 * options.seed + worker) as proxy:
        work(proxy.address if options.faults.any else ADDRESS, worker, options, out, enough)
    print(
        f"proxy {worker}: {proxy.passed:,} passed, {proxy.lost:,} lost, {proxy.repeated:,} twice, {proxy.held:,} held"
    )


def flood_there(namespace: str, seconds: float, sent: multiprocessing.SimpleQueue) -> None:
    enter_named(namespace)
    flood(ADDRESS, seconds, sent)


def enter_named(namespace: str) -> None:
    with open(f"/run/netns/{namespace}") as there:
        enter(there.fileno())


def main() -> None:
    options = read_options()
    if missing():
        raise SystemExit(missing())
    over = threading.Event()
    with XdpHosts(options.workers + 1) as hosts:
        with hosts.inside(SWITCH):
            server = Server(XdpEngine((hosts.address, PORT), hosts.ports), KEY)
            serving = threading.Thread(target=server.serve, args=(lambda: not over.is_set(),))
            serving.start()
        try:
            flooder = flood_there, hosts.name(options.workers)
            failures = trial(options, lambda worker: (work_there, hosts.name(worker)), flooder)
            print("aggregator:", server.counters())
        finally:
            over.set()
            serving.join()
            server.shut()
    raise SystemExit(failures)


if __name__ == "__main__":
    main()
