"""Several workers as threads of one process: all of gradwire but the sockets.

For measuring accuracy on one GPU. Every message is a real block of real frames, laid out and counted as over a
network; only the exchange itself is a copy between threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from gradwire.aggregate.messages.frame_plan import FramePlan
from gradwire.aggregate.messages.message_coder import MessageCoder
from gradwire.aggregate.transport.link import Link


class Meeting:
    """Where the threads exchange their blocks."""

    def __init__(self, world: int):
        self.world = world
        self.blocks: list[Any] = [None] * world
        self.barrier = threading.Barrier(world)

    def share(self, rank: int, make: Callable[[], Any]) -> Any:
        """What `make` returns on rank 0, on all ranks; all wait for it, and rank 0 for them."""
        if rank == 0:
            self.made = make()
        self.barrier.wait()
        made = self.made
        self.barrier.wait()
        return made

    def exchange(self, rank: int, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        """What every rank has for this one."""
        self.blocks[rank] = parts
        self.barrier.wait()
        return [others[rank] for others in self.blocks]


class Done:
    """The work of a collective that is over."""

    def wait(self) -> None: ...

    def is_completed(self) -> bool:
        return True


class ThreadLink(Link):
    def __init__(self, meeting: Meeting, rank: int, device: torch.device):
        self.meeting, self.world, self.rank = meeting, meeting.world, rank
        self.device, self.exact_lengths, self.roll_call = device, True, None  # messages stay on a GPU
        self.bytes_sent = self.bytes_received = 0
        self.takes_gpu = self.follows_stream = False

    def all_to_all(self, parts: Sequence[torch.Tensor], sizes_in: Sequence[int], into: torch.Tensor) -> Any:
        self.bytes_sent += sum(part.nbytes for rank, part in enumerate(parts) if rank != self.rank)
        at = 0
        for own, size in zip(self.meeting.exchange(self.rank, list(parts)), sizes_in, strict=True):
            into[at : at + len(own)] = own
            at += size
        self.meeting.barrier.wait()  # before anybody writes to what was sent
        return into, Done()

    def send_and_receive(self, sent: dict[int, torch.Tensor], received: dict[int, torch.Tensor]) -> None:
        nothing = torch.empty(0, dtype=torch.uint8)
        parts = [sent.get(rank, nothing) for rank in range(self.world)]
        self.bytes_sent += sum(len(part) for part in parts)
        for rank, own in enumerate(self.meeting.exchange(self.rank, parts)):
            if rank in received:
                received[rank].copy_(own)
                self.bytes_received += len(own)
        self.meeting.barrier.wait()

    def wait(self, work: Any) -> None: ...

    def at_step(self, step: int) -> None: ...

    def gather_short(self, message: bytes) -> list[bytes]:
        return [message] * self.world

    def agree(self, facts: Any, tensors: Any) -> None: ...


def decode_once(coder: MessageCoder, meeting: Meeting, rank: int) -> None:
    """Let rank 0 alone decode and average: by contract all ranks would get the same bits (the tests check that)."""
    average_here, on_device = coder.average, coder.average_on_device

    def shared(plans: Sequence[FramePlan], compute: Callable[[], Any]) -> Any:
        def make() -> tuple[Any, list[torch.Tensor]]:
            coder.average_on_device = on_device  # type: ignore[method-assign]  # this rank alone, within `average`
            result = compute()
            coder.average_on_device = average_on_device  # type: ignore[method-assign]
            return result, [part.entries for plan in plans for part in plan.parts]

        result, made = meeting.share(rank, make)
        if rank and result is not False:
            for part, mean in zip((part for plan in plans for part in plan.parts), made, strict=True):
                part.entries.copy_(mean)
        meeting.barrier.wait()  # before rank 0 goes on with its tensors
        return result

    def average_on_device(plans: Sequence[FramePlan], messages: Any, present: Any, weight: Any) -> bool:
        return bool(shared(plans, lambda: on_device(plans, messages, present, weight)))

    def average(plans: Sequence[FramePlan], arrived: Sequence[Any], *weight: Any) -> None:
        shared(plans, lambda: average_here(plans, arrived, *weight))

    coder.average_on_device = average_on_device  # type: ignore[method-assign]
    coder.average = average  # type: ignore[method-assign]


class WholeModel:
    """All gradients of a model as the one bucket of a DDP step."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]):
        self._parameters = [p for p in parameters if p.grad is not None]

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True

    def parameters(self) -> list[torch.nn.Parameter]:
        return self._parameters

    def gradients(self) -> list[torch.Tensor]:
        """As DDP's buckets have them: with the parameter's shape, but the entries in the order of its memory."""
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        return [g.as_strided((g.numel(),), (1,)).view(g.shape) for g in gradients]

    def buffer(self) -> torch.Tensor:
        return torch.empty(sum(p.numel() for p in self._parameters), device="meta")


def run_workers(world: int, work: Callable[[int, Meeting], Any]) -> list[Any]:
    """What `work(rank, meeting)` returns on every thread; an error on one ends all."""
    meeting = Meeting(world)

    def guarded(rank: int) -> Any:
        try:
            return work(rank, meeting)
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(world) as pool:
        futures = [pool.submit(guarded, rank) for rank in range(world)]
        errors = [f.exception() for f in futures]
        real = [e for e in errors if e is not None and not isinstance(e, threading.BrokenBarrierError)]
        if real:
            raise real[0]
        return [f.result() for f in futures]
