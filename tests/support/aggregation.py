"""What tests of the aggregator share: a server in a thread, and workers in threads."""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import reduce
from typing import Any

import torch

from gradwire.aggregate.sums.aggregator_client import InNetwork
from gradwire.aggregator.jobs import Limits
from gradwire.aggregator.server import Server
from gradwire.aggregator.userspace_engine import UserspaceEngine

KEY = bytes(range(16))
JOB = b"a job for a test"
Words = tuple[torch.Tensor, torch.Tensor]


class Serving:
    def __init__(self, port: int = 0, key: bytes = KEY, limits: Limits | None = None, bind: str = "127.0.0.1") -> None:
        self.server = Server(UserspaceEngine((bind, port)), key, limits)
        self.port = self.server.engine.address[1]
        self.address = f"127.0.0.1:{self.port}"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self.server.serve, args=(lambda: not self._stop.is_set(),))
        self._thread.start()

    def counters(self) -> dict[str, int]:
        return self.server.counters()

    def stop(self) -> None:
        if self._thread.is_alive():
            self._stop.set()
            self._thread.join()
            self.server.shut()


@contextmanager
def serving(**options: Any) -> Iterator[Serving]:
    aggregator = Serving(**options)
    try:
        yield aggregator
    finally:
        aggregator.stop()


def at_once(world: int, work: Callable[[int], Any]) -> list[Any]:
    """work(0), work(1), … in threads; their results, or the first error."""
    with ThreadPoolExecutor(world) as pool:
        return [future.result() for future in [pool.submit(work, worker) for worker in range(world)]]


@contextmanager
def joined(address: str, worker: int, world: int, job: bytes = JOB, timeout: float = 10.0) -> Iterator[InNetwork]:
    client = InNetwork(address, worker, world, job, timeout, KEY)
    try:
        client.join()
        yield client
    finally:
        client.close()


def in_a_child(check: Callable[[], None]) -> bool:
    """Whether a check passes in a process that was forked for it."""
    child = os.fork()
    if not child:
        try:
            check()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def some_words(seed: int, *sizes: int) -> Words:
    generator = torch.Generator().manual_seed(seed)
    either, add = (torch.randint(-(2**31), 2**31, (n,), dtype=torch.int32, generator=generator) for n in sizes)
    return either, add


def sums(given: list[Words]) -> Words:
    either = reduce(torch.bitwise_or, (words[0] for words in given))
    return either, reduce(torch.add, (words[1] for words in given))


def equal(result: Words, expected: Words) -> bool:
    return torch.equal(result[0], expected[0]) and torch.equal(result[1], expected[1])
