"""Trials of the aggregator: many operations through a network that loses, repeats and swaps packets, or beside a
flood of garbage. Every sum is compared with the one that is right.

    python tests/aggregator_trials.py --rounds 10000 --loss 0.01 --duplicate 0.01 --reorder 0.01 --workers 3 --seed 0
    python tests/aggregator_trials.py --flood 60
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import socket
import time
from collections.abc import Callable
from multiprocessing.synchronize import Event

import torch

from gradwire.aggregator.packet.packet_format import PACKET_BYTES, WORDS, Kind, Packet
from support.aggregation import JOB, Words, equal, joined, serving, some_words, sums
from support.lossy import Faults, LossyProxy


def sizes_of(seed: int, round_: int) -> tuple[int, int]:
    generator = random.Random(f"{seed} {round_}")
    most = generator.choice((WORDS, 8 * WORDS, 40 * WORDS))
    return generator.randrange(most // 4), generator.randrange(1, most)


def work(
    address: str, worker: int, options: argparse.Namespace, out: multiprocessing.SimpleQueue, enough: Event
) -> None:
    wrong = rounds = stop = 0
    with joined(address, worker, options.workers, JOB, timeout=60) as client:
        start = time.monotonic()
        while rounds < options.rounds and not stop:
            sizes = sizes_of(options.seed, rounds)
            given = [some_words(hash((options.seed, rounds, peer)), *sizes) for peer in range(options.workers)]
            either, add = given[worker]
            vote = torch.tensor([enough.is_set()], dtype=torch.int32)  # all end after the same round
            (vote, either), add = _first_apart(client.finish(client.start(torch.cat((vote, either)), add)))
            stop = int(vote)
            wrong += not equal((either, add), sums(given))
            rounds += 1
        out.put((wrong, rounds, client.resent, time.monotonic() - start))


def _first_apart(words: Words) -> tuple[Words, torch.Tensor]:
    return (words[0][0], words[0][1:]), words[1]


def flood(address: str, seconds: float, sent: multiprocessing.SimpleQueue) -> None:
    """Noise of all lengths, and packets that look right but for their code, as fast as they can be sent."""
    ip, port = address.rsplit(":", 1)
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.connect((ip, int(port)))
    generator = random.Random(0)
    garbage = [os.urandom(generator.randrange(PACKET_BYTES + 200)) for _ in range(64)]
    now = int(time.time())
    for kind in Kind:
        payload = os.urandom(4 * WORDS if kind in (Kind.DATA, Kind.RESULT) else 64)
        near = range(now - 100, now + 10)  # numbers of sessions are no secret
        garbage += [
            Packet(kind, session, 0, session % 8, session % 3, 0, payload).pack(os.urandom(16)) for session in near
        ]
    count, until = 0, time.monotonic() + seconds
    while time.monotonic() < until:
        for datagram in garbage:
            try:
                sock.send(datagram)
                count += 1
            except OSError:
                pass
    sent.put(count)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=1 << 62)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--flood", type=float, default=0.0, metavar="SECONDS")
    for fault in ("loss", "duplicate", "reorder"):
        parser.add_argument(f"--{fault}", type=float, default=0.0)
    options = parser.parse_args()
    if not options.flood and options.rounds == 1 << 62:
        options.rounds = 10000
    options.faults = Faults(options.loss, options.duplicate, options.reorder)
    return options


def main() -> None:
    options = read_options()
    with serving() as aggregator:
        address = aggregator.address
        ip, port = address.rsplit(":", 1)
        with LossyProxy((ip, int(port)), options.faults, options.seed) as proxy:
            through = proxy.address if options.faults.any else address
            failures = trial(options, lambda worker: (work, through), (flood, address))
        print(f"proxy: {proxy.passed:,} passed, {proxy.lost:,} lost, {proxy.repeated:,} repeated, {proxy.held:,} held")
        print("aggregator:", aggregator.counters())
    raise SystemExit(failures)


def trial(
    options: argparse.Namespace,
    worker: Callable[[int], tuple[Callable[..., None], object]],
    flooder: tuple[Callable[..., None], object],
) -> int:
    """Processes that run these functions, each with a place to begin with: `work` and `flood`, or what wraps them."""
    context = multiprocessing.get_context("spawn")
    enough, results, sent = context.Event(), context.SimpleQueue(), context.SimpleQueue()
    targets = [(*worker(number), number) for number in range(options.workers)]
    workers = [context.Process(target=f, args=(place, n, options, results, enough)) for f, place, n in targets]
    for process in workers:
        process.start()
    if options.flood:
        flooding = context.Process(target=flooder[0], args=(flooder[1], options.flood, sent))
        flooding.start()
        flooding.join()
        print(f"flood: {sent.get():,} packets in {options.flood:g} s")
        enough.set()
    for process in workers:
        process.join()
    reports = [results.get() for _ in range(options.workers) if not results.empty()]
    completed = [rounds for _, rounds, _, _ in reports]
    wrong, resent = sum(report[0] for report in reports), sum(report[2] for report in reports)
    print(
        f"{options.workers} workers: rounds completed {completed}, wrong sums {wrong}, packets sent again {resent:,},"
        f" {max(report[3] for report in reports):.1f} s"
    )
    ended = len(reports) == options.workers and (options.flood or min(completed) == options.rounds)
    return 0 if ended and not wrong else 1


if __name__ == "__main__":
    main()
