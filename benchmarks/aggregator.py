"""Sums of int32 words over loopback: the aggregator beside Gloo's all-reduce, and what a packet costs the CPU.

    python benchmarks/aggregator.py [--workers 4] [--megabytes 3.4] [--rounds 100] [--rate 1gbit]

Without --rate all is on loopback: these are figures of work, not of a network. With it (root) every worker is in a
network namespace of its own, on a link of that rate; the aggregator's link is not limited, as that of a switch.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist

from gradwire.aggregate.sums.aggregator_client import InNetwork
from gradwire.aggregator.packet.packet_format import WORDS
from gradwire.aggregator.server import Server
from gradwire.aggregator.userspace_engine import UserspaceEngine
from hosts import Hosts, Loopback, run

KEY, JOB = os.urandom(16), os.urandom(16)


def cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def serve(pipe: Any, network: Hosts | Loopback, place: int, key: bytes) -> None:
    network.enter(place)
    ip = "127.0.0.1" if network.shared else f"10.77.0.{place + 1}"
    server = Server(UserspaceEngine((ip, 0)), key)
    pipe.send(f"{ip}:{server.engine.address[1]}")
    before = cpu()
    server.serve(lambda: not pipe.poll())
    pipe.send((cpu() - before, server.counters()))
    server.shut()


def work(
    worker: int, options: argparse.Namespace, network: Hosts | Loopback, address: str, key: bytes, job: bytes,
    folder: str, out: Any,
) -> None:  # fmt: skip
    network.enter(worker)
    os.environ["GLOO_SOCKET_IFNAME"] = network.interface
    torch.set_num_threads(1)
    count = int(options.megabytes * 1e6 / 4)
    either, add = torch.zeros(WORDS, dtype=torch.int32), torch.full((count,), worker + 1, dtype=torch.int32)
    if address:
        client = InNetwork(address, worker, options.workers, job, 60, key)
        client.join()

        def once() -> torch.Tensor:
            return client.finish(client.start(either, add))[1]
    else:
        dist.init_process_group("gloo", f"file://{folder}/store", rank=worker, world_size=options.workers)

        def once() -> torch.Tensor:
            total = add.clone()
            dist.all_reduce(total)
            return total

    for _ in range(5):
        right = bool((once() == options.workers * (options.workers + 1) // 2).all())
    used, start = cpu(), time.perf_counter()
    for _ in range(options.rounds):
        once()
    out.put((right, (time.perf_counter() - start) / options.rounds, (cpu() - used) / options.rounds))
    if address:
        if worker == 0:
            print(f"  packets sent again by worker 0: {client.resent}")
        client.close()
    else:
        dist.destroy_process_group()


def measure(options: argparse.Namespace, network: Hosts | Loopback, address: str) -> tuple[float, float]:
    """Seconds, and CPU seconds of all workers, for one operation."""
    context = multiprocessing.get_context("spawn")
    out = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=work, args=(worker, options, network, address, KEY, JOB, folder, out))
            for worker in range(options.workers)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    reports = [out.get() for _ in processes]
    assert all(right for right, _, _ in reports), "a wrong sum"
    return max(seconds for _, seconds, _ in reports), sum(used for _, _, used in reports)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--megabytes", type=float, default=3.4)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--rate", help="of every worker's link, such as 1gbit")
    options = parser.parse_args()
    if options.rate is None:
        return compare(options, Loopback())
    with Hosts(options.workers + 1) as network:
        network.shape(options.rate)
        for namespace, device in ((str(options.workers), "eth0"), ("switch", f"port{options.workers}")):
            run("tc", "-n", f"gradwire-{os.getpid()}-{namespace}", "qdisc", "del", "dev", device, "root")
        compare(options, network)


def compare(options: argparse.Namespace, network: Hosts | Loopback) -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    server = context.Process(target=serve, args=(there, network, options.workers, KEY))
    server.start()
    address = here.recv()
    for name, where in (("aggregator", address), ("Gloo", "")):
        seconds, used = measure(options, network, where)
        print(
            f"{name}: {1000 * seconds:.1f} ms for {options.megabytes} MB on each of {options.workers} workers,"
            f" {options.megabytes / 1000 / seconds:.3f} GB/s of words; CPU of all workers {1000 * used:.1f} ms"
        )
    here.send("end")
    used, counters = here.recv()
    server.join()
    rounds = counters["results"] / (1 + -(-int(options.megabytes * 1e6 / 4) // WORDS))
    each = 1e6 * used / counters["packets"]
    print(f"aggregator's CPU: {1000 * used / rounds:.1f} ms, {each:.2f} µs for a packet in and one out; {counters}")


if __name__ == "__main__":
    main()
