"""The end of a process: whatever a training is in the middle of, its ranks end as those of plain DDP do."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import gradwire
from gradwire.aggregate.peers import interpreter_exit
from gradwire.aggregate.peers.diagnosis import wait
from gradwire.aggregate.transport.exchange_thread import Exchange, ExchangeThread, Pause
from gradwire.aggregate.transport.gloo_wait import ThreadedWait
from gradwire.aggregate.transport.link import Link
from support.rank_pool import RankPool, Scenario, named

SOURCES = Path(gradwire.__file__).parent
TRIALS = Path(__file__).parents[1] / "exit_trials.py"
WAYS = {"exit_3": 3, "raise": 1, "ctrl_c": -signal.SIGINT}  # and what a program ends with then


def end_of_interpreter() -> float:
    """Do what is done at exit; the seconds that it took."""
    began = time.monotonic()
    interpreter_exit._end()
    return time.monotonic() - began


def threads_of_gradwire() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name in ("gradwire", "gradwire-rests", "gradwire-attendance")]


def go_on() -> None:
    """The process serves other tests."""
    interpreter_exit._forget()
    interpreter_exit._state["held"] = None


class Endless:
    """A collective that the other ranks do not come to."""

    def is_completed(self) -> bool:
        return False

    def wait(self, timeout: timedelta = timedelta(days=1)) -> object:
        time.sleep(timeout.total_seconds())
        raise RuntimeError("Timed out")


def test_an_exchange_under_way_ends() -> None:
    """The exchange thread waits for a collective, and another exchange is queued behind it: that one never begins."""
    begun = []

    def exchange() -> Exchange:
        begun.append(True)
        yield Pause(lambda: False)
        wait(Endless(), None)

    thread = ExchangeThread()
    thread.inline = False
    try:
        thread.submit(exchange)
        thread._queue.put((None, threading.Event()))  # as `drain` does: it begins to wait
        while thread._running or not begun:
            time.sleep(0.01)
        thread.submit(exchange)
        assert end_of_interpreter() < interpreter_exit.SECONDS
        assert threads_of_gradwire() == []
        assert len(begun) == 1
    finally:
        go_on()


# ── on three ranks ────────────────────────────────────────────────────────────────────────────────


def a_message_that_does_not_come(rank: int) -> None:
    """A thread waits in Gloo for a receive without a timeout."""
    others = dist.new_group()
    if rank == 0:
        received = torch.zeros(8, dtype=torch.uint8, device="cpu")
        waiting = ThreadedWait([dist.irecv(received, 1)])
        with pytest.raises(RuntimeError):
            waiting.wait(timedelta(seconds=0.1))
        assert threads_of_gradwire() == ["gradwire-rests"]
        assert end_of_interpreter() < interpreter_exit.SECONDS
        assert threads_of_gradwire() == []
        go_on()
    dist.barrier(others)  # nobody closes the connection before


def tensors_of_collectives(rank: int) -> None:
    """Gloo's thread may have hold of them still: the last to let go must not be one that needs the GIL."""
    Link()
    tensor = torch.ones(1000, dtype=torch.float32, device="cpu")
    dist.all_reduce(tensor)
    assert end_of_interpreter() < interpreter_exit.SECONDS
    assert any(held is tensor for held in interpreter_exit._state["held"])
    go_on()


def a_group_in_use(rank: int) -> None:
    """Closing it would wait for the peers: it is kept, and only then."""
    group = dist.new_group()
    link, block = Link(group), torch.ones(4, dtype=torch.uint8, device="cpu")
    link.wait(link.all_gather(block)[1])
    before = sys.getrefcount(group)
    end_of_interpreter()
    assert sys.getrefcount(group) == before
    go_on()
    interpreter_exit.watch(link)
    _, work = link.all_gather(block)
    end_of_interpreter()
    assert sys.getrefcount(group) == before + 1
    go_on()
    link.wait(work)


@pytest.mark.parametrize("scenario", named([a_message_that_does_not_come, tensors_of_collectives, a_group_in_use]))
def test_threads_end_before_the_interpreter(ranks: RankPool, scenario: Scenario) -> None:
    ranks.check(scenario)


# ── the sources ───────────────────────────────────────────────────────────────────────────────────

# Threads that run in C alone, or that their owner waits for at exit (InNetwork): CPython may end them anywhere.
HARMLESS = {
    "aggregate/peers/interpreter_exit.py",
    "aggregate/peers/status_server.py",
    "aggregate/peers/roll_call.py",
    "aggregate/sums/aggregator_client.py",
    "cli/worker.py",
}


def test_every_thread_is_known_at_exit() -> None:
    sources = {str(path.relative_to(SOURCES)): path.read_text() for path in SOURCES.rglob("*.py")}
    assert {name for name, text in sources.items() if re.search(r"\bThread\(", text)} <= HARMLESS


def test_gloo_threads_never_call_python() -> None:
    """A callback on a future runs in Gloo's thread, which may still be in it when the interpreter ends."""
    callbacks = re.compile(r"\.then\(|add_done_callback\(|\w+_hook\(self\.given_group|allreduce_hook\b(?!`)")
    found = {str(p.relative_to(SOURCES)) for p in SOURCES.rglob("*.py") if callbacks.search(p.read_text())}
    assert found == set()


# ── whole processes ───────────────────────────────────────────────────────────────────────────────


def ended(way: str, *options: str) -> int:
    """What the program of support/ends_in_an_exchange.py ends with."""
    command = [sys.executable, "-m", "support.ends_in_an_exchange", way, *options]
    return subprocess.run(command, cwd=TRIALS.parent, capture_output=True, timeout=120, check=False).returncode


@pytest.mark.parametrize(
    ("way", "code"), [("end", 0), *(pytest.param(*w, marks=pytest.mark.thorough) for w in WAYS.items())]
)
def test_a_program_that_ends_in_the_middle_of_an_exchange(way: str, code: int) -> None:
    """It ended with "terminate called without an active exception" whenever its thread woke up at the wrong moment."""
    assert ended(way) == code


@pytest.mark.slow  # it wins the race for most tries on some machines, and loses it nearly always on others
@pytest.mark.skipif(sys.version_info >= (3, 14), reason="this version lets other threads hang when it ends")
def test_the_program_would_abort_without_what_is_done_at_exit() -> None:
    assert any(ended("end", "unguarded") == -signal.SIGABRT for _ in range(60))


@pytest.mark.thorough
def test_exit_codes_are_those_of_plain_ddp() -> None:
    command = [sys.executable, str(TRIALS), "--tries=2", "--wrapper=ddp.attach, 2 threads", "--wrapper=LocalSGD"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
