"""`ClientTable`: one value for each client, of a limited number of clients."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

MOST_CLIENTS = 1 << 20
Value = TypeVar("Value")


class ClientTable(OrderedDict[int, Value], Generic[Value]):
    """Values by node id, in the order in which they were put. Beyond `MOST_CLIENTS` the oldest are forgotten."""

    def put(self, node: int, value: Value) -> None:
        """Set the value of a client, which becomes the newest."""
        self[node] = value
        self.move_to_end(node)
        while len(self) > MOST_CLIENTS:
            self.popitem(last=False)
