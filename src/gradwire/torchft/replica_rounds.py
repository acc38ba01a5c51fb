"""The rounds of a replica: which tensor is which, and when memories count.

torchft's rounds may end in different ways on different replicas. One that was killed in the middle may have sent all of
its frames to some, who commit the round, and not to others, who then take the weights of those. Their own frames are in
these weights, so that their memories have to be those after the round. Whether somebody has committed it is known only
when the replicas meet again: until then the round is undecided, and both memories are kept.

A round is named by its quorum (a number that the first replica draws) and its clock (how many rounds have been
committed before it). In one quorum at most one round has a given clock and was committed: after a round that some
replica did not commit, torchft asks for another quorum.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from gradwire.aggregate.messages.step_ledger import StepLedger
from gradwire.correct.worker_memories import WorkerMemories
from gradwire.errors import GradwireError

REMEMBERED_QUORUMS = 32


class RoundName(NamedTuple):
    """The name of a round."""

    quorum: int
    clock: int


class ReplicaRounds:
    """Counts the rounds of this replica, names the tensors in them, and ends them.

    It owns the memories between exchanges: these write to them, and what they have written counts from here on.
    `next_call`, `begin_vote` and `end` are called by the thread that trains; the others while nothing is exchanged.
    """

    def __init__(self, memories: WorkerMemories, ledger: StepLedger):
        self._memories, self._ledger = memories, ledger
        self._fragments, self._calls = 1, 0
        self._sizes: dict[str, torch.Size] = {}
        self._quorum = 0
        self._committed: dict[int, int] = {}  # for each quorum, the clock after the last of its rounds that count
        self._undecided: RoundName | None = None
        self._is_voting = False

    @property
    def clock(self) -> int:
        """How many rounds have been committed."""
        return self._ledger.steps

    @property
    def fragments(self) -> int:
        """After how many committed rounds the same tensors come again."""
        return self._fragments

    @property
    def committed(self) -> dict[int, int]:
        """For each of the last quorums, the clock after the last of its rounds that count."""
        return dict(self._committed)

    def expect_fragments(self, count: int) -> None:
        """Let the same tensors come again after so many rounds; before the first of them."""
        self._fragments = count

    def next_call(self, shape: torch.Size) -> str:
        """Return the name of the next tensor of this round; GradwireError if it cannot be the one with this name."""
        self._check_vote_is_known()
        if self._calls == 0 and self._undecided is not None:  # the same replicas go on: none of them has committed it
            self._settle(False)
        name = f"{self.clock % self._fragments}.{self._calls}"
        known = self._sizes.setdefault(name, shape)
        if known != shape:
            raise GradwireError(
                f"exchange {self._calls} of a round had a tensor of shape {tuple(known)} before, and has one of "
                f"{tuple(shape)} now: tensors have no names here, so every round must have the same ones in the same "
                f"order. If n fragments of a model take turns, call pg.expect_fragments(n) first; if the model has "
                f"changed, make a new ProcessGroup"
            )
        self._calls += 1
        return name

    def begin_vote(self) -> None:
        """Take note that torchft has begun to vote on this round."""
        self._is_voting = True

    def end(self, committed: bool) -> None:
        """End the round as torchft has decided on this replica."""
        self._is_voting = False
        if committed:
            self._settle(True)
            self._ledger.count_step()
            self._committed[self._quorum] = self.clock
        elif self._calls:
            self._undecided = RoundName(self._quorum, self.clock)
        self._calls = 0

    def interrupt(self) -> None:
        """End a round that nobody has voted on, because the replicas change."""
        self._check_vote_is_known()
        self.end(False)

    def go_on_with(self, quorum: int, clock: int, committed: dict[int, int]) -> None:
        """Begin the rounds of a quorum, in which the replica that is furthest is at this clock.

        `committed` are the rounds behind its weights, which all replicas go on from: with them an undecided round goes.
        """
        if self._undecided is not None:
            self._settle(committed.get(self._undecided.quorum, 0) > self._undecided.clock)
        self._ledger.resume_at(clock)
        self._committed = dict(list(committed.items())[-REMEMBERED_QUORUMS:])
        self._quorum = quorum

    def _check_vote_is_known(self) -> None:
        if self._is_voting:
            raise GradwireError(
                "nobody has said whether torchft committed the last round, and the error memory depends on it: use a "
                "torchft.Manager, whose votes gradwire observes, or call pg.end_round(committed) after each vote"
            )

    def _settle(self, counts: bool) -> None:
        """Let the memories be those after the last round, or those before it, also if something was not finite."""
        self._undecided = None
        if counts and self._ledger.finite:
            self._memories.commit()
        else:
            self._memories.rollback()
        self._ledger.begin_step()
