"""Flower's apps in one process: for tests, benchmarks and debuggers, and for machines without Ray.

Messages are serialized to bytes and read again, as between machines. Clients run one after the other, in the thread of
the server app. Since it plays both sides, this module belongs neither to `client` nor to `server`.
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
    """Run a server app to its end with this number of clients, all of the same client app, and return the grid."""
    grid = OneProcess(client, clients, config)
    run_on(grid, server, config)
    return grid


def run_on(grid: OneProcess, server: ServerApp, config: UserConfig | None = None) -> None:
    """Run a server app to its end on an existing grid, whose clients keep their state."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = RUN, SUPERLINK_NODE_ID, RUN
    server(grid, Context(RUN, SUPERLINK_NODE_ID, {}, RecordDict(), dict(config or {})))


class OneProcess(Grid):
    """A grid whose clients run in the thread that sends them messages.

    Node i has partition i − 1. `sent_bytes` and `received_bytes` count the messages of the server and the replies.
    """

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
        """Set the run that `run` returns."""
        self._run = run

    @property
    def run(self) -> Run:
        """The run that the apps belong to."""
        return self._run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Return a message to one node."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of all clients."""
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Let clients answer these messages now, and return the ids of the messages."""
        ids = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = f"{len(self._replies)}-{message.object_id}"
            ids.append(message.metadata.message_id)
            objects = to_objects(message)
            self.sent_bytes += sum(map(len, objects.values()))
            arrived = from_objects(objects)
            arrived.metadata.__dict__["_message_id"] = message.metadata.message_id
            reply = to_objects(self.reply_of_client(arrived, self.contexts[message.metadata.dst_node_id]))
            self.received_bytes += sum(map(len, reply.values()))
            self._replies[message.metadata.message_id] = from_objects(reply)
        return ids

    def reply_of_client(self, message: Message, context: Context) -> Message:
        """Return the client's reply, or an error reply if the client raised an exception, as Flower's engines do."""
        try:
            with state_store.simulation():
                return self.client(message, context)
        except Exception as error:
            return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, repr(error)), reply_to=message)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies to these messages, each of them once."""
        return [self._replies.pop(i) for i in message_ids if i in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Return the replies of clients to these messages. Clients take as long as they take: no timeout applies."""
        return self.pull_messages(self.push_messages(messages))


def to_objects(message: Message) -> dict[str, bytes]:
    """Return the objects of a message as bytes by id, the message itself last."""
    return {name: part.deflate() for name, part in get_all_nested_objects(message).items()}


def from_objects(objects: dict[str, bytes]) -> Message:
    """Return the message of which `to_objects` made these bytes."""
    message: Any = inflate_object_from_contents(list(objects)[-1], dict(objects))
    assert isinstance(message, Message)
    return message
