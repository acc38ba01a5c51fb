"""A client's error memory in two states: settled, and pending until the server says that the update arrived.

The client stores the pending memory, then its reply leaves. The server's next message names the tokens that it accepted
last. If the token of the pending memory is among them, the pending memory becomes the settled one. If it is the settled
memory's, the reply was lost and the pending memory is dropped. If it is neither, an update arrived of which this client
knows nothing, because its files were lost: it starts with an empty memory.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import torch

from gradwire import kernels
from gradwire.catalogue.saved_recipes import KEY, check_saved_recipes, recipes_to_save
from gradwire.catalogue.spec_by_name import Recipes
from gradwire.flower.client.store import Content, Store

SETTLED, PENDING = "settled", "pending"
NO_TOKEN = b""


class ClientMemory:
    """What the updates of one client in one training have left out so far, by name of tensor.

    It promises that a lost or rejected reply, or a process that is killed at any moment, neither loses a part of the
    memory nor counts it twice: `propose` stores the memory after an update before the update leaves, and `settle`
    decides in the next round which of the two memories is true. It never changes a tensor, and holds nothing itself
    but the store. Use it in the process of the client, for one message at a time.
    """

    def __init__(self, store: Store):
        self.store = store

    def settle(self, accepted: Collection[bytes], recipes: Recipes | None = None) -> dict[str, torch.Tensor]:
        """Return the memory after the updates that arrived, given the tokens that the server accepted last.

        CheckpointError if it was stored under recipes that these, if they are given, cannot go on from.
        """
        settled, pending = self._read(SETTLED), self._read(PENDING)
        if pending is not None and pending["token"] in accepted:
            self.store.move(PENDING, SETTLED)
            settled = pending
        else:
            self.store.drop(PENDING)
        last = settled["token"] if settled is not None else NO_TOKEN
        is_current = last in accepted if last else not accepted
        if settled is not None and not is_current:
            self.store.drop(SETTLED)
        if settled is None or not is_current:
            return {}
        if recipes is not None:
            remembered = {name: tensor.numel() for name, tensor in settled["memory"].items()}
            check_saved_recipes(settled, recipes, remembered, {})
        return settled["memory"]

    def _read(self, name: str) -> Content | None:
        """Return what is stored, or None if it is not a memory, such as when another version has written it."""
        content = self.store.read(name)
        if not isinstance(content, dict) or not isinstance(content.get("token"), bytes):
            return None
        memory = content.get("memory")
        is_memory = isinstance(memory, dict) and all(
            isinstance(name, str) and isinstance(t, torch.Tensor) and t.layout == torch.strided and not t.is_meta
            for name, t in memory.items()
        )
        return content if is_memory else None

    def propose(self, token: bytes, memory: dict[str, torch.Tensor], recipes: Recipes | None = None) -> None:
        """Store the memory after the update with this token, and its recipes. Call it before the update leaves."""
        if memory:
            of_recipes = {} if recipes is None else {KEY: recipes_to_save(recipes)}
            self.store.write(PENDING, {"token": token, "memory": memory, **of_recipes})


def usable(memory: Mapping[str, torch.Tensor], differences: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the memory without tensors of other shapes, or that are not finite: no update could ever send them.

    The memory of tensors that this model does not have stays, since a later model may have them.
    """

    def is_usable(name: str, left_out: torch.Tensor) -> bool:
        if name not in differences:
            return True
        same_kind = left_out.dtype == torch.float32 and left_out.shape == differences[name].shape
        return same_kind and (not left_out.numel() or math.isfinite(kernels.absmax(left_out.detach().reshape(-1))))

    return {name: left_out for name, left_out in memory.items() if is_usable(name, left_out)}
