"""A process group, the collectives that frames travel by, and the bytes that this rank moved through them.

Everything is started asynchronously and in the order of the calls; `wait` turns torch's errors into AggregateError.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from gradwire.aggregate.peers.attendance import Attendance
from gradwire.aggregate.peers.diagnosis import COMPUTING, WAITING, explain, wait
from gradwire.aggregate.peers.handshake import Facts, compare
from gradwire.aggregate.peers.roll_call import RollCall
from gradwire.aggregate.transport.gloo_wait import ThreadedWait
from gradwire.errors import AggregateError, GradwireError

# torch 2.13 renamed them and warns about the old names.
_all_gather_tensor = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_tensor = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Link:
    def __init__(self, group: dist.ProcessGroup | None = None):
        group = group or (dist.group.WORLD if dist.is_initialized() else None)
        if group is None:
            raise AggregateError("no process group: call torch.distributed.init_process_group first")
        self.group: dist.ProcessGroup = group
        self.world, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.device = torch.device("cuda" if only_on_gpus(group) else "cpu")  # where messages have to be
        # Gloo takes a message that is shorter than the room made for it.
        self.exact_lengths = self.device.type == "cpu" and "cpu:gloo" in dist.get_backend_config(group)
        self.can_or = self.device.type == "cpu"  # NCCL cannot
        # By this rank: copies to every peer, padding and lengths included.
        self.bytes_sent = self.bytes_received = 0
        self.roll_call: RollCall | None = None
        self._attendance: Attendance | None = None

    @classmethod
    def beside(cls, group: dist.ProcessGroup | None, seconds: float | None = None) -> Link:
        """A group of our own with the same ranks, whose collectives cannot get between those of the training.

        All ranks of the group have to call it. Peers are waited for as long as in the given group, or so many seconds.
        """
        given = cls(group)
        timeout = datetime.timedelta(seconds=seconds) if seconds else timeout_of(given.group)
        ranks = dist.get_process_group_ranks(given.group)
        backend = dist.get_backend_config(given.group)
        attendance = Attendance(given.group, given.rank, given.world)
        try:
            everyone = len(ranks) == dist.get_world_size()
            if not everyone:
                given._count_groups_alike()
            link = cls(dist.new_group(ranks, timeout, backend, use_local_synchronization=not everyone))
        except RuntimeError as error:
            raise attendance.missed(error, ranks, timeout.total_seconds()) from error
        link._attendance = attendance
        return link

    def _count_groups_alike(self) -> None:
        """torch names a group that not all ranks make after its ranks and the number of groups that a rank is in. That
        differs between ranks if the training has others, and they would wait for each other under different names."""
        number = torch.tensor([len(dist.distributed_c10d._world.pg_names)], device=self.device)
        most = number.clone()
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.group)
        for _ in range(int(most) - int(number)):
            dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)

    @classmethod
    def among(cls, ranks: Sequence[int], like: Link) -> Link:
        """A group of some of the ranks; all of the group call it, for the same groups in the same order."""
        backend = dist.get_backend_config(like.group)
        everyone = dist.get_process_group_ranks(like.group)
        chosen = [everyone[rank] for rank in ranks]
        try:
            link = cls(dist.new_group(chosen, timeout_of(like.group), backend, use_local_synchronization=True))
        except RuntimeError as error:
            raise like.diagnose(error) from error
        link.roll_call = like.roll_call
        return link

    def close(self) -> None:
        """Give back the sockets and threads of a group that `beside` made; all of its ranks do so.

        Not of a group of some ranks: torch would give its name to the next one, which would find the old addresses.
        """
        if dist.is_initialized() and self.world == dist.get_world_size():
            with suppress(ValueError, RuntimeError):  # it is gone already
                dist.destroy_process_group(self.group)

    # ── agreement, and the loss of it ──

    def agree(self, facts: Mapping[str, str], tensors: Facts) -> None:
        """AggregateError on all ranks, unless all have the same facts and tensors."""
        roll_call = self.roll_call or RollCall(self.rank, dist.get_process_group_ranks(self.group))
        try:
            compare(self, facts, tensors, roll_call)
        except AggregateError as error:
            if self._attendance is not None and isinstance(error.__cause__, RuntimeError):  # no answer at all
                timeout = timeout_of(self.group).total_seconds()
                raise self._attendance.missed(error.__cause__, roll_call.ranks, timeout) from error
            raise
        self.roll_call = roll_call

    def at_step(self, step: int) -> None:
        """What this rank says if it is asked where it is."""
        if self.roll_call is not None:
            self.roll_call.at(COMPUTING, step)

    def diagnose(self, error: RuntimeError) -> AggregateError:
        """What torch's error means: who is lost, if that can be found out."""
        if self.roll_call is None:
            return AggregateError(f"lost a peer, or it did not answer within the process group's timeout: {error}")
        return AggregateError(explain(self.roll_call, error, timeout_of(self.group).total_seconds()))

    def give_up(self, error: BaseException) -> None:
        """Tell the others why this rank leaves them."""
        if self.roll_call is None or self.roll_call.board.own.failed:
            return
        if isinstance(error, AggregateError):
            self.roll_call.tell(str(error).replace("this rank", f"rank {dist.get_rank()}"))  # others will say it
        elif not isinstance(error, GradwireError):  # those are raised on all ranks, which may go on together
            self.roll_call.tell(f"rank {dist.get_rank()} failed: {type(error).__name__}: {error}")

    # ── collectives ──

    def all_gather(self, block: torch.Tensor) -> tuple[torch.Tensor, dist.Work]:
        """The blocks of all ranks, which are equally long, end to end."""
        block = block.to(self.device)
        gathered = torch.empty(self.world * len(block), dtype=block.dtype, device=self.device)
        self._count(block, self.world - 1, self.world - 1)
        return gathered, self._started(_all_gather_tensor, gathered, block)

    def all_to_all(
        self, parts: Sequence[torch.Tensor], sizes_in: Sequence[int], into: torch.Tensor
    ) -> tuple[torch.Tensor, dist.Work]:
        """parts: what goes to each rank; what comes from each is put into `into`, end to end, each at its size.

        What was received is for the caller to count: it may be less than there is room for (`exact`).
        """
        filled = [part for part in parts if len(part)]
        blocks = filled[0] if len(filled) == 1 else torch.cat(filled) if filled else parts[0]
        blocks = blocks.to(self.device)
        sizes_out = [len(part) for part in parts]
        self.bytes_sent += (len(blocks) - sizes_out[self.rank]) * blocks.element_size()
        return into, self._started(dist.all_to_all_single, into, blocks, list(sizes_in), sizes_out)

    def reduce_scatter(self, parts: torch.Tensor) -> tuple[torch.Tensor, dist.Work]:
        """The sum over all ranks of this rank's part; parts has one for each, equally long, end to end."""
        own = torch.empty(len(parts) // self.world, dtype=parts.dtype, device=parts.device)
        self._count(own, self.world - 1, self.world - 1)
        return own, self._started(reduce_scatter_tensor, own, parts)

    def all_reduce(self, tensor: torch.Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> dist.Work:
        """The tensor becomes the sum over all ranks, or what another operation makes of them."""
        self.count_all_reduce(tensor.nbytes)
        return self._started(dist.all_reduce, tensor, operation)

    def count_all_reduce(self, size: int) -> None:
        moved = 2 * size * (self.world - 1) // self.world
        self.bytes_sent += moved
        self.bytes_received += moved

    def send_and_receive(self, sent: dict[int, torch.Tensor], received: dict[int, torch.Tensor]) -> None:
        """Blocks for some ranks and from some ranks, each of which knows of it."""
        operations = [self._p2p(dist.irecv, block, rank) for rank, block in sorted(received.items())]
        operations += [self._p2p(dist.isend, block, rank) for rank, block in sorted(sent.items())]
        self.bytes_sent += sum(len(block) for block in sent.values())
        self.bytes_received += sum(len(block) for block in received.values())
        try:
            under_way = dist.batch_isend_irecv(operations) if operations else []
        except RuntimeError as error:
            raise self.diagnose(error) from error
        if self.device.type == "cpu":
            self.wait(ThreadedWait(under_way))
        else:
            for work in under_way:
                self.wait(work)

    def _p2p(self, operation: Callable[..., Any], block: torch.Tensor, rank: int) -> dist.P2POp:
        return dist.P2POp(operation, block, group=self.group, group_peer=rank)

    def gather_short(self, message: bytes) -> list[bytes]:
        """The messages of all ranks, which are all equally long."""
        gathered, work = self.all_gather(torch.frombuffer(bytearray(message), dtype=torch.uint8))
        self.wait(work)
        return [bytes(m.numpy()) for m in gathered.cpu().view(self.world, len(message))]

    def broadcast(self, tensor: torch.Tensor) -> None:
        """All ranks get rank 0's tensor."""
        sent = tensor.detach().to(self.device, memory_format=torch.contiguous_format)
        self.wait(self._started(dist.broadcast, sent, dist.get_global_rank(self.group, 0)))
        self._count(sent, children(self.rank, self.world), int(self.rank > 0))
        if sent.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(sent)

    def _started(self, collective: Callable[..., dist.Work | None], *arguments: Any) -> dist.Work:
        try:
            work = collective(*arguments, group=self.group, async_op=True)
        except RuntimeError as error:
            raise self.diagnose(error) from error
        assert work is not None
        return work

    def wait(self, work: dist.Work | ThreadedWait) -> None:
        try:
            wait(work, self.roll_call, timeout_of(self.group).total_seconds() if self.device.type == "cuda" else 0.0)
        except RuntimeError as error:
            raise self.diagnose(error) from error

    def wait_for(self, futures: Iterable[torch.futures.Future]) -> None:
        """Wait for collectives that others have started, by DDP's own way, among the same ranks."""
        if self.roll_call is not None:
            self.roll_call.at(WAITING)
        try:
            for future in futures:
                future.wait()
        except RuntimeError as error:
            raise self.diagnose(error) from error
        if self.roll_call is not None:
            self.roll_call.at(COMPUTING)

    def _count(self, block: torch.Tensor, sent: int, received: int) -> None:
        size = block.numel() * block.element_size()
        self.bytes_sent += sent * size
        self.bytes_received += received * size


def only_on_gpus(group: dist.ProcessGroup) -> bool:
    """Whether it takes no tensors on the CPU; by default torch makes groups that take both."""
    backend = dist.get_backend_config(group)
    return "nccl" in backend and "cpu:" not in backend.replace("cpu:nccl", "")


def timeout_of(group: dist.ProcessGroup) -> datetime.timedelta:
    device = torch.device("cuda" if only_on_gpus(group) else "cpu")
    return group._get_backend(device).options._timeout


def children(rank: int, world: int) -> int:
    """To how many ranks this one passes a broadcast on: Gloo's binomial tree, in which r has its bits above it."""
    lowest = rank & -rank or world
    return sum(1 for i in range(world.bit_length()) if 1 << i < lowest and rank + (1 << i) < world)
