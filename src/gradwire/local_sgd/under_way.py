"""One exchange of LocalSGD between its start and the moment when its mean reaches the model of this rank."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from gradwire.local_sgd.sync_round import RankUpdate, Sync

Tensors = dict[str, torch.Tensor]


class ExchangeUnderWay:
    """What was sent of one part of the model, and at which step the mean is due.

    1. At first the mean is on its way (`sync`). 2. `has_arrived`: the common parameters have moved, and memories count.
    3. At the step `due` the model follows. A checkpoint is made of the second state, so that no model changes when one
    is saved.
    """

    def __init__(self, part: int, due: int, start: Tensors, sync: Sync | None):
        self.part, self.due = part, due
        self.start = start  # the parameters that were sent; empty if the mean is due at once
        self.sync = sync  # None if it has arrived
        self.diverged = False  # this rank's update had a NaN or an infinity, and was left out
        self.moves = True  # some rank has sent anything
        self.buffers: list[str] = []  # names of those that were averaged

    def has_arrived(self, own: RankUpdate, arrived: Collection[RankUpdate], buffers: Collection[str]) -> None:
        """Take note of what has come, when the common parameters have moved."""
        self.sync = None
        self.diverged, self.moves = own.diverged, any(update.sent for update in arrived)
        self.buffers = sorted(buffers)
        if own.diverged:
            self.start = {}  # what this rank has changed since is worth nothing either

    def state_dict(self) -> dict[str, Any]:
        """Return copies of all that is left to be done with an exchange that has arrived."""
        return {
            "part": self.part,
            "due": self.due,
            "start": {name: t.detach().cpu().clone() for name, t in self.start.items()},
            "diverged": self.diverged,
            "moves": self.moves,
            "buffers": list(self.buffers),
        }

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> ExchangeUnderWay:
        """Return the exchange that was saved; its state was checked."""
        start = {name: t.detach().clone() for name, t in state["start"].items()}
        exchange = cls(state["part"], state["due"], start, None)
        exchange._resume(state["diverged"], state["moves"], state["buffers"])
        return exchange

    def _resume(self, diverged: bool, moves: bool, buffers: list[str]) -> None:
        self.diverged, self.moves, self.buffers = diverged, moves, list(buffers)
