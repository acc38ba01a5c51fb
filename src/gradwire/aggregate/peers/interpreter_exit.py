"""What has to be over before the interpreter ends: gradwire's threads, and the hold that Gloo has on tensors.

While the interpreter ends, CPython before 3.14 ends every other thread that asks for the GIL, by pthread_exit. If the
thread is in C++ then, the process aborts ("terminate called without an active exception"): what unwinds the thread
meets a destructor that must not be left so. Two kinds of threads come to that:

1. Threads of gradwire that wait for a collective, or run a native kernel. They are started by `start_thread`. At exit
   they are told to stop, and waited for; whoever waits for a collective gives up (`has_begun`).
2. Threads of Gloo, which let go of a collective's tensors a moment after its `wait` has returned, or when it fails
   because the other ranks end. Letting go of a tensor that is known to Python takes the GIL, unless somebody else in
   C++ has hold of it. So at exit all such tensors are put into a list that belongs to C++.

A process group is not closed at exit if a collective is still under way in it: that would wait for the other ranks,
which may be stopped, until the group's timeout.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import torch
import torch.distributed as dist

from gradwire.torch_internals.tensors import hold_in_cpp

SECONDS = 5.0  # that all threads together have to end: they look every quarter of a second

_stops: dict[threading.Thread, Callable[[], object]] = {}  # how to wake each thread that runs
_state: dict[str, Any] = {"begun": False, "held": None}


class Connection(Protocol):
    """A process group that tensors are handed to."""

    group: dist.ProcessGroup

    @property
    def waits_for_peers(self) -> bool:
        """Whether a collective is under way that the group would wait for, if it were closed."""
        ...


_connections: weakref.WeakSet[Connection] = weakref.WeakSet()


def has_begun() -> bool:
    """Tell whether the interpreter is about to end: from then on nothing is waited for."""
    return bool(_state["begun"])


def start_thread(
    target: Callable[..., object], *arguments: object, name: str, stop: Callable[[], object] = lambda: None
) -> threading.Thread:
    """Start a thread that has ended before the interpreter does.

    `stop` wakes it where it waits, and may be called when the thread is over.
    """

    def run() -> None:
        try:
            target(*arguments)
        finally:
            _stops.pop(thread, None)

    thread = threading.Thread(target=run, name=name, daemon=True)
    _stops[thread] = stop
    try:
        thread.start()
    except BaseException:
        del _stops[thread]
        raise
    return thread


def watch(connection: Connection) -> None:
    """See at exit to the tensors and the process group of this connection, if it is still there."""
    _connections.add(connection)


def _end() -> None:
    _state["begun"] = True
    deadline = time.monotonic() + SECONDS
    for stop in list(_stops.values()):
        with suppress(RuntimeError):  # of torch, about the collective that is cut short
            stop()
    for thread in list(_stops):
        thread.join(max(0.0, deadline - time.monotonic()))
    connections = list(_connections)
    if connections or dist.is_initialized():
        _hold_tensors()
    for connection in connections:
        if connection.waits_for_peers:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection.group))  # nobody lets go of it


def _hold_tensors() -> None:
    """Let a list of C++'s hold all tensors that are left. It is never emptied while Python can be asked for the GIL."""
    # The collector knows every tensor, also those of collectives that others have started. It is asked only once, so
    # that no collective has to keep a record.
    tensors = [each for each in gc.get_objects() if type(each) is torch.Tensor]
    if tensors:
        _state["held"] = hold_in_cpp(tensors)


def _forget() -> None:
    # In a forked child there are no such threads, and no threads of Gloo.
    _stops.clear()
    _connections.clear()
    _state["begun"] = False


atexit.register(_end)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
