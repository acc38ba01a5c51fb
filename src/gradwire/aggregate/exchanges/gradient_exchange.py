"""The mean of gradients in every step, exchanged beside the backward pass: what DDP and DataParallel share.

`submit` hands over tensors as soon as they are there, and `finish_step` waits until all of them are means. In between
the exchange thread takes them, a message at a time, through one of these exchanges:

all_reduce.py        without frames; what is left in error memories is sent along
all_gather.py        every rank gets the frames of all ranks
unattended.py        the same between GPUs, without waiting
scatter_reduce.py    every shard has an owner, who averages it and sends the mean to all
hierarchical.py      in full precision on a host, and by one of the others between hosts
sums/sum_exchange.py for recipes whose integers are added up on their way, whatever the aggregation
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Any

import torch

from gradwire.aggregate.exchanges.all_gather import AllGatherExchange
from gradwire.aggregate.exchanges.all_reduce import AllReduceExchange
from gradwire.aggregate.exchanges.hierarchical import HierarchicalExchange
from gradwire.aggregate.exchanges.scatter_reduce import ScatterReduceExchange
from gradwire.aggregate.exchanges.unattended import UnattendedExchange
from gradwire.aggregate.messages.host_copies import HostCopies
from gradwire.aggregate.messages.message_coder import MessageCoder
from gradwire.aggregate.messages.partial_messages import PartialMessages
from gradwire.aggregate.messages.step_tensors import StepTensors
from gradwire.aggregate.messages.submissions import Submissions
from gradwire.aggregate.messages.tensor_parts import NamedTensors, TensorPart
from gradwire.aggregate.sums.sum_exchange import SumExchange
from gradwire.aggregate.sums.word_sums import ProcessGroupSums, WordSums
from gradwire.aggregate.transport.exchange_thread import Exchange, ExchangeThread, Pause
from gradwire.aggregate.transport.link import Link
from gradwire.catalogue.saved_recipes import check_saved_recipes
from gradwire.correct.saved_memories import read_memories
from gradwire.errors import AggregateError

ALL_GATHER, SCATTER_REDUCE, ALL_REDUCE = "all_gather", "scatter_reduce", "all_reduce"


class GradientExchange:
    """Averages the gradients of every step over all ranks, in place.

    The training's thread calls the methods; whatever begins with an underscore and ends with `_job` runs in the
    exchange thread. After an AggregateError ranks are no longer in step, and every later step raises it again: nothing
    is sent on a link whose other end may expect something else.

    `link` joins all ranks that average; with a `host`, the link among the ranks of one host, it joins one rank of each.
    `sums` adds up the words of recipes that can be summed, and `loss_scale` tells by what gradients are multiplied.
    """

    def __init__(
        self, coder: MessageCoder, link: Link, aggregate: str = ALL_GATHER, host: Link | None = None,
        sums: WordSums | None = None, loss_scale: Callable[[], float] | None = None,
    ):  # fmt: skip
        self.coder, self.link, self.host, self.aggregate = coder, link, host, aggregate
        self.messages = 0  # sent since the last `use`
        self._submissions = Submissions(coder.recipes, coder.known)
        self._makes_means: torch.cuda.Stream | None = None  # if the last step was not waited for
        self._is_settled, self._settle_job_over = True, threading.Event()
        self._settle_job_over.set()
        self._loss_scale, self._scaled_in = loss_scale, -1
        self._thread, self._host_copies = ExchangeThread(), HostCopies(coder.recipes)
        self._broken: AggregateError | None = None  # why the link cannot be used any more
        self._tensors = StepTensors(coder.memories, shared_host=host is not None)
        self._partial_messages = PartialMessages(coder, self._tensors)
        self._all_reduce = AllReduceExchange(coder, link, self._tensors)
        self._unattended = UnattendedExchange(self._partial_messages, link)
        self._all_gather = AllGatherExchange(self._partial_messages, link)
        self._scatter_reduce = ScatterReduceExchange(self._partial_messages, link)
        self._sums = SumExchange(coder, sums or ProcessGroupSums(link), self._tensors)
        self._hierarchical = host and HierarchicalExchange(coder, host, self._tensors, self._exchange_job)

    # ── in the training's thread ──

    @property
    def world(self) -> int:
        """The number of ranks whose gradients are averaged."""
        return self.link.world * (self.host.world if self.host else 1)

    def submit(
        self, key: Hashable, tensors: NamedTensors, missing: Collection[str] = (), lasting: bool = False
    ) -> None:
        """Begin to average the tensors, in place. Those that are `missing` have no gradient on this rank, and are zero.

        All ranks submit the same tensors under the same keys in the same order. Tensors that are `lasting` lie in the
        same place in every step, as DDP's buckets do; they are kept until the next step.
        """
        self.check_in_step()
        self._tensors.declare_missing(missing)
        self._submissions.add(key, tensors, self._host_copies.mark_ready(tensors), lasting)
        if self._submissions.suffice:
            self._send_submissions()

    def _send_submissions(self) -> None:
        """Hand what was submitted to the exchange thread."""
        for key, parts, ready in self._submissions.take():
            self._thread.submit(functools.partial(self._message_job, key, parts, ready))
            self.messages += 1

    def check_in_step(self) -> None:
        """Raise AggregateError if ranks are not in step: Gloo ends the process when blocks of other sizes come."""
        if self._broken is not None:
            raise AggregateError(f"an exchange has failed before: {self._broken}") from self._broken

    def use_long_messages(self) -> None:
        """Send longer messages from the next step on; all ranks call it, or none."""
        self._submissions.use_long_messages()

    def wait_for_nothing(self) -> None:
        """Let GPUs exchange messages unattended, where possible; all ranks call it, or none."""
        self._all_gather.use_unattended(self._unattended)

    def finish_step(self) -> set[str]:
        """Wait until all tensors of the step are means, and return the names of those that any rank has sent.

        On a GPU they may be means for the current stream only, when it comes so far. Memories are committed, or rolled
        back on all ranks if a gradient was not finite on any.
        """
        self._send_submissions()
        self._thread.submit(self._last_job)
        with self.coder.ledger.waiting():
            self._drain()
        if self._makes_means is not None:
            torch.cuda.current_stream(self._makes_means.device).wait_stream(self._makes_means)
        if not self._unattended.all_settled:
            self._is_settled = False
            self._settle_job_over.clear()
            self._thread.submit(self._settle_job)
        self._submissions.end_step()
        return self._tensors.take_touched()

    def settle(self) -> None:
        """Wait until the last step is over on the GPU, too, and memories and figures are those after it.

        An AggregateError in that step is raised here, or in the next step.
        """
        if not self._is_settled:
            self._drain()
            self._is_settled = True

    def _drain(self) -> None:
        try:
            self._thread.drain()
        except BaseException as error:
            self.abandon_step(error)
            raise

    def abandon_step(self, error: BaseException | None = None) -> None:
        """Give up the step under way, because of an error: memories are as they were before it."""
        if error is not None:
            self.link.give_up(error)
        if isinstance(error, AggregateError):
            self._broken = self._broken or error
        self._submissions.clear()
        self._scaled_in = -1
        self._settle_job_over.wait()  # the step before was a good one, and its memories count
        self._unattended.forget()
        self.coder.abandon_step()
        self._scatter_reduce.memory.abandon_step()
        self._all_reduce.end_step(finite=False)
        self._host_copies.clear()
        self._tensors.end_step()

    def use(self, aggregate: str) -> None:
        """Use another aggregation from the next step on, or another recipe, whose messages have other lengths."""
        self.settle()
        if self.aggregate == SCATTER_REDUCE:  # also if it stays: another recipe may have other shards
            self._send_for_all(self._scatter_reduce.take_memory())
        self.aggregate, self.messages = aggregate, 0
        self._all_gather.forget_lengths()
        self._scatter_reduce.forget_lengths()

    def close(self) -> None:
        """End the exchange thread, and leave the aggregator if there is one."""
        self._thread.close()
        self._sums.close()

    def follow_loss_scale(self) -> None:
        """Rescale the memories to the loss scale of now: exact for the powers of two that a GradScaler has."""
        if self._loss_scale is not None and self._scaled_in != self.coder.ledger.steps:
            self._scaled_in = self.coder.ledger.steps  # once in a step: to know the scale, a GPU is waited for
            scale, before = self._loss_scale(), self.coder.memories.scale
            if scale != before:
                self._scatter_reduce.memory.rescale(scale / before)
                self.coder.memories.rescale(scale)

    # ── in the exchange thread ──

    def _message_job(self, key: Hashable, parts: list[TensorPart], ready: list[torch.cuda.Event]) -> Exchange:
        """Take one message through the exchange."""
        parts = self._host_copies.of_parts(parts, ready)
        self.follow_loss_scale()  # behind `ready`: a GradScaler updates its scale on the training's stream
        return self._hierarchical.run(key, parts) if self._hierarchical else self._exchange_job(key, parts)

    def _exchange_job(self, key: Hashable, parts: list[TensorPart], last: bool = True) -> Exchange:
        """Exchange the parts among the ranks of `link`; no collective of this message follows the `last` exchange."""
        if parts and self.coder.recipes.of_part(parts[0]).sums and self.aggregate != ALL_REDUCE:
            return self._sums.run(key, parts)
        exchanges = {
            ALL_GATHER: self._all_gather.run,
            SCATTER_REDUCE: self._scatter_reduce.run,
            ALL_REDUCE: self._all_reduce.run,
        }
        return exchanges[self.aggregate](key, parts, last)

    def _last_job(self) -> Exchange:
        """End the step, when all other jobs are done."""
        yield Pause(lambda: False)
        recipes, memories = self.coder.recipes, self.coder.memories
        self.coder.momentum.accelerate(
            [
                (name, tensor)
                for name, tensor in self._host_copies.tensors.items()
                if memories.has_momentum(name)
                and not recipes.of_tensor(name, tensor.numel()).mask  # had its momentum before the exchange
                and not self._tensors.nobody_has(name)
            ]
        )
        attended = self._unattended.all_settled
        self._makes_means = self._host_copies.put_back(wait=attended)
        self.coder.ledger.count_step()
        self.link.at_step(self.coder.ledger.steps)
        self._host_copies.clear()
        self._tensors.end_step()
        if attended:
            self._commit()

    def _settle_job(self) -> Exchange:
        """Learn how a step went that nobody has waited for."""
        try:
            self._unattended.settle()
            self._commit()
        finally:
            self._settle_job_over.set()
        yield from ()

    def _commit(self) -> None:
        finite = self.coder.ledger.finite
        self._scatter_reduce.memory.end_step(finite)
        self.coder.commit()
        self._all_reduce.end_step(finite)
        self._unattended.end_step(finite)

    # ── what is kept ──

    def stats(self) -> dict[str, float]:
        """Return the totals of this rank since it was connected."""
        self.settle()
        figures = {
            **self.coder.ledger.stats(),
            "wire_bytes_sent": self.link.bytes_sent + self._sums.bytes_sent,
            "wire_bytes_received": self.link.bytes_received + self._sums.bytes_received,
        }
        if self.coder.recipes.any("sums"):
            figures["repairs"] = self._sums.repairs
        if self.host is not None:
            figures |= {"host_bytes_sent": self.host.bytes_sent, "host_bytes_received": self.host.bytes_received}
        return figures

    def state_dict(self) -> dict[str, Any]:
        """Return the memories of this rank; their mean over all ranks is what has not reached the parameters yet."""
        self.settle()
        state = self.coder.state_dict()
        if self._hierarchical:
            state["memory"] = self._hierarchical.on_behalf_of_host(state["memory"])
        shards = self._scatter_reduce.memory.state_dict(self.coder.memories.scale)
        grids = self._sums.state_dict()
        return {**state, **({"shards": shards} if shards else {}), **({"grids": grids} if grids else {})}

    def load_state_dict(
        self, state: Mapping[str, Any], names: Collection[str], equivalent: Collection[str] = (),
        arrange: Callable[[str, torch.Tensor], torch.Tensor] | None = None,
        saved_shapes: Mapping[str, torch.Size] | None = None,
    ) -> None:  # fmt: skip
        """Go on from a saved state; all ranks call it. `names` are the parameters of the model, where it is known.

        A state that does not fit is a CheckpointError, and changes nothing. Recipes whose names are `equivalent` may go
        on from each other's memories. `arrange` brings the saved tensors of a parameter, which have `saved_shapes`,
        into the order of gradients; without it they have that order already.
        """
        self.settle()
        coder = self.coder
        recipes, memories = coder.recipes, coder.memories
        shapes = recipes.shapes if saved_shapes is None else saved_shapes
        saved = read_memories(state, names, shapes, memories.errors.dtype)
        check_saved_recipes(state, recipes.by_pattern, saved.remembered, saved.accelerated, equivalent)
        scales = self._sums.read_state(state)
        if arrange is not None:
            saved = saved.arranged(arrange)
        self._scaled_in = -1
        coder.load(saved)
        self._sums.load(scales)
        self.link.at_step(coder.ledger.steps)
        if self.aggregate == SCATTER_REDUCE:
            self._scatter_reduce.memory.load(saved.shards)
        else:
            self._send_for_all(saved.shards)
        if self._hierarchical:
            self._hierarchical.share_memories()

    def _send_for_all(self, shards: dict[str, torch.Tensor]) -> None:
        """Let this rank send for itself what it had to send on behalf of all ranks."""
        for name, memory in shards.items():
            self.coder.memories.errors.add(name, memory, self.link.world)
