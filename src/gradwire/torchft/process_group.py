"""The process group that a torchft Manager gets: what it compresses, and when its replicas change."""

from __future__ import annotations

import datetime
from typing import Any

import torch
import torch.distributed as dist
from torchft.process_group import ProcessGroup as ReconfigurableGroup
from torchft.process_group import ProcessGroupWrapper

import torchft
from gradwire._version import __version__
from gradwire.aggregate.messages.model_recipes import ModelRecipes
from gradwire.aggregate.messages.step_ledger import StepLedger
from gradwire.aggregate.transport.link import only_on_gpus
from gradwire.aggregate.transport.unregistered_link import UnregisteredLink
from gradwire.catalogue.saved_recipes import KEY, check_saved_recipes
from gradwire.catalogue.spec_by_name import SMALL
from gradwire.codecs import CONVERTIBLE
from gradwire.correct.memory_dtype import memory_dtype
from gradwire.correct.saved_memories import read_memories
from gradwire.correct.worker_memories import WorkerMemories
from gradwire.engine.checks import check_recipes
from gradwire.errors import AggregateError, GradwireError, SpecError
from gradwire.torchft.meeting import Introduction, difference, furthest, introduce
from gradwire.torchft.replica_rounds import ReplicaRounds
from gradwire.torchft.replicas import Replicas
from gradwire.torchft.shared_means import EXACT, SharedMeans
from gradwire.torchft.sum_under_way import SumUnderWay

MINUTE = datetime.timedelta(seconds=60)


