"""A step without compression: gradients are averaged by a process group's own all-reduce, started where they are ready.

This is what `auto` does where compression does not pay, so it has to cost as little as DDP without a hook: there is no
exchange thread, nothing is copied, and on a GPU the host waits for nothing. Only the first such step has more to do: it
sends along what is left in the error memories.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.distributed as dist

from gradwire.aggregate.exchanges.gradient_exchange import GradientExchange
from gradwire.aggregate.messages.tensor_parts import NamedTensors
from gradwire.aggregate.transport.link import Link
from gradwire.torch_internals.tensors import divide_all


class PlainStep:
    """The tensors of the plain step under way, which are averaged in place, and the error memories that go with them.

    Either the framework starts the all-reduces and tells so (`started`), or `start` does, over the link. The training's
    thread calls everything.
    """

    def __init__(self, link: Link, exchange: GradientExchange):
        self._link, self._exchange = link, exchange
        self._errors = exchange.coder.memories.errors
        self._futures: list[torch.futures.Future[torch.Tensor]] = []
        self._works: list[dist.Work] = []
        self._tensors: list[torch.Tensor] = []
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []  # of tensors that are not contiguous
        self._touched: set[str] = set()
        self._missing: dict[str, torch.Tensor] = {}
        self._sent_along: dict[str, torch.Tensor] = {}

    @property
    def has_memories(self) -> bool:
        """Whether something is left in the error memories, so that `add_memories` has to be called."""
        self._exchange.settle()
        return bool(self._errors.memory)

    @torch.no_grad()
    def add_memories(self, tensors: NamedTensors) -> None:
        """Add to the tensors what is left in their error memories, which are empty from now on."""
        self._exchange.follow_loss_scale()
        for name, tensor in tensors:
            memory = self._errors.forget(name)
            if memory is not None:
                self._sent_along[name] = memory
                tensor.add_(memory.to(tensor.device).view(tensor.shape))

    def started(self, future: torch.futures.Future[torch.Tensor], buffer: torch.Tensor, sent: torch.Tensor) -> None:
        """Take note of an all-reduce of this buffer, or of a copy of it, that was started elsewhere."""
        self._futures.append(future)
        self._note(buffer, sent.nbytes)
        if sent is not buffer:
            self._copies.append((buffer, sent))

    @torch.no_grad()
    def start(self, tensors: NamedTensors, missing: Collection[str], halved: bool) -> None:
        """Begin to average the tensors; those that are `missing` have no gradient on this rank, and are zero.

        If they are `halved`, fp32 travels as bf16.
        """
        self._exchange.check_in_step()
        if self.has_memories:
            self.add_memories(tensors)
        alike: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for name, tensor in tensors:
            if name in missing:
                self._missing[name] = tensor
            else:
                self._touched.add(name)
            dtype = torch.bfloat16 if halved and tensor.dtype == torch.float32 else tensor.dtype
            self._note(tensor, tensor.numel() * dtype.itemsize)
            if self._link.world > 1 and tensor.numel():
                sent = self._as_sent(tensor, dtype)
                alike.setdefault((sent.dtype, sent.device), []).append(sent)
        for group in alike.values():
            divide_all(group, self._link.world)  # before the sum, which might be too large for fp16
            self._all_reduce(group)

    def _note(self, tensor: torch.Tensor, sent_bytes: int) -> None:
        self._tensors.append(tensor)
        self._exchange.coder.ledger.count_frame_bytes(sent_bytes)
        self._link.count_all_reduce(sent_bytes)

    def _as_sent(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor itself, or a copy: in another dtype or order, or where the group takes it."""
        sent = tensor.detach().to(dtype).contiguous()
        if not (sent.is_cuda and self._link.takes_gpu):
            sent = sent.to(self._link.device)
        if sent.data_ptr() != tensor.data_ptr():
            self._copies.append((tensor, sent))
        return sent

    def _all_reduce(self, tensors: list[torch.Tensor]) -> None:
        try:
            work = self._link.group.allreduce_coalesced(tensors, dist.AllreduceCoalescedOptions())
        except RuntimeError as error:
            cause = self._link.diagnose(error)
            self._exchange.abandon_step(cause)
            raise cause from error
        if tensors[0].is_cuda:  # its stream waits, and not the host
            self._futures.append(work.get_future())
        else:
            self._link.note_started()
            self._works.append(work)

    def finish(self) -> set[str]:
        """End the step when all tensors are means; return the names of those that any rank has a gradient of."""
        if self._link.world > 1 or self._sent_along or self._copies:
            self._wait()
        for tensor, sent in self._copies:
            tensor.detach().copy_(sent)
        if self._sent_along and not all(bool(tensor.isfinite().all()) for tensor in self._tensors):
            self._return_memories()  # a GradScaler will skip this step
        touched = self._touched | {name for name, mean in self._missing.items() if bool(mean.any())}
        self._forget()
        self._exchange.coder.end_step()
        self._link.at_step(self._exchange.coder.ledger.steps)
        return touched

    def _wait(self) -> None:
        try:
            with self._exchange.coder.ledger.waiting():
                for work in self._works:
                    self._link.wait(work)
                self._link.wait_for(self._futures)  # DDP would do so next, and raise errors that name nobody
        except BaseException as error:
            self._exchange.abandon_step(error)  # ranks are no longer in step
            raise

    def abandon(self) -> None:
        """Give up the step: memories are as they were before it."""
        self._return_memories()
        self._forget()

    def _return_memories(self) -> None:
        for name, memory in self._sent_along.items():
            self._errors.replace(name, memory)

    def _forget(self) -> None:
        self._futures, self._works, self._tensors, self._copies = [], [], [], []
        self._touched, self._missing, self._sent_along = set(), {}, {}
