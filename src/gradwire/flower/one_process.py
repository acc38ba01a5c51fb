"""Flower's apps in one process: for tests, benchmarks and debuggers, and where Ray is not.

Messages go the way they go between machines: taken apart into objects, as bytes, and put together again. Clients run
one after the other, in the thread of the server.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from gradwire.flower.client import state_store

RUN = 1
UserConfig = dict[str, bool | float | int | str]


def run(server: ServerApp, client: ClientApp, clients: int, config: UserConfig | None = None) -> OneProcess:
    """Run a server app with so many clients to its end."""
    grid = OneProcess(client, clients, config)
    run_on(grid, server, config)
    return grid


def run_on(grid: OneProcess, server: ServerApp, config: UserConfig | None = None) -> None:
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = RUN, SUPERLINK_NODE_ID, RUN
    server(grid, Context(RUN, SUPERLINK_NODE_ID, {}, RecordDict(), dict(config or {})))


class OneProcess(Grid):
    """Node i has the partition i − 1. `sent_bytes` and `received_bytes` are of the server."""

    def __init__(self, client: ClientApp, clients: int, config: UserConfig | None = None):
        self.client = client
        self.contexts = {
            i + 1: Context(RUN, i + 1, {"partition-id": i, "num-partitions": clients}, RecordDict(), dict(config or {}))
            for i in range(clients)
        }
        self.sent_bytes = self.received_bytes = 0
        self._replies: dict[str, Message] = {}
        self._run = Run.create_empty(RUN)

    def set_run(self, run: Run) -> None:
        self._run = run

    @property
    def run(self) -> Run:
        return self._run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = f"{len(self._replies)}-{message.object_id}"
            ids.append(message.metadata.message_id)
            objects = apart(message)
            self.sent_bytes += sum(map(len, objects.values()))
            arrived = together(objects)
            arrived.metadata.__dict__["_message_id"] = message.metadata.message_id
            reply = apart(self.handled(arrived, self.contexts[message.metadata.dst_node_id]))
            self.received_bytes += sum(map(len, reply.values()))
            self._replies[message.metadata.message_id] = together(reply)
        return ids

    def handled(self, message: Message, context: Context) -> Message:
        """The client's reply; an error reply where the client raised, as Flower's engines have it."""
        state_store.in_simulation = True
        try:
            return self.client(message, context)
        except Exception as error:
            return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, repr(error)), reply_to=message)
        finally:
            state_store.in_simulation = False

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self._replies.pop(i) for i in message_ids if i in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))


def apart(message: Message) -> dict[str, bytes]:
    """The objects of a message as bytes, the message itself last."""
    return {name: part.deflate() for name, part in get_all_nested_objects(message).items()}


def together(objects: dict[str, bytes]) -> Message:
    message: Any = inflate_object_from_contents(list(objects)[-1], dict(objects))
    return message
