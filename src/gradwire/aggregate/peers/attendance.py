"""Which ranks have not attached: asked of the store where the process group met.

Before the handshake ranks do not know each other's addresses, and the collective in which they wait for the missing
one does not say who it is. So each counts in the store, first, how many times it has attached.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress

import torch.distributed as dist

from gradwire.errors import AggregateError

PATIENCE = 2.0  # seconds: the store may be on the machine that is lost, and torch then waits for it without end


class Attendance:
    def __init__(self, group: dist.ProcessGroup, rank: int, world: int):
        self._key, self._world = f"gradwire/attached/{group.group_name}", world
        self._store, self._count = _store(), 0
        if self._store is not None:
            with suppress(RuntimeError):  # its host is lost; so is the connection that is to follow
                self._count = self._store.add(f"{self._key}/{rank}", 1)

    def missed(self, error: RuntimeError, ranks: Sequence[int], timeout: float) -> AggregateError:
        """Why the others could not be met; `ranks` are the numbers that users know them by."""
        absent = [ranks[r] for r in self.absent()]
        if not absent:
            return AggregateError(f"could not connect to the other ranks within {timeout:g} s: {error}")
        who = f"rank{'s' if len(absent) > 1 else ''} {', '.join(map(str, absent))}"
        return AggregateError(
            f"{who} did not attach within {timeout:g} s: killed, stalled, late, or without gradwire; all ranks must "
            f"attach the same models in the same order"
        )

    def absent(self) -> list[int]:
        """The ranks that have attached less often than this one; empty if that cannot be found out."""
        found: list[int] = []
        if self._store is None:
            return found
        thread = threading.Thread(target=self._look, args=(self._store, found), daemon=True)
        thread.start()
        thread.join(PATIENCE)
        return list(found)

    def _look(self, store: dist.Store, found: list[int]) -> None:
        try:
            missing = [r for r in range(self._world) if store.add(f"{self._key}/{r}", 0) < self._count]
        except RuntimeError:  # its host is lost
            return
        found.extend(missing)


def _store() -> dist.Store | None:
    try:
        return dist.distributed_c10d._get_default_store()
    except (AttributeError, RuntimeError, ValueError):  # a private function of torch
        return None
