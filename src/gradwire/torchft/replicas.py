"""The replicas of one quorum, and the sums that they exchange."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable, Sequence

import torch
import torch.distributed as dist

from gradwire.aggregate.exchanges.all_gather import AllGatherExchange
from gradwire.aggregate.messages.host_copies import HostCopies
from gradwire.aggregate.messages.message_coder import MessageCoder
from gradwire.aggregate.messages.model_recipes import ModelRecipes
from gradwire.aggregate.messages.partial_messages import PartialMessages
from gradwire.aggregate.messages.step_ledger import StepLedger
from gradwire.aggregate.messages.step_tensors import StepTensors
from gradwire.aggregate.messages.tensor_parts import TensorPart, split_into_messages
from gradwire.aggregate.transport.exchange_thread import Exchange, ExchangeThread
from gradwire.aggregate.transport.unregistered_link import UnregisteredLink
from gradwire.correct.worker_memories import WorkerMemories
from gradwire.errors import AggregateError
from gradwire.torchft.sum_under_way import SumUnderWay


class Replicas:
    """Adds up tensors over the replicas of a quorum, by frames, beside the training.

    The training's thread calls `add_up` and `finish`; what begins with an underscore and ends with `_job` runs in the
    exchange thread; any thread may call `fail` and `leave`. After an error every sum fails at once, and the connections
    to all replicas are closed, those of `beside` too, so that nobody waits for this one.
    """

    def __init__(
        self, group: dist.ProcessGroup, recipes: ModelRecipes, memories: WorkerMemories, ledger: StepLedger,
        beside: Sequence[UnregisteredLink] = (),
    ):  # fmt: skip
        self.link, self._beside = UnregisteredLink(group), beside
        coder = MessageCoder(recipes, memories, ledger, self.link.rank, self.link.world)
        self._recipes = recipes
        messages = PartialMessages(coder, StepTensors(memories), sums=True)
        self._exchange, self._thread = AllGatherExchange(messages, self.link), ExchangeThread()
        self._copies: dict[str, HostCopies] = {}
        self._lock, self._under_way = threading.Lock(), set[SumUnderWay]()
        self.error: Exception | None = None

    def add_up(self, name: str, tensor: torch.Tensor, then: Callable[[], None] = lambda: None) -> SumUnderWay:
        """Begin to replace the tensor by its sum over all replicas; `then` is called in the end, before it is over."""
        copies = self._copies.setdefault(name, HostCopies(self._recipes))
        ready = copies.mark_ready([(name, tensor)])
        messages = split_into_messages([(name, tensor)], self._recipes.by_pattern)
        work = SumUnderWay(tensor, len(messages), self._drain)
        with self._lock:
            error = self.error
            if error is None:
                self._under_way.add(work)
        if error is not None:
            work.fail(error)
            return work
        for i, parts in enumerate(messages):
            self._thread.submit(functools.partial(self._message_job, (name, i), parts, copies, ready, then, work))
        return work

    def before_next(self, task: Callable[[], None]) -> None:
        """Have something done in the exchange thread, before the next sum is begun; all replicas do, or none."""
        self._thread.submit(functools.partial(self._task_job, task))

    def finish(self) -> None:
        """Wait until all sums are over, well or not."""
        self._drain()

    def fail(self, error: Exception) -> None:
        """Let all sums fail with this error, here and, in its wake, on the other replicas."""
        with self._lock:
            self.error = self.error or error
            failed, self._under_way = self._under_way, set()
        for work in failed:
            work.fail(error)
        for link in (self.link, *self._beside):
            link.cut()

    def leave(self, seconds: float) -> None:
        """Leave these replicas: nothing is written to any tensor or memory afterwards.

        AggregateError if an exchange is still under way after so many seconds.
        """
        self.fail(AggregateError("the quorum has changed while an exchange was under way"))
        if not self._thread.end(seconds):
            raise AggregateError(f"an exchange of the last quorum did not end within {seconds:g} s")

    def _drain(self) -> None:
        """Finish the exchanges: what did not fit into the room that others had made for it is sent only now."""
        try:
            self._thread.drain()
        except Exception as error:
            self.fail(error)

    # ── in the exchange thread ──

    def _message_job(
        self, key: Hashable, parts: list[TensorPart], copies: HostCopies, ready: list[torch.cuda.Event],
        then: Callable[[], None], work: SumUnderWay,
    ) -> Exchange:  # fmt: skip
        try:
            yield from self._exchange.run(key, copies.of_parts(parts, ready))
            if work.message_came():
                copies.put_back(wait=True)
                copies.clear()
                then()
                if work.tensor.is_cuda:  # whoever waits for the sum goes on in another stream
                    torch.cuda.current_stream(work.tensor.device).synchronize()
                with self._lock:  # whoever takes a sum out of the set says how it ended
                    is_under_way = work in self._under_way
                    self._under_way.discard(work)
                if is_under_way:
                    work.succeed()
        except Exception as error:
            self.fail(error)
            raise

    def _task_job(self, task: Callable[[], None]) -> Exchange:
        try:
            task()
        except Exception as error:
            self.fail(error)
            raise
        yield from ()