class ProcessGroup(ProcessGroupWrapper):
    """A process group for `torchft.Manager(pg=…)`, whose allreduce exchanges frames of the recipe `spec`.

    Sums and means of floating-point tensors with 4096 entries or more are compressed; everything else goes through the
    torchft process group `pg`, by default a ProcessGroupGloo. `timeout` is how long an exchange waits for a replica,
    and `memory` the dtype of the error memory, "fp32" or "bf16".

    It promises that all replicas get the same bits; that what a round has sent is taken from the error memory when
    torchft has committed the round, and not otherwise; and that a lost replica is an error in the future of the
    allreduce, within the timeout (docs/torchft.md). torchft calls `configure` from a thread of its own, and everything
    else from the one that trains; the two never at a time. It never gives a memory to another replica.
    """

    def __init__(
        self, spec: str, pg: ReconfigurableGroup | None = None, timeout: datetime.timedelta = MINUTE,
        memory: str = "fp32",
    ):  # fmt: skip
        recipes = _checked_recipes(spec)
        self._recipes, self._seconds = recipes, _checked_seconds(timeout)
        self._plain, self._carries_frames = pg or torchft.ProcessGroupGloo(timeout), torchft.ProcessGroupGloo(timeout)
        super().__init__(timeout, self._plain)
        self._memories, self._ledger = WorkerMemories(memory_dtype(memory)), StepLedger()
        self._rounds = ReplicaRounds(self._memories, self._ledger)
        self._means: SharedMeans | None = None  # if parameters are averaged
        self._replicas: Replicas | None = None
        self._refusal: GradwireError | None = None  # why this replica cannot go on
        self._dense_bytes = self._sent_before = self._received_before = 0

    # ── what torchft calls ──

    def configure(
        self, store_addr: str, replica_id: str, rank: int, world_size: int, quorum_id: int | None = None,
        group_rank: int | None = None, group_world_size: int | None = None, global_ranks: list[int] | None = None,
    ) -> None:  # fmt: skip
        """Go on with the replicas of another quorum, which meet at this store; all of them call it."""
        self._leave()
        try:
            self._rounds.interrupt()
        except GradwireError as error:
            self._refusal = error
            raise
        if self._means is not None:
            self._means.forget()
        more = replica_id, rank, world_size, quorum_id, group_rank, group_world_size, global_ranks
        super().configure(store_addr, *more)
        self._carries_frames.configure(f"{store_addr}/gradwire", *more)
        replicas = Replicas(
            self._carries_frames.parent, self._recipes, self._memories, self._ledger, _links_to_cut(self._plain)
        )
        try:
            self._meet(replicas)
        except BaseException as error:
            replicas.fail(AggregateError(f"the replicas could not meet: {error}"))
            raise
        self._replicas = replicas

    def allreduce(self, tensors: list[torch.Tensor], opts: dist.AllreduceOptions | dist.ReduceOp) -> dist.Work:
        """Begin to replace the tensor by its sum, or its mean, over all replicas."""
        operation: Any = opts.reduceOp if isinstance(opts, dist.AllreduceOptions) else opts
        # A ReduceOp equals the kind of operation that it is of, which does not equal it: so not `operation in (…)`.
        divide = operation == dist.ReduceOp.AVG
        if not (divide or operation == dist.ReduceOp.SUM) or len(tensors) != 1 or not _is_compressed(tensors[0]):
            return super().allreduce(tensors, opts)
        try:
            return self._add_up(tensors[0], divide)
        except GradwireError as error:  # torchft would note it and train on, without a single round that counts
            if not isinstance(error, AggregateError):
                self._refusal = error
            raise

    def errored(self) -> Exception | None:
        """Return the error of this round, if there was one, when all its exchanges are over.

        torchft asks when it begins to vote. A GradwireError is raised if this replica can never go on.
        """
        if self._refusal is not None:
            raise self._refusal
        self._rounds.begin_vote()
        if self._replicas is not None:
            self._replicas.finish()
            if self._replicas.error is not None:
                return self._replicas.error
        error: Exception | None = self._plain.errored()
        return error

    def abort(self, errored: bool = True) -> None:
        """End all exchanges under way with an error; `configure` makes the group usable again."""
        if self._replicas is not None:
            self._replicas.fail(AggregateError("the process group was aborted"))

    def shutdown(self) -> None:
        """End all exchanges, and leave the replicas."""
        self._leave()
        self._carries_frames.shutdown()
        self._plain.shutdown()

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Let exchanges wait so long for a replica, from the next quorum on."""
        self._seconds = _checked_seconds(timeout)
        self._carries_frames.set_timeout(timeout)
        self._plain.set_timeout(timeout)

    def getBackendName(self) -> str:
        """Return the name that torchft registers the group under."""
        return "gradwire"

    # ── what gradwire hears of torchft, and loops without a Manager call ──

    def end_round(self, committed: bool) -> None:
        """End the round as this replica has decided: what it has sent counts, or is undecided until the next quorum.

        `Manager.should_commit` is followed by it without your doing.
        """
        if self._means is not None:
            self._means.end(committed)
        self._rounds.end(committed)
        if not committed and self._replicas is not None:  # a replica that still waits for this one need not
            self._replicas.fail(AggregateError("this replica has discarded the round"))

    def expect_fragments(self, count: int) -> None:
        """Let the same tensors come again after `count` committed rounds, as in torchft's DiLoCo of so many fragments.

        DiLoCo is followed without your doing. Call it before the first round, on all replicas.
        """
        self._rounds.expect_fragments(count)

    def expect_parameters(self) -> None:
        """Exchange differences to the mean of the last round: what is averaged are parameters, not gradients.

        torchft's LocalSGD is followed without your doing. Call it before the first round, on all replicas.
        """
        self._means = SharedMeans(self._memories)

    # ── figures and checkpoints ──

    def stats(self) -> dict[str, float]:
        """Return the totals of this replica: those of a `gradwire.Handle`, of what was compressed."""
        link = self._replicas and self._replicas.link
        figures = self._ledger.stats()
        return {
            "steps": self._ledger.steps,
            **{name: figures[name] for name in ("frame_bytes", "encode_s", "decode_s")},
            "wire_bytes_sent": self._sent_before + (link.bytes_sent if link else 0),
            "wire_bytes_received": self._received_before + (link.bytes_received if link else 0),
            "dense_bytes": self._dense_bytes,
            "ratio": self._dense_bytes / figures["frame_bytes"] if figures["frame_bytes"] else 1.0,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return this replica's error memory, for a checkpoint of the whole training, between two rounds.

        Not for the `state_dict` of the Manager, which other replicas get.
        """
        return {"steps": self._ledger.steps, KEY: self._recipes.state_dict(), **self._memories.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved memory; before the first round, and only if all replicas start from that checkpoint."""
        saved = read_memories(state, (), {}, self._memories.errors.dtype)
        check_saved_recipes(state, self._recipes.by_pattern, saved.remembered, saved.accelerated)
        self._memories.load(saved)
        self._ledger.resume_at(saved.steps)

    # ── within ──

    def _add_up(self, tensor: torch.Tensor, divide: bool) -> SumUnderWay:
        replicas = self._replicas
        if replicas is None:
            raise AggregateError("there is no quorum: configure has not been called, or has failed")
        if replicas.error is not None:  # nothing of this round was, or will be, sent
            raise AggregateError(f"an exchange of this quorum has failed: {replicas.error}") from replicas.error
        name = self._rounds.next_call(tensor.shape)
        self._dense_bytes += 4 * tensor.numel()
        if self._means is not None and not divide:
            return self._means.begin(replicas, name, tensor)

        def finish() -> None:
            if divide:
                tensor.detach().div_(replicas.link.world)

        return replicas.add_up(name, tensor, finish)

    def _leave(self) -> None:
        """End the quorum, of which nothing goes on."""
        if self._replicas is not None:
            self._replicas.leave(self._seconds)
            self._sent_before += self._replicas.link.bytes_sent
            self._received_before += self._replicas.link.bytes_received
            self._replicas = None

    def _meet(self, replicas: Replicas) -> None:
        """Compare notes with the others, and settle what was undecided."""
        facts = {
            "gradwire": __version__,
            "spec": str(self._recipes.of("0.0")),
            "fragments": str(self._rounds.fragments),
            "averages": "parameters" if self._means else "gradients",
        }
        own = Introduction(facts, self._rounds.clock, self._rounds.committed)
        everyone = introduce(replicas.link, own)
        right = furthest(everyone)
        differing = {rank: difference(one, rank, everyone[right], right) for rank, one in enumerate(everyone)}
        if own_difference := differing[replicas.link.rank]:
            self._refusal = GradwireError(
                f"this replica does not fit the others ({own_difference}): all must have the same gradwire, the same "
                f"spec, and the same of torchft around them"
            )
            raise self._refusal
        if others := [text for text in differing.values() if text]:
            raise AggregateError(f"{'; '.join(others)}: it has to leave")
        self._rounds.go_on_with(everyone[0].lot, everyone[right].clock, everyone[right].committed)


def _checked_recipes(spec: str) -> ModelRecipes:
    if not isinstance(spec, str):
        raise SpecError("torchft hands over buckets without names: give one spec for all of them, such as 'co3'")
    recipes = ModelRecipes(spec)
    check_recipes(recipes, model_is_known=False)
    if recipes.any("mask"):
        raise SpecError("torchft shows a process group no optimizer, so momentum cannot be masked: add mask=off")
    if recipes.any("in_adam_units"):
        raise SpecError("torchft shows a process group no optimizer, whose second moments adam needs: use structured")
    if recipes.any("sums"):
        raise SpecError(f"{spec} is for sums that are made on their way; torchft's replicas exchange frames: use co3")
    return ModelRecipes({f"{EXACT}*": "none", "*": spec})


def _checked_seconds(timeout: datetime.timedelta) -> float:
    if not isinstance(timeout, datetime.timedelta) or timeout <= datetime.timedelta():
        raise SpecError(f"timeout must be a datetime.timedelta above 0, such as timedelta(seconds=60), not {timeout!r}")
    return timeout.total_seconds()


def _is_compressed(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is compressed: by its size and type alone, so that all replicas decide alike."""
    return tensor.dtype in CONVERTIBLE and tensor.is_floating_point() and tensor.numel() >= SMALL


def _links_to_cut(group: Any) -> list[UnregisteredLink]:
    """Return a link over what a torchft process group consists of, if that has to be cut by hand, as Gloo has to be."""
    inner = group.parent if isinstance(group, ProcessGroupWrapper) else None
    if type(inner) is not dist.ProcessGroup or only_on_gpus(inner):
        return []
    return [UnregisteredLink(inner)]
