"""A worker's connection to the aggregator: words go out once and come back added up (docs/aggregator.md)."""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradwire.aggregate.sums import aggregator_join
from gradwire.aggregator import addresses
from gradwire.aggregator.keys import key_from_environment
from gradwire.aggregator.packet import packet_format
from gradwire.errors import AggregateError, GradwireError, SpecError

try:
    from gradwire._native import AggregatorClient
except ImportError:
    AggregatorClient = None

SILENCE = 1.5
"""Seconds without any answer until the aggregator counts as lost."""
IDLE_CHECK = 1.0
"""Seconds between operations until a worker asks whether the session is still there."""
FORKED = "this process was forked from the worker, which alone can use its connection to the aggregator"


@dataclass
class Operation:
    """One sum: the words that a worker has given, and the words of all workers when they have come."""

    or_words: Tensor
    """int32, to be ORed."""
    add_words: Tensor
    """int32, to be added."""
    result: tuple[Tensor, Tensor] | None = None
    error: Exception | None = None
    done: threading.Event = field(default_factory=threading.Event)
    """Set when there is a result or an error."""

    def succeed(self, result: tuple[Tensor, Tensor]) -> None:
        """Hand the ORed and the added words of all workers to whoever waits."""
        self.result = result
        self.done.set()

    def fail(self, error: Exception) -> None:
        """Hand an error to whoever waits."""
        self.error = error
        self.done.set()


