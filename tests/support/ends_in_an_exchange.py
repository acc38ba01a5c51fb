"""A program that ends in the middle of an exchange, and takes a second for it.

python ends_in_an_exchange.py WAY [unguarded]      WAY: end, exit_3, raise or ctrl_c

Whether a thread of gradwire asks for the GIL while the interpreter ends is a race that is lost now and then. Here it is
lost often: an object of the program sleeps while it is let go of, and the exchange thread, in Gloo, looks around
every quarter of a second. `unguarded` leaves out what gradwire does at exit.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from gradwire.aggregate.peers import interpreter_exit
from gradwire.aggregate.peers.diagnosis import wait
from gradwire.aggregate.transport.exchange_thread import Exchange, ExchangeThread


class SlowToGo:
    """As a program's own object that closes files or connections when it is let go of."""

    def __del__(self, sleep: Callable[[float], None] = time.sleep) -> None:
        sleep(1.0)


def two_ranks() -> list[dist.ProcessGroupGloo]:
    """The groups of two ranks that meet within this process."""
    store, groups = dist.HashStore(), {}

    def connect(rank: int) -> None:
        groups[rank] = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))

    ranks = [threading.Thread(target=connect, args=(rank,)) for rank in range(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    return [groups[0], groups[1]]


def exchange() -> Exchange:
    work = ranks[0].allreduce([torch.ones(8)])  # to which the other rank does not come
    begun.set()
    wait(work, None)
    yield


torch.set_num_threads(2)  # with one, exchanges run in the training's thread
ranks, begun, slow = two_ranks(), threading.Event(), SlowToGo()
exchanges = ExchangeThread()
exchanges.submit(exchange)
begun.wait()
if "unguarded" in sys.argv:
    atexit.unregister(interpreter_exit._end)
match sys.argv[1]:
    case "exit_3":
        sys.exit(3)
    case "raise":
        raise RuntimeError("the program fails")
    case "ctrl_c":
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.kill(os.getpid(), signal.SIGINT)
