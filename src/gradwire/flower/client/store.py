"""`Store`: the interface to what a client keeps between messages. `state_store` chooses where that is."""

from __future__ import annotations

from typing import Any, Protocol

Content = dict[str, Any]


class Store(Protocol):
    """What one client keeps of one training, by name: dicts of tensors and plain values.

    `write` and `move` happen completely or not at all, whenever the process is killed, and what they stored is still
    there for the next message. A store never returns what another training or another client has written. One client
    handles one message at a time, so no two threads or processes may use the store of the same client at once.
    Whatever prevents storing, such as a full disk, is raised as a GradwireError.
    """

    def read(self, name: str) -> Content | None:
        """Return what was written, or None if there is nothing, or nothing that can be read."""

    def write(self, name: str, content: Content) -> None:
        """Store a dict under this name, in place of what was there."""

    def move(self, name: str, new: str) -> None:
        """Rename what is stored under `name`, in place of what was under `new`."""

    def drop(self, name: str) -> None:
        """Delete what is stored under this name, if there is anything."""