class InNetwork:
    """One worker's side of a job at an aggregator.

    All workers of the job start the same operations, with as many words, in the same order. Each promise is kept for
    all of them: an operation ends with the same sum everywhere, or with an AggregateError that says what to do. Packets
    that are lost are sent again. If the aggregator itself is lost, the worker joins it again and repeats what not all
    workers have finished; an operation is never counted twice.

    `join` comes first, and `close` last; `start` and `finish` are called by one thread at a time, in between. Words
    travel in a thread of this object, which alone changes `operations` and talks to the native client. It never changes
    the tensors that it was given, and it keeps the words of the last operation until the next one is done.
    """

    def __init__(
        self, address: str, worker: int, world: int, job: bytes, timeout: float = 60.0, key: bytes | None = None
    ) -> None:
        """`address` is "host:port", or "[IPv6]:port"; without `key` (16 bytes) it is that of GRADWIRE_KEY."""
        if AggregatorClient is None:
            raise GradwireError(
                "an aggregator needs gradwire's native module, on Linux: install gradwire from its source folder"
                " (pip install .) or a wheel"
            )
        key = key_from_environment() if key is None else key
        if len(key) != packet_format.KEY_BYTES or len(job) != packet_format.JOB_BYTES:
            raise SpecError("key and job have 16 bytes each")
        if not 0 <= worker < world:
            raise SpecError(f"worker {worker} of {world}: they count from 0")
        host, port = addresses.split(address, "aggregator")
        if not port:
            raise SpecError(f"aggregator {address!r}: it is HOST:PORT, and an aggregator's port is not 0")
        ip, port = addresses.resolve((host, port), "aggregator")
        self.operations = 0
        """Operations done; those without words are not counted."""
        self.timeout = timeout
        self._patience = timeout
        self._membership = aggregator_join.Membership(address, key, job, worker, world)
        self._client = AggregatorClient(ip, port, key)
        self._queue: queue.SimpleQueue[Operation | None] = queue.SimpleQueue()
        self._last: Operation | None = None
        self._under_way: Operation | None = None
        self._repeats_last = False  # the session begins with the last operation, which this worker has done
        self._joined = False
        self._failure: Exception | None = None
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._when_lost: Callable[[Exception], None] | None = None

    def set_patience(self, seconds: float) -> None:
        """Set how long an aggregator has to answer, or to come back; at first that is the timeout."""
        self._patience = seconds

    def when_lost(self, call: Callable[[Exception], None]) -> None:
        """Have this called, in this object's thread, when the aggregator was lost between operations.

        Without it an aggregator may be away while nobody needs it. With it, silence between operations is a loss, too,
        if the aggregator does not come back for as long as `set_patience` says.
        """
        self._when_lost = call

    def join(self) -> None:
        """Wait for all workers of the job; AggregateError says what to do if they do not come together."""
        self._join(time.monotonic() + min(self.timeout, self._patience))
        self._thread = threading.Thread(target=self._work, name="gradwire-aggregator", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a thread in native code that outlives the interpreter would abort the process

    def start(self, or_words: Tensor, add_words: Tensor) -> Operation:
        """Queue an operation.

        The tensors must not change until the next operation is done: if the aggregator is lost, they are sent again.
        """
        for words in (or_words, add_words):
            if words.dtype != torch.int32 or words.dim() != 1 or not words.is_contiguous() or words.is_cuda:
                raise AggregateError("words are contiguous int32 tensors of one dimension, on the CPU")
        if self._thread is None:
            raise AggregateError("not joined: call join() first")
        if self._is_forked():
            raise AggregateError(FORKED)
        operation = Operation(or_words, add_words)
        if not or_words.numel() and not add_words.numel():
            operation.succeed((or_words, add_words))
            return operation
        self._queue.put(operation)
        return operation

    def ready(self, operation: Operation) -> bool:
        """Tell whether `finish` would return at once."""
        return operation.done.is_set()

    def finish(self, operation: Operation) -> tuple[Tensor, Tensor]:
        """Wait for the ORed and the added words of all; AggregateError after `timeout` seconds without progress."""
        if self._is_forked() and not operation.done.is_set():
            raise AggregateError(FORKED)
        operation.done.wait()
        if operation.error is not None:
            raise operation.error
        assert operation.result is not None
        return operation.result

    def last(self) -> tuple[Operation | None, Operation | None]:
        """Return the last operation done, which another worker may not have finished, and the one under way or failed.

        After an error, these are what another transport has to begin with.
        """
        return self._last, self._under_way

    def close(self) -> None:
        """Leave the job. The others can still finish operations that all have sent.

        In a process that was forked from the worker this does nothing: the worker itself has not left.
        """
        if self._is_forked():
            return
        if self._thread is not None:
            self._queue.put(None)
            self._client.stop()
            self._thread.join()
            self._thread = None
            self._client.leave()
            atexit.unregister(self.close)

    def _is_forked(self) -> bool:
        return os.getpid() != self._process

    @property
    def bytes_sent(self) -> int:
        """Bytes of IP packets sent, those sent again included."""
        return int(self._client.bytes_sent)

    @property
    def bytes_received(self) -> int:
        """Bytes of IP packets received."""
        return int(self._client.bytes_received)

    @property
    def resent(self) -> int:
        """Packets that were sent again."""
        return int(self._client.resent)

    # ── in the thread, or before it starts ──

    def _join(self, deadline: float) -> None:
        self._joined = False
        accept = aggregator_join.join(self._client, self._membership, self.operations, deadline)
        behind = self.operations - accept.first_operation
        if behind not in (0, 1) or (behind and self._last is None):
            raise AggregateError(
                f"the others go on with operation {accept.first_operation}, this worker with {self.operations}:"
                " start all workers anew"
            )
        key = packet_format.session_key(self._membership.key, self._membership.job, accept.session_nonce)
        self._client.begin(accept.session, key, self._membership.worker, accept.slots)
        self._repeats_last, self._joined = bool(behind), True

    def _work(self) -> None:
        while True:
            try:
                operation = self._queue.get(timeout=IDLE_CHECK)
            except queue.Empty:
                try:
                    self._check_session()
                except Exception as error:
                    self._failure = error
                    if self._when_lost is not None:
                        self._when_lost(error)
                continue
            if operation is None:
                return
            self._under_way = operation
            try:
                if self._failure is not None:
                    raise self._failure
                result = self._run(operation)
            except Exception as error:  # it is raised where the caller waits
                self._failure = error
                operation.fail(error)
                continue
            self.operations += 1
            self._last, self._under_way = operation, None
            operation.succeed(result)

    def _run(self, operation: Operation) -> tuple[Tensor, Tensor]:
        """Return the sum, through as many sessions as it takes."""
        results = torch.empty_like(operation.or_words), torch.empty_like(operation.add_words)
        deadline = time.monotonic() + self.timeout
        while True:
            if not self._joined:
                self._join(min(deadline, time.monotonic() + self._patience))
            if self._repeat_last() and self._run_in_session(operation, results):
                return results
            age = self._client.result_age()
            if age >= 0:
                deadline = time.monotonic() - age + self.timeout

    def _repeat_last(self) -> bool:
        """Do the last operation again for workers that had not finished it, if there are any. False if that failed."""
        if not self._repeats_last or self._last is None:
            return True
        discarded = torch.empty_like(self._last.or_words), torch.empty_like(self._last.add_words)
        self._repeats_last = not self._run_in_session(self._last, discarded)
        return not self._repeats_last

    def _run_in_session(self, operation: Operation, results: tuple[Tensor, Tensor]) -> bool:
        """Return False if the session has ended; AggregateError if joining again would not help."""
        outcome = self._client.run(operation.or_words, operation.add_words, *results, self.timeout, SILENCE)
        if outcome in ("late", "stopped") or (outcome != "done" and self._client.who_left() != packet_format.NOBODY):
            raise AggregateError(self._explain(outcome))
        self._joined = outcome == "done"
        return self._joined

    def _explain(self, outcome: str) -> str:
        """Return why an operation has failed for good."""
        if outcome == "stopped":
            return "the connection to the aggregator was closed in mid-operation"
        if self._client.who_left() != packet_format.NOBODY:
            return f"worker {self._client.who_left()} has left the job: it ended, or has fewer steps than this one"
        silences = self._client.silences()  # milliseconds
        if not silences:
            return f"the aggregator at {self._membership.address} does not answer"
        late = [worker for worker, age in enumerate(silences) if age >= 1000 and worker != self._membership.worker]
        if not late:
            return f"no progress in {self.timeout:g} s, though all workers were heard of lately"
        named = ", ".join(f"worker {worker}, last heard {silences[worker] / 1000:.0f} s ago" for worker in late)
        return f"no sum in {self.timeout:g} s for want of {named}: it has ended, hangs, or needs a longer timeout"

    def _check_session(self) -> None:
        """Join again between operations if the session has ended: the others may wait for this worker."""
        if self._failure is not None:
            return
        outcome = self._client.look_for_end()
        ended = outcome == "gone" and self._client.who_left() == packet_format.NOBODY
        lost = outcome == "silent" and self._when_lost is not None
        if ended or lost or not self._joined:  # it may have been lost again while the last operation was repeated
            patience = self.timeout if self._when_lost is None else min(self.timeout, self._patience)
            self._join(time.monotonic() + patience)
            self._repeat_last()
        else:
            self._client.ask()
