"""Which ranks have not attached: asked of the store where the process group met.

Before the handshake ranks do not know each other's addresses, and the collective in which they wait for a missing rank
does not say who it is. So each rank first counts in the store how many times it has attached.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch.distributed as dist

from gradwire.aggregate.peers import interpreter_exit
from gradwire.errors import AggregateError
from gradwire.torch_internals.process_groups import default_store

PATIENCE = 2.0  # seconds: the store may be on the machine that is lost, and torch then waits for it without end


class Attendance:
    """How often each rank of a group has attached, by the store.

    Making one counts this rank in. It may be used from any thread, takes PATIENCE seconds at most, and raises nothing.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, world: int):
        self._group_name, self._world = group.group_name, world
        self._key = f"gradwire/attached/{group.group_name}"
        self._store, self._count = default_store(), 0
        if self._store is not None:
            with suppress(RuntimeError):  # its host is lost; so is the connection that is to follow
                self._count = self._store.add(f"{self._key}/{rank}", 1)

    @property
    def name(self) -> str:
        """A name for what is made when these ranks attach: the same on all of them, and another one each time."""
        return f"gradwire/{self._group_name}/{self._count}"

    def error_naming_absent(self, error: RuntimeError, ranks: Sequence[int], timeout: float) -> AggregateError:
        """Return an error that names the ranks that did not attach within the timeout, in seconds.

        `error` is what torch raised, and `ranks` are the numbers that users know the group's ranks by.
        """
        absent = [ranks[r] for r in self.absent()]
        if not absent:
            return AggregateError(f"could not connect to the other ranks within {timeout:g} s: {error}")
        who = f"rank{'s' if len(absent) > 1 else ''} {', '.join(map(str, absent))}"
        return AggregateError(
            f"{who} did not attach within {timeout:g} s: killed, stalled, late, or without gradwire; all ranks must "
            f"attach the same models in the same order"
        )

    def absent(self) -> list[int]:
        """Return the ranks that have attached less often than this one; empty if that cannot be found out."""
        absent: list[int] = []
        if self._store is None:
            return absent
        thread = interpreter_exit.start_thread(self._compare_counts, self._store, absent, name="gradwire-attendance")
        thread.join(PATIENCE)
        return list(absent)

    def _compare_counts(self, store: dist.Store, absent: list[int]) -> None:
        try:
            behind = [r for r in range(self._world) if store.add(f"{self._key}/{r}", 0) < self._count]
        except RuntimeError:  # its host is lost
            return
        absent.extend(behind)
