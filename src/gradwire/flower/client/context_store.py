"""A client's state in Flower's context, for simulations."""

from __future__ import annotations

import io

import torch
from flwr.app import Array, ArrayRecord, Context

from gradwire.flower.client.store import Content

RECORD = "gradwire"  # key in the context's state


class ContextStore:
    """A store in the state that Flower keeps for a client as long as a run lasts."""

    def __init__(self, context: Context, training: bytes):
        self.state, self.prefix = context.state, training.hex() + " "
        if any(not name.startswith(self.prefix) for name in self._arrays()):
            self.state[RECORD] = ArrayRecord()  # it belongs to another training

    def _arrays(self) -> dict[str, Array]:
        record = self.state.get(RECORD)
        return dict(record) if isinstance(record, ArrayRecord) else {}

    def _put(self, arrays: dict[str, Array]) -> None:
        self.state[RECORD] = ArrayRecord(arrays)

    def read(self, name: str) -> Content | None:
        """Return what was written, or None; see `Store`."""
        array = self._arrays().get(self.prefix + name)
        try:
            return None if array is None else torch.load(io.BytesIO(array.data), weights_only=True)
        except Exception:  # damaged bytes can raise nearly anything, and are as good as none
            return None

    def write(self, name: str, content: Content) -> None:
        """Store a dict as bytes in one array."""
        buffer = io.BytesIO()
        torch.save(content, buffer)
        data = buffer.getvalue()
        self._put(self._arrays() | {self.prefix + name: Array("uint8", (len(data),), "torch", data)})

    def move(self, name: str, new: str) -> None:
        """Rename what is stored under `name`."""
        arrays = self._arrays()
        self._put(arrays | {self.prefix + new: arrays.pop(self.prefix + name)})

    def drop(self, name: str) -> None:
        """Delete what is stored under this name, if there is anything."""
        arrays = self._arrays()
        if arrays.pop(self.prefix + name, None) is not None:
            self._put(arrays)
