"""A client's error memory in two states: settled, and pending until the server has told that the update arrived.

write pending ─► reply leaves ─► next message tells the last accepted token:
    the pending one: it is settled            the settled one: the reply was lost, pending is dropped
    neither: an update arrived that this client knows nothing of (its files were lost): start from nothing
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from .store import Store

SETTLED, PENDING = "settled", "pending"
NO_TOKEN = b""


class ErrorMemory:
    def __init__(self, store: Store):
        self.store = store

    def settle(self, accepted: Collection[bytes]) -> dict[str, torch.Tensor]:
        """What is left of the updates that arrived, given the last tokens that the server accepted."""
        settled, pending = self.store.read(SETTLED), self.store.read(PENDING)
        if pending is not None and pending["token"] in accepted:
            self.store.move(PENDING, SETTLED)
            settled = pending
        else:
            self.store.drop(PENDING)
        last = settled["token"] if settled is not None else NO_TOKEN
        known = last in accepted if last else not accepted
        if settled is not None and not known:
            self.store.drop(SETTLED)
        return settled["memory"] if settled is not None and known else {}

    def propose(self, token: bytes, memory: dict[str, torch.Tensor]) -> None:
        """Before the update with this token leaves."""
        if memory:
            self.store.write(PENDING, {"token": token, "memory": memory})
