"""`Wire`: Flower's grid, with messages compressed on their way out and decoded on their way in.

A strategy hands its messages to the grid and gets replies from it, so that whatever a strategy does, and any other
code that uses a grid, works as before.
"""

from __future__ import annotations

import math
import secrets
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from flwr.app import ArrayRecord, Error, Message, MetricRecord
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.supercore import log

from ..errors import GradwireError
from . import arrays, update
from .message import (
    NOTE,
    TRAINING,
    Note,
    category,
    is_update,
    like,
    message_bytes,
    open_update,
    single_arrays,
    with_records,
)

MOST_TOLD = 4096  # tokens to a client that this server has not heard of
MOST_CLIENTS = 1 << 20  # of which the last token is known
MOST_WAITED_FOR = 1 << 16  # messages without a reply yet
WARNING = 30


@dataclass
class Model:
    """A model as a strategy handed it over."""

    number: int
    record: ArrayRecord
    _tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        if not self._tensors:
            self._tensors = arrays.tensors(self.record)
        return self._tensors


@dataclass
class Sent:
    """A message on its way, until its reply is here."""

    node: int
    model: Model


@dataclass
class Traffic:
    """What travelled, measured at Flower's messages."""

    messages: int = 0
    replies: int = 0
    download_bytes: int = 0
    upload_bytes: int = 0
    dense_upload_bytes: int = 0  # of the same replies with raw arrays
    rejected: int = 0


class Wire(Grid):
    """Flower's grid around which nothing changes but the bytes."""

    def __init__(self, grid: Grid, *, weighted_by: str = "num-examples"):
        self.grid, self.weighted_by = grid, weighted_by
        self.training = secrets.token_bytes(TRAINING)
        self.accepted: OrderedDict[int, bytes] = OrderedDict()  # last token of each client
        self.traffic: dict[str, Traffic] = {}  # by category of the messages
        self._models = 0
        self._last: Model | None = None
        self._sent: OrderedDict[str, Sent] = OrderedDict()

    # ── Flower's interface ──

    def set_run(self, run: Any) -> None:
        self.grid.set_run(run)

    @property
    def run(self) -> Any:
        return self.grid.run

    def create_message(self, *args: Any, **options: Any) -> Message:
        return self.grid.create_message(*args, **options)

    def get_node_ids(self) -> Iterable[int]:
        return self.grid.get_node_ids()

    def get_nodes(self) -> Iterable[Any]:
        return self.grid.get_nodes()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        leaving = self._leaving(messages)
        ids = list(self.grid.push_messages([message for message, _ in leaving]))
        self._wait_for(leaving)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self._arrived(reply) for reply in self.grid.pull_messages(message_ids)]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        leaving = self._leaving(messages)
        replies = list(self.grid.send_and_receive([message for message, _ in leaving], timeout=timeout))
        self._wait_for(leaving)
        result = [self._arrived(reply) for reply in replies]
        for message, _ in leaving:  # whose replies would come too late
            self._sent.pop(message.metadata.message_id, None)
        return result

    # ── messages out ──

    def _leaving(self, messages: Iterable[Message]) -> list[tuple[Message, Sent | None]]:
        sizes: dict[int, int] = {}
        return [self._prepared(message, sizes) for message in messages]

    def _prepared(self, message: Message, sizes: dict[int, int]) -> tuple[Message, Sent | None]:
        found = single_arrays(message) if message.has_content() and category(message) in ("train", "evaluate") else None
        sent = None
        if found is not None:
            node = message.metadata.dst_node_id
            sent = Sent(node, self._model(found[1]))
            note = Note(self.training, sent.model.number, self._accepted_of(node))
            message = with_records(message, {**message.content, NOTE: note.record()})
        self._count_download(message, sizes)
        return message, sent

    def _model(self, record: ArrayRecord) -> Model:
        if self._last is None or self._last.record is not record:
            self._models += 1
            self._last = Model(self._models, record)
        return self._last

    def _accepted_of(self, node: int) -> tuple[bytes, ...]:
        """The last token of this client; of one that is new here, those of all: it may have had another number."""
        if node in self.accepted:
            return (self.accepted[node],)
        return tuple(list(self.accepted.values())[-MOST_TOLD:])

    def _wait_for(self, leaving: list[tuple[Message, Sent | None]]) -> None:
        for message, sent in leaving:
            if sent is not None:
                self._sent[message.metadata.message_id] = sent
        while len(self._sent) > MOST_WAITED_FOR:
            self._sent.popitem(last=False)

    def _count_download(self, message: Message, sizes: dict[int, int]) -> None:
        """Models are the same in many messages, and are measured once."""
        traffic = self.traffic.setdefault(category(message), Traffic())
        traffic.messages += 1
        if not message.has_content():
            return
        for record in message.content.values():
            if id(record) not in sizes:
                sizes[id(record)] = message_bytes(record)
        records = sum(sizes[id(record)] for record in message.content.values())
        traffic.download_bytes += records + len(message.content.deflate()) + len(message.deflate())

    # ── replies in ──

    def _arrived(self, reply: Message) -> Message:
        sent = self._sent.pop(reply.metadata.reply_to_message_id, None)
        traffic = self.traffic.setdefault(category(reply), Traffic())
        traffic.replies += 1
        traffic.upload_bytes += message_bytes(reply)
        if reply.has_error() or sent is None:
            return reply
        updates = {k: r for k, r in reply.content.items() if isinstance(r, ArrayRecord) and is_update(r)}
        if not updates:
            return reply
        traffic.dense_upload_bytes += sum(len(a.data) for a in sent.model.record.values())
        try:
            return self._decoded(reply, updates, sent)
        except GradwireError as error:
            traffic.rejected += 1
            reason = f"gradwire: rejected the update of node {sent.node}: {error}"
            log(WARNING, reason)
            return like(reply, error=Error(ErrorCode.MOD_FAILED_PRECONDITION, reason))

    def _decoded(self, reply: Message, updates: dict[str, ArrayRecord], sent: Sent) -> Message:
        if single_arrays(reply) is None:
            raise GradwireError("other arrays beside the update")
        self._check_weight(reply)
        model = sent.model
        ((key, record),) = updates.items()
        token, data = open_update(record, model.number, model.record)
        changed = update.decode(data, model.tensors)
        decoded = {name: _array(name, changed, model, data) for name in model.record}
        self.accepted[sent.node] = token
        self.accepted.move_to_end(sent.node)
        while len(self.accepted) > MOST_CLIENTS:
            self.accepted.popitem(last=False)
        return with_records(reply, {**reply.content, key: ArrayRecord(decoded)})

    def _check_weight(self, reply: Message) -> None:
        """One weight that is not a number would spoil the mean of all."""
        for record in reply.content.values():
            weight = record.get(self.weighted_by) if isinstance(record, MetricRecord) else None
            if weight is not None and (isinstance(weight, list) or not math.isfinite(weight) or weight < 0):
                raise GradwireError(f"a weight ({self.weighted_by}) of {weight}")


def _array(name: str, changed: dict[str, torch.Tensor], model: Model, data: memoryview) -> arrays.Array:
    if name in changed:
        return arrays.Decoded(changed[name], lambda: update.decode(data, model.tensors, only=name)[name])
    own = model.tensors[name]
    return arrays.Decoded(own.clone(), own.clone)
