"""A client's error memory in two states: settled, and pending until the server has told that the update arrived.

write pending ─► reply leaves ─► next message tells the last accepted token:
    the pending one: it is settled            the settled one: the reply was lost, pending is dropped
    neither: an update arrived that this client knows nothing of (its files were lost): start from nothing
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import torch

from gradwire import kernels
from gradwire.flower.client.state_store import Content, Store

SETTLED, PENDING = "settled", "pending"
NO_TOKEN = b""


class ErrorMemory:
    def __init__(self, store: Store):
        self.store = store

    def settle(self, accepted: Collection[bytes]) -> dict[str, torch.Tensor]:
        """What is left of the updates that arrived, given the last tokens that the server accepted."""
        settled, pending = self._read(SETTLED), self._read(PENDING)
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

    def _read(self, name: str) -> Content | None:
        """What is of another version, or no memory at all, is as good as none."""
        found = self.store.read(name)
        if not isinstance(found, dict) or not isinstance(found.get("token"), bytes):
            return None
        memory = found.get("memory")
        sound = isinstance(memory, dict) and all(isinstance(t, torch.Tensor) for t in memory.values())
        return found if sound else None

    def propose(self, token: bytes, memory: dict[str, torch.Tensor]) -> None:
        """Before the update with this token leaves."""
        if memory:
            self.store.write(PENDING, {"token": token, "memory": memory})


def fitting(memory: Mapping[str, torch.Tensor], differences: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Without what belongs to tensors of other shapes, or is not finite: it could be sent with no update, ever.

    That of tensors which this model does not have waits.
    """

    def fits(name: str, left: torch.Tensor) -> bool:
        if name not in differences:
            return True
        same = left.dtype == torch.float32 and left.shape == differences[name].shape
        return same and (not left.numel() or math.isfinite(kernels.absmax(left.reshape(-1))))

    return {name: left for name, left in memory.items() if fits(name, left)}
