"""Forked processes that end as programs do.

torch takes seconds to import, so every process of the soak is forked from one that has imported it. A child of
`os.fork` would end in the middle of its parent's stack. Here it leaves that stack by an exception first: `run_program`,
at the bottom, catches it and runs the child's work in its place, so that the child ends by the end of its interpreter.

That exception passes through the parent's frames: code that starts children has no `finally` and no `with` around it.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from support.train_runs import wait_for

__all__ = ["Child", "end_all", "run_program", "start", "wait_for"]
Work = Callable[[], int]


class _InChild(BaseException):
    def __init__(self, work: Work) -> None:
        self.work = work


def run_program(work: Work) -> int:
    """Run `work`, which may call `start`; in a child, what that was given."""
    while True:
        try:
            return work()
        except _InChild as child:
            work = child.work


class Child:
    """A child process; `code` is its exit code, negative for a signal, None while it runs."""

    def __init__(self, pid: int, output: Path) -> None:
        self.pid, self.output = pid, output
        self.code: int | None = None

    def poll(self) -> int | None:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code

    def signal(self, number: int) -> None:
        """Send a signal, unless it has ended: until it is waited for, its number is not given to another process."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def said(self) -> str:
        """The end of what it printed."""
        return self.output.read_text(errors="replace")[-3000:] if self.output.exists() else ""


def start(work: Work, output: Path) -> Child:
    """Fork a child that does this work; what it prints is appended to the file."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        nothing = os.open(os.devnull, os.O_RDONLY)
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for descriptor, target in ((nothing, 0), (file, 1), (file, 2)):
            os.dup2(descriptor, target)
        os.close(nothing)
        os.close(file)
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        raise _InChild(work)
    return Child(pid, output)


def end_all(children: Iterable[Child], seconds: float) -> list[Child]:
    """Wait for them; those that do not end in time are killed and returned, with their stacks in their output."""
    children, deadline = list(children), time.monotonic() + seconds
    while any(child.poll() is None for child in children) and time.monotonic() < deadline:
        time.sleep(0.005)
    late = [child for child in children if child.poll() is None]
    for child in late:
        child.signal(signal.SIGCONT)
        child.signal(signal.SIGUSR1)
    if late:
        time.sleep(0.3)
    for child in late:
        child.signal(signal.SIGKILL)
        while child.poll() is None:
            time.sleep(0.005)
    return late
