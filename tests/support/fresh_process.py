"""What decoding costs in a process of its own, in which no other test has run.

In a process that has run many tests, allocators of torch and Python hold memory of all sizes, and threads of other
tests still touch some of their own, so that measurements there differ by megabytes.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

import torch

import gradwire
from gradwire import FrameError, codecs
from gradwire.flower.shared import update
from gradwire.inspection import frames
from support.decoding_cost import Cost, cost_of, give_back_at_once, small_pages_only

TRIES = 3  # of which the least counts: the kernel counts pages in batches


class FreshProcess:
    """Measures decoders, in a process that has done nothing else."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def decode(self, frame: bytes, max_elements: int) -> Cost:
        """What decoding a frame costs, or refusing it."""
        return self._measure("decode", frame, max_elements)

    def add(self, frame: bytes) -> Cost:
        """What adding a frame to a sum costs, beyond the sum."""
        return self._measure("add", frame)

    def inspect(self, frame: bytes) -> Cost:
        """What it costs to look into a frame, as `gradwire inspect` does, or to refuse it."""
        return self._measure("inspect", frame)

    def update(self, data: bytes, elements: int) -> Cost:
        """What decoding a Flower update costs, of a model with one array of so many elements."""
        return self._measure("update", data, elements)

    def _measure(self, name: str, *arguments: object) -> Cost:
        self._connection.send((name, arguments))
        if not self._connection.poll(120):
            raise TimeoutError(f"{name} has not ended after 120 seconds")
        answer = self._connection.recv()
        if isinstance(answer, BaseException):
            raise answer
        return Cost(*answer)


@contextlib.contextmanager
def fresh_process() -> Iterator[FreshProcess]:
    """A new process, which ends with the context."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    try:
        yield FreshProcess(ours)
    finally:
        ours.close()
        process.join(10)
        process.kill()


def _serve(connection: Connection) -> None:
    small_pages_only()
    give_back_at_once()
    while True:
        try:
            name, arguments = connection.recv()
        except EOFError:
            return
        try:
            call = _CALLS[name](*arguments)
            call()  # once before: tables are made and libraries loaded
            costs = [cost_of(call) for _ in range(TRIES)]
            connection.send(Cost(*(min(values) for values in zip(*costs, strict=True))))
        except Exception as error:
            connection.send(error)


def _decode(frame: bytes, max_elements: int) -> Callable[[], None]:
    def decode() -> None:
        with contextlib.suppress(FrameError):
            gradwire.decode(frame, max_elements=max_elements)

    return decode


def _add(frame: bytes) -> Callable[[], None]:
    header, payload = codecs.open_frame(codecs.as_bytes(frame))
    total = torch.zeros(header.elements, dtype=torch.float32)

    def add() -> None:
        with contextlib.suppress(FrameError):
            codecs.decode_payload(header, payload, total, 0.25, True)

    return add


def _inspect(frame: bytes) -> Callable[[], None]:
    def inspect() -> None:
        with contextlib.suppress(FrameError):
            frames.describe(frame)

    return inspect


def _update(data: bytes, elements: int) -> Callable[[], None]:
    model = {"weight": torch.zeros(elements, dtype=torch.float32)}
    return lambda: update.decode(data, model)


_CALLS: dict[str, Callable[..., Callable[[], None]]] = {
    "decode": _decode,
    "add": _add,
    "inspect": _inspect,
    "update": _update,
}
