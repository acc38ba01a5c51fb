"""A process group, the collectives that messages travel by, and the bytes that this rank moved through them."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist

from gradwire.aggregate.peers import interpreter_exit
from gradwire.aggregate.peers.attendance import Attendance
from gradwire.aggregate.peers.diagnosis import COMPUTING, WAITING, Work, explain, wait
from gradwire.aggregate.peers.handshake import Facts, check_agreement
from gradwire.aggregate.peers.meeting import meet
from gradwire.aggregate.peers.roll_call import RollCall
from gradwire.aggregate.transport.gloo_wait import ThreadedWait
from gradwire.correct.complex_pairs import as_reals
from gradwire.errors import AggregateError, GradwireError
from gradwire.torch_internals import process_groups

# torch 2.13 renamed them and warns about the old names.
_all_gather_tensor = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_tensor = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Link:
    """One process group, as all exchanges of gradwire use it.

    It promises that collectives are started in the order of the calls, without waiting for them; that errors of torch
    become AggregateError, which names the rank at fault where that can be found out (`diagnose`); and that
    `bytes_sent` and `bytes_received` count what this rank has moved, with copies to every peer, padding and lengths.

    All ranks call its collectives in the same order. So one thread at a time uses a link: the exchange thread while
    exchanges are under way, and the training's thread before and after. `at_step` and `give_up` may be called from
    either at any time. A link that `beside` made has a process group of its own, so that its collectives cannot get
    between those of the training. A link never retries, never reads what it carries, and never ends the process.
    """

    def __init__(self, group: dist.ProcessGroup | None = None):
        group = group or (dist.group.WORLD if dist.is_initialized() else None)
        if group is None:
            raise AggregateError(
                "no process group: start the script with torchrun (--nproc-per-node 1 for one process), and call "
                "torch.distributed.init_process_group in it first"
            )
        if not isinstance(group, dist.ProcessGroup):  # torch gives ranks that are not in a new group something else
            raise AggregateError(
                f"{group!r} is no process group that this rank is in: leave this rank out, or pass another"
            )
        self.group: dist.ProcessGroup = group
        self.closed = False
        self._under_way = 0  # collectives that were started and not waited for
        interpreter_exit.watch(self)
        self.world, self.rank = group.size(), group.rank()
        backends = process_groups.backends_of(group)
        self.device = torch.device("cuda" if only_on_gpus(group) else "cpu")  # where messages have to be
        self.takes_gpu = "cuda:nccl" in backends  # tensors on a GPU, maybe beside "cpu:gloo"
        # Gloo takes a message that is shorter than the room made for it; NCCL wants both sides to name one length.
        self.exact_lengths = self.device.type == "cpu" and "cpu:gloo" in backends
        self.can_or = self.device.type == "cpu"  # NCCL cannot
        self.follows_stream = True  # collectives come after what is queued on the stream, and what is queued after them
        self.bytes_sent = self.bytes_received = 0
        self.roll_call: RollCall | None = None
        self._attendance: Attendance | None = None

    @classmethod
    def attending(cls, group: dist.ProcessGroup | None) -> Link:
        """Return a link over the group itself, which names the ranks that do not come to the first `agree`.

        All ranks of the group have to call it.
        """
        link = cls(group)
        link._attendance = Attendance(link.group, link.rank, link.world)
        return link

    @classmethod
    def beside(cls, group: dist.ProcessGroup | None, seconds: float | None = None) -> Link:
        """Return a link with a new group of the same ranks, whose collectives cannot meet those of the training.

        All ranks of the group have to call it. Peers are waited for as long as in that group, or this many seconds.
        """
        model = cls(group)
        timeout = datetime.timedelta(seconds=seconds) if seconds else timeout_of(model.group)
        ranks = dist.get_process_group_ranks(model.group)
        backend = dist.get_backend_config(model.group)
        attendance = Attendance(model.group, model.rank, model.world)
        try:
            link = cls(process_groups.new_group(attendance.name, ranks, timeout, backend))
        except RuntimeError as error:
            raise attendance.error_naming_absent(error, ranks, timeout.total_seconds()) from error
        link._attendance = attendance
        return link

    @classmethod
    def among(cls, ranks: Sequence[int], like: Link, purpose: str) -> Link:
        """Return a link with a new group of some ranks of `like`, which `beside` made.

        Every rank calls it for the groups that it is in. Of the same purpose there is one group with a rank.
        """
        backend = dist.get_backend_config(like.group)
        everyone = dist.get_process_group_ranks(like.group)
        chosen = [everyone[rank] for rank in ranks]
        name = f"{like.group.group_name}/{purpose}/{chosen[0]}"
        try:
            link = cls(process_groups.new_group(name, chosen, timeout_of(like.group), backend))
        except RuntimeError as error:
            raise like.diagnose(error) from error
        link.share_roll_call(like)
        return link

    @classmethod
    def alone(cls, like: Link) -> Link:
        """Return a link with a new group of this rank only; all ranks of `like` make one."""
        name = f"{Attendance(like.group, like.rank, like.world).name}/alone/{dist.get_rank()}"
        backend = dist.get_backend_config(like.group)
        return cls(process_groups.new_group(name, [dist.get_rank()], timeout_of(like.group), backend))

    def close(self) -> None:
        """Give back the sockets and threads of a group that this class made; all of its ranks call this."""
        self.closed = True
        if dist.is_initialized():
            with suppress(ValueError, RuntimeError):  # it is gone already
                dist.destroy_process_group(self.group)

    # ── agreement, and errors that name a rank ──

    def agree(self, facts: Mapping[str, str], tensors: Facts) -> None:
        """Raise AggregateError on all ranks, unless all have the same facts and tensors.

        From then on, ranks can ask each other what they are doing (`RollCall`).
        """
        roll_call = self.roll_call or RollCall(self.rank, dist.get_process_group_ranks(self.group))
        try:
            check_agreement(self, facts, tensors, roll_call)
        except AggregateError as error:
            # No answer at all, and nobody to ask for the reason yet.
            if self._attendance is not None and self.roll_call is None and isinstance(error.__cause__, RuntimeError):
                timeout = timeout_of(self.group).total_seconds()
                raise self._attendance.error_naming_absent(error.__cause__, roll_call.ranks, timeout) from error
            raise
        self.roll_call = roll_call

    @contextmanager
    def together(self, call: str) -> Iterator[None]:
        """Begin the block when all ranks are in this call of the user's; the block's collectives may be of any group.

        AggregateError on all ranks if some do not come, or if one is lost while the block's collectives run.
        """
        self._meet(call)
        try:
            yield
        except RuntimeError as error:  # what torch raises
            if isinstance(error, GradwireError):
                raise
            raise self.diagnose(error) from error

    def _meet(self, call: str) -> None:
        if self.roll_call is not None and self.world > 1:
            if self.roll_call.status.has_failed():
                raise AggregateError(f"{call} has to reach all ranks, and an exchange with them has failed before")
            try:
                meet(self.roll_call, call, timeout_of(self.group).total_seconds())
            except AggregateError as error:
                self.give_up(error)
                raise

    def share_roll_call(self, other: Link) -> None:
        """Use the roll call of a link whose ranks have agreed already."""
        self.roll_call = other.roll_call

    def follow(self, other: Link) -> None:
        """Take the place of a link with the same ranks, which have agreed there: its bytes count here."""
        self.share_roll_call(other)
        self.bytes_sent += other.bytes_sent
        self.bytes_received += other.bytes_received

    def at_step(self, step: int) -> None:
        """Note that this rank computes in this step: what it says if another rank asks."""
        if self.roll_call is not None:
            self.roll_call.set_activity(COMPUTING, step)

    def diagnose(self, error: RuntimeError) -> AggregateError:
        """Return what an error of torch means: an AggregateError that says who is lost, if that can be found out."""
        if self.roll_call is None:
            return AggregateError(f"lost a peer, or it did not answer within the process group's timeout: {error}")
        return AggregateError(explain(self.roll_call, error, timeout_of(self.group).total_seconds()))

    def give_up(self, error: BaseException) -> None:
        """Tell the other ranks why this one leaves them, unless it has told them already."""
        if self.roll_call is None or self.roll_call.status.has_failed():
            return
        if isinstance(error, AggregateError):  # the others will quote it
            cause = str(error).replace("this rank", f"rank {dist.get_rank()}")
        elif isinstance(error, GradwireError):  # those are raised on all ranks, which may go on together
            return
        else:
            cause = f"rank {dist.get_rank()} failed: {type(error).__name__}: {error}"
        self.roll_call.announce_failure(cause, await_answers=True)

    # ── collectives ──

    def all_gather(self, block: torch.Tensor) -> tuple[torch.Tensor, dist.Work]:
        """Start to gather the blocks of all ranks, which are equally long, end to end."""
        block = block.to(self.device)
        gathered = torch.empty(self.world * len(block), dtype=block.dtype, device=self.device)
        return gathered, self.all_gather_into(gathered, block)

    def all_gather_into(self, gathered: torch.Tensor, block: torch.Tensor) -> dist.Work:
        """Start to gather the blocks of all ranks, which are equally long, end to end into a tensor for them."""
        self._count(block, self.world - 1, self.world - 1)
        return self._started(_all_gather_tensor, gathered, block)

    def all_to_all(
        self, parts: Sequence[torch.Tensor], sizes_in: Sequence[int], into: torch.Tensor
    ) -> tuple[torch.Tensor, dist.Work]:
        """Start to send parts[r] to each rank r, and to receive sizes_in[r] entries from it into `into`, end to end.

        The caller counts what was received (`count_received`): it may be less than the room for it (`exact_lengths`).
        """
        # Of a rank's messages some may be on a GPU, and others, which the host had to make, in its memory.
        filled = [part.to(self.device) for part in parts if len(part)]
        blocks = filled[0] if len(filled) == 1 else torch.cat(filled) if filled else parts[0].to(self.device)
        sizes_out = [len(part) for part in parts]
        self.bytes_sent += (len(blocks) - sizes_out[self.rank]) * blocks.element_size()
        return into, self._started(dist.all_to_all_single, into, blocks, list(sizes_in), sizes_out)

    def reduce_scatter(self, parts: torch.Tensor) -> tuple[torch.Tensor, dist.Work]:
        """Start to sum this rank's part over all ranks; `parts` has one for each rank, equally long, end to end."""
        part = torch.empty(len(parts) // self.world, dtype=parts.dtype, device=parts.device)
        self._count(part, self.world - 1, self.world - 1)
        return part, self._started(reduce_scatter_tensor, part, parts)

    def all_reduce(self, tensor: torch.Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> dist.Work:
        """Start to replace the tensor by its sum over all ranks, or by what another operation makes of them."""
        self.count_all_reduce(tensor.nbytes)
        return self._started(dist.all_reduce, tensor, operation)

    def count_all_reduce(self, size: int) -> None:
        """Count the bytes that an all-reduce of `size` bytes moves; for those that others start in this group."""
        moved = 2 * size * (self.world - 1) // self.world
        self.bytes_sent += moved
        self.bytes_received += moved

    def count_received(self, size: int) -> None:
        """Count bytes that have come by `all_to_all`."""
        self.bytes_received += size

    def send_and_receive(self, sent: dict[int, torch.Tensor], received: dict[int, torch.Tensor]) -> None:
        """Send blocks to some ranks and receive blocks from some, which call this, too; wait until that is done."""
        self.bytes_sent += sum(len(block) for block in sent.values())
        self.bytes_received += sum(len(block) for block in received.values())
        try:
            under_way = self._start_p2p(sent, received)
        except RuntimeError as error:
            raise self.diagnose(error) from error
        if self.device.type == "cpu":
            self.wait(ThreadedWait(under_way))
        else:
            for work in under_way:
                self.wait(work)

    def _start_p2p(self, sent: dict[int, torch.Tensor], received: dict[int, torch.Tensor]) -> list[dist.Work]:
        operations = [self._p2p(dist.irecv, block, rank) for rank, block in sorted(received.items())]
        operations += [self._p2p(dist.isend, block, rank) for rank, block in sorted(sent.items())]
        return dist.batch_isend_irecv(operations) if operations else []

    def _p2p(self, operation: Callable[..., Any], block: torch.Tensor, rank: int) -> dist.P2POp:
        return dist.P2POp(operation, block, group=self.group, group_peer=rank)

    def gather_short(self, message: bytes) -> list[bytes]:
        """Return the messages of all ranks, which are equally long."""
        gathered, work = self.all_gather(torch.frombuffer(bytearray(message), dtype=torch.uint8))
        self.wait(work)
        return [bytes(m.numpy()) for m in gathered.cpu().view(self.world, len(message))]

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Fill the tensor with that of rank 0, on all ranks."""
        entries = as_reals(tensor.detach())
        sent = entries.to(self.device, memory_format=torch.contiguous_format)
        self.wait(self._started(dist.broadcast, sent, dist.get_global_rank(self.group, 0)))
        self._count(sent, children(self.rank, self.world), int(self.rank > 0))
        if sent.data_ptr() != entries.data_ptr():
            entries.copy_(sent)

    def _started(self, collective: Callable[..., dist.Work | None], *arguments: Any) -> dist.Work:
        try:
            work = collective(*arguments, group=self.group, async_op=True)
        except RuntimeError as error:
            raise self.diagnose(error) from error
        assert work is not None
        self.note_started()
        return work

    def note_started(self) -> None:
        """Count a collective of this group whose work goes to `wait` later."""
        self._under_way += 1

    @property
    def waits_for_peers(self) -> bool:
        """Whether a collective on the CPU is under way, or was given up."""
        return self._under_way > 0 and self.device.type == "cpu"

    def wait(self, work: dist.Work | ThreadedWait | Work) -> None:
        """Wait for a collective; AggregateError if it fails, or as soon as another rank says that it has failed."""
        try:
            wait(work, self.roll_call, timeout_of(self.group).total_seconds() if self.device.type == "cuda" else 0.0)
        except RuntimeError as error:
            raise self.diagnose(error) from error
        if isinstance(work, dist.Work):
            self._under_way = max(0, self._under_way - 1)

    def abort(self) -> None:
        """End collectives on a GPU that will not come through, so that its other work goes on; none can follow them."""
        if self.device.type == "cuda":
            with suppress(RuntimeError):
                self.group.abort()

    def wait_for(self, futures: Iterable[torch.futures.Future[Any]]) -> None:
        """Wait for collectives of the same ranks that were not started here, such as DDP's own."""
        if self.roll_call is not None:
            self.roll_call.set_activity(WAITING)
        try:
            for future in futures:
                future.wait()
        except RuntimeError as error:
            raise self.diagnose(error) from error
        if self.roll_call is not None:
            self.roll_call.set_activity(COMPUTING)

    def _count(self, block: torch.Tensor, sent: int, received: int) -> None:
        size = block.numel() * block.element_size()
        self.bytes_sent += sent * size
        self.bytes_received += received * size


def only_on_gpus(group: dist.ProcessGroup) -> bool:
    """Tell whether the group takes no tensors on the CPU; by default torch makes groups that take both."""
    backend = process_groups.backends_of(group)
    return "nccl" in backend and "cpu:" not in backend.replace("cpu:nccl", "")


def timeout_of(group: dist.ProcessGroup) -> datetime.timedelta:
    """Return how long collectives of the group wait for a peer."""
    device = torch.device("cuda" if only_on_gpus(group) else "cpu")
    return process_groups.timeout_of(group, device)


def children(rank: int, world: int) -> int:
    """Return how many ranks this one passes a broadcast on to.

    Gloo broadcasts by a binomial tree: rank r passes on to r + 2^i for all 2^i below the lowest bit that is set in r.
    """
    lowest = rank & -rank or world
    return sum(1 for i in range(world.bit_length()) if 1 << i < lowest and rank + (1 << i) < world)
