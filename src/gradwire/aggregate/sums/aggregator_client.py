"""A worker's connection to the aggregator: words go out once and come back added up (docs/aggregator.md)."""

from __future__ import annotations

import atexit
import queue
import threading
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradwire.aggregate.sums import aggregator_join
from gradwire.aggregator.keys import key_from_environment
from gradwire.aggregator.packet import packet_format
from gradwire.errors import AggregateError, GradwireError, SpecError

try:
    from gradwire._native import AggregatorClient
except ImportError:
    AggregatorClient = None

SILENCE = 1.5
"""Seconds without any answer until the aggregator counts as lost."""
LOOK_AROUND = 1.0
"""Seconds between operations until a worker asks whether the session is still there."""


@dataclass
class Operation:
    """What a worker gave, and got."""

    either: Tensor
    """int32, ORed."""
    add: Tensor
    """int32, added."""
    result: tuple[Tensor, Tensor] | None = None
    error: Exception | None = None
    done: threading.Event = field(default_factory=threading.Event)


class InNetwork:
    """One worker's side of a job at an aggregator. Operations are the same, in the same order, on all workers."""

    def __init__(
        self, address: str, worker: int, world: int, job: bytes, timeout: float = 60.0, key: bytes | None = None
    ) -> None:
        """`address` is "host:port"; without `key` (16 bytes) it is that of the environment, GRADWIRE_KEY."""
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
        ip, port = aggregator_join.resolve(address)
        self.operations = 0
        """Done; those without words are not counted."""
        self.timeout = timeout
        self._who = aggregator_join.Membership(address, key, job, worker, world)
        self._client = AggregatorClient(ip, port, key)
        self._queue: queue.SimpleQueue[Operation | None] = queue.SimpleQueue()
        self._last: Operation | None = None
        self._under_way: Operation | None = None
        self.patience = timeout
        """Seconds that an aggregator has to answer, or to come back."""
        self._redo = False
        """The session begins with the last operation, which this worker has done."""
        self._joined = False
        self._failure: Exception | None = None
        self._thread: threading.Thread | None = None

    def join(self) -> None:
        """Wait for all workers of the job; AggregateError says what to do if they do not come together."""
        self._join(time.monotonic() + min(self.timeout, self.patience))
        self._thread = threading.Thread(target=self._work, name="gradwire-aggregator", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a thread in native code that outlives the interpreter would abort the process

    def start(self, or_words: Tensor, add_words: Tensor) -> Operation:
        """Queue an operation. The tensors must not change until the next operation is done: should the aggregator
        be lost, they are sent again."""
        for words in (or_words, add_words):
            if words.dtype != torch.int32 or words.dim() != 1 or not words.is_contiguous() or words.is_cuda:
                raise AggregateError("words are contiguous int32 tensors of one dimension, on the CPU")
        if self._thread is None:
            raise AggregateError("not joined: call join() first")
        operation = Operation(or_words, add_words)
        if not or_words.numel() and not add_words.numel():
            operation.result = or_words, add_words
            operation.done.set()
            return operation
        self._queue.put(operation)
        return operation

    def ready(self, operation: Operation) -> bool:
        return operation.done.is_set()

    def finish(self, operation: Operation) -> tuple[Tensor, Tensor]:
        """ORed and added words of all workers; AggregateError after `timeout` seconds without progress."""
        operation.done.wait()
        if operation.error is not None:
            raise operation.error
        assert operation.result is not None
        return operation.result

    def last(self) -> tuple[Operation | None, Operation | None]:
        """The last operation done (`.either`, `.add`, `.result`), which another worker may not have finished, and the
        one under way or failed: what another transport has to begin with. After an error."""
        return self._last, self._under_way

    def close(self) -> None:
        """Leave the job. The others can still finish operations that all have sent."""
        if self._thread is not None:
            self._queue.put(None)
            self._client.stop()
            self._thread.join()
            self._thread = None
            self._client.leave()
            atexit.unregister(self.close)

    @property
    def bytes_sent(self) -> int:
        """Of IP packets, those sent again included."""
        return self._client.bytes_sent

    @property
    def bytes_received(self) -> int:
        return self._client.bytes_received

    @property
    def resent(self) -> int:
        """Packets."""
        return self._client.resent

    def _join(self, deadline: float) -> None:
        self._joined = False
        accept = aggregator_join.join(self._client, self._who, self.operations, deadline)
        behind = self.operations - accept.first_operation
        if behind not in (0, 1) or (behind and self._last is None):
            raise AggregateError(
                f"the others go on with operation {accept.first_operation}, this worker with {self.operations}:"
                " start all workers anew"
            )
        key = packet_format.session_key(self._who.key, self._who.job, accept.session_nonce)
        self._client.begin(accept.session, key, self._who.worker, accept.slots)
        self._redo, self._joined = bool(behind), True

    def _work(self) -> None:
        while True:
            try:
                operation = self._queue.get(timeout=LOOK_AROUND)
            except queue.Empty:
                try:
                    self._look_around()
                except Exception as error:
                    self._failure = error
                continue
            if operation is None:
                return
            self._under_way = operation
            try:
                if self._failure is not None:
                    raise self._failure
                operation.result = self._run(operation)
                self.operations += 1
                self._last, self._under_way = operation, None
            except Exception as error:  # it is raised where the caller waits
                self._failure = operation.error = error
            operation.done.set()

    def _run(self, operation: Operation) -> tuple[Tensor, Tensor]:
        """Through as many sessions as it takes."""
        results = torch.empty_like(operation.either), torch.empty_like(operation.add)
        deadline = time.monotonic() + self.timeout
        while True:
            if not self._joined:
                self._join(min(deadline, time.monotonic() + self.patience))
            if self._catch_up() and self._through(operation, results):
                return results
            age = self._client.result_age()
            if age >= 0:
                deadline = time.monotonic() - age + self.timeout

    def _catch_up(self) -> bool:
        """Do the last operation again, for workers that had not finished it when the session ended."""
        if not self._redo or self._last is None:
            return True
        spare = torch.empty_like(self._last.either), torch.empty_like(self._last.add)
        self._redo = not self._through(self._last, spare)
        return not self._redo

    def _through(self, operation: Operation, results: tuple[Tensor, Tensor]) -> bool:
        """False if the session is over; AggregateError where joining again would not help."""
        outcome = self._client.run(operation.either, operation.add, *results, self.timeout, SILENCE)
        if outcome in ("late", "stopped") or (outcome != "done" and self._client.who_left() != packet_format.NOBODY):
            raise AggregateError(self._why(outcome))
        self._joined = outcome == "done"
        return self._joined

    def _why(self, outcome: str) -> str:
        if outcome == "stopped":
            return "the connection to the aggregator was closed in mid-operation"
        if self._client.who_left() != packet_format.NOBODY:
            return f"worker {self._client.who_left()} has left the job: it ended, or has fewer steps than this one"
        ages = self._client.told()
        if not ages:
            return f"the aggregator at {self._who.address} does not answer"
        late = [worker for worker, age in enumerate(ages) if age >= 1000 and worker != self._who.worker]
        if not late:
            return f"no progress in {self.timeout:g} s, though all workers were heard of lately"
        named = ", ".join(f"worker {worker}, last heard {ages[worker] / 1000:.0f} s ago" for worker in late)
        return f"no sum in {self.timeout:g} s for want of {named}: it has ended, hangs, or needs a longer timeout"

    def _look_around(self) -> None:
        """Between operations: if the aggregator was restarted, others may wait for this worker to join again."""
        if self._failure is not None:
            return
        gone = self._client.glance() == "gone" and self._client.who_left() == packet_format.NOBODY
        if gone or not self._joined:  # it may have been lost again while the last operation was repeated
            self._join(time.monotonic() + self.timeout)
            self._catch_up()
        else:
            self._client.ask()
