"""Groups of ranks in processes of their own, which wait for commands.

A benchmark can let several groups take turns, and a group that aborts leaves the others running.

Ranks are forked from this process, which has imported torch already: 48 of them start within a second.
"""

from __future__ import annotations

import ctypes
import datetime
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from hosts import Hosts, Loopback

PR_SET_PDEATHSIG = 1
Answer = tuple[str, Any]  # "done" and what came back, or "failed" and why


class LostCrew(Exception):
    """A rank died, failed or did not answer; the message says how."""


class Crew:
    """`world` processes; in each `make(rank)` gives an object whose methods are what can be asked for."""

    def __init__(self, make: Callable[[int], object], place: Hosts | Loopback, world: int, port: int):
        context = multiprocessing.get_context("fork")
        self.errors = [tempfile.TemporaryFile("w+") for _ in range(world)]  # noqa: SIM115, they live as long as we
        self.connections: list[Connection] = []
        self.processes = []
        for rank in range(world):
            ours, theirs = context.Pipe()
            work = (make, place, rank, world, port, theirs, self.errors[rank].fileno())
            process = context.Process(target=_serve, args=work)
            process.start()
            theirs.close()
            self.connections.append(ours)
            self.processes.append(process)

    def ask(self, method: str, *arguments: object, seconds: float = 120) -> list[Any]:
        """What the method returned on every rank."""
        for connection in self.connections:
            try:
                connection.send((method, arguments))
            except OSError:
                self._lost()
        deadline = time.monotonic() + seconds
        answers: dict[int, Any] = {}
        ranks = {connection: rank for rank, connection in enumerate(self.connections)}
        deaths = [process.sentinel for process in self.processes]  # one that dies leaves the others waiting for it
        while len(answers) < len(ranks):
            waiting = [connection for connection, rank in ranks.items() if rank not in answers]
            ready = wait([*waiting, *deaths], max(0.0, deadline - time.monotonic()))
            if not ready:
                self._lost(f"no answer within {seconds:.0f} s")
            if any(death in ready for death in deaths):
                self._lost()
            for connection in ready:
                kind, content = connection.recv()
                if kind == "failed":
                    self._lost(content)
                answers[ranks[connection]] = content
        return [answers[rank] for rank in range(len(ranks))]

    def _lost(self, reason: str = "") -> NoReturn:
        """A rank that died says more than its peers, who only lost the connection to it."""
        time.sleep(0.5)
        for process, errors in zip(self.processes, self.errors, strict=True):
            if process.exitcode:
                errors.seek(0)
                lines = [line.strip() for line in errors if "warn" not in line.lower()]
                told = [line for line in lines if "what():" in line or "Error" in line] or lines
                code = process.exitcode
                reason = f"{signal.Signals(-code).name if code < 0 else f'exit {code}'}: {told[-1] if told else ''}"
                break
        self.close()
        raise LostCrew(reason or "a rank has left")

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        for errors in self.errors:
            errors.close()


def _serve(
    make: Callable[[int], object], place: Hosts | Loopback, rank: int, world: int, port: int,
    orders: Connection, errors: int,
) -> None:  # fmt: skip
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # no rank outlives the benchmark
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the benchmark itself ends us on Ctrl-C
    os.dup2(errors, 2)
    place.enter(rank)
    os.environ["GLOO_SOCKET_IFNAME"] = place.interface
    torch.set_num_threads(1)
    worker = None
    while True:
        method, arguments = orders.recv()
        try:
            if worker is None:
                dist.init_process_group(
                    "gloo", f"tcp://{place.address}:{port}", rank=rank, world_size=world,
                    timeout=datetime.timedelta(seconds=60),
                )  # fmt: skip
                worker = make(rank)
            answer: Answer = "done", getattr(worker, method)(*arguments)
        except Exception as error:
            traceback.print_exc()
            answer = "failed", f"{type(error).__name__}: {error}"
        orders.send(answer)
