"""A grid that stops waiting when it is asked to.

Flower's simulation runs the server app in a thread that waits up to an hour for replies. Were the engine to fail, or
the user to press Ctrl-C, that thread would keep the process alive.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

from flwr.app import Message
from flwr.serverapp import Grid

from gradwire.flower.server.grid_wrapper import GridWrapper

PULL_EVERY = 0.05  # seconds


class Stopped(Exception):
    """The run is over: nobody waits for what the server app would do next."""


class StoppableGrid(GridWrapper):
    """A grid that raises `Stopped` instead of waiting any longer once the event `stop` is set.

    The thread of the server app uses it; any other thread may set the event.
    """

    def __init__(self, grid: Grid, stop: threading.Event) -> None:
        super().__init__(grid)
        self.stop = stop

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send messages, and return the replies that arrive within `timeout` seconds. Raises `Stopped`."""
        waiting = set(self.grid.push_messages(messages))
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        replies: list[Message] = []
        while True:
            if self.stop.is_set():
                raise Stopped
            arrived = list(self.grid.pull_messages(waiting))
            replies += arrived
            waiting -= {reply.metadata.reply_to_message_id for reply in arrived}
            if not waiting or time.monotonic() > deadline:
                return replies
            self.stop.wait(PULL_EVERY)

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of all nodes that are connected. Raises `Stopped`."""
        if self.stop.is_set():
            raise Stopped
        return super().get_node_ids()
