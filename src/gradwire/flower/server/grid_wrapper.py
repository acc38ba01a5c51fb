"""`GridWrapper`: a Flower grid that passes everything on to another one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid


class GridWrapper(Grid):
    """Passes every call on to the grid that it wraps; subclasses override what they change.

    It is used in the thread of the server app, as the wrapped grid is.
    """

    def __init__(self, grid: Grid):
        self.grid = grid

    def set_run(self, run: Any) -> None:
        """Set the run of the wrapped grid."""
        self.grid.set_run(run)

    @property
    def run(self) -> Any:
        """The run of the wrapped grid."""
        return self.grid.run

    def create_message(self, *args: Any, **options: Any) -> Message:
        """Return a message that the wrapped grid creates."""
        return self.grid.create_message(*args, **options)

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of all nodes that are connected."""
        return self.grid.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages without waiting for replies, and return their ids."""
        return self.grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies to these messages that have arrived."""
        return self.grid.pull_messages(message_ids)
