"""`Wire`: Flower's grid, with messages compressed on their way out and decoded on their way in.

A strategy hands its messages to the grid and gets replies from it, so that whatever a strategy does, and any other
code that uses a grid, works as before.
"""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from logging import WARNING
from typing import Any

from flwr.app import Error, Message
from flwr.serverapp import Grid
from flwr.supercore import log

from ..aggregate.pieces import Spec
from ..errors import GradwireError
from . import replies
from .message import NEEDS_WHOLE, NOTE, REFUSED, STYPE, TRAINING, Note, category, like, single_arrays, with_records
from .models import MOST_CLIENTS, Model, Models
from .rate import Rate
from .traffic import Meter, dense_bytes

MOST_TOLD = 4096  # tokens to a client that this server has not heard of
MOST_WAITED_FOR = 1 << 16  # messages without a reply yet
COMPRESSED = ("train", "evaluate")


@dataclass
class Sent:
    """A message on its way, until its reply is here."""

    original: Message
    node: int
    model: Model


class Wire(Grid):
    """Flower's grid around which nothing changes but the bytes.

    `download` is the recipe of what goes to clients, None for raw arrays; `rate` says how finely they quantize;
    `weighted_by` is the metric that strategies weight replies by.
    """

    def __init__(
        self, grid: Grid, *, download: Spec | None = None, rate: Rate | None = None, weighted_by: str = "num-examples"
    ):
        self.grid, self.rate, self.weighted_by = grid, rate, weighted_by
        self.training = secrets.token_bytes(TRAINING)
        self.accepted: OrderedDict[int, bytes] = OrderedDict()  # last token of each client
        self.models = Models(download)
        self.meter = Meter()
        self._sent: OrderedDict[str, Sent] = OrderedDict()
        self._warned = False

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
        return self._arrived(self.grid.pull_messages(message_ids), retry=False)[0]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        end = None if timeout is None else time.monotonic() + timeout
        result: list[Message] = []
        leaving = self._leaving(messages)
        while leaving:
            left = None if end is None else max(0.0, end - time.monotonic())
            arrived = list(self.grid.send_and_receive([message for message, _ in leaving], timeout=left))
            self._wait_for(leaving)
            good, again = self._arrived(arrived)
            result += good
            for message, _ in leaving:  # whose replies would come too late
                self._sent.pop(message.metadata.message_id, None)
            # Clients that cannot use the updates get the whole model, in the same round.
            leaving = self._leaving(again) if end is None or time.monotonic() < end else []
        return result

    # ── messages out ──

    def _leaving(self, messages: Iterable[Message]) -> list[tuple[Message, Sent | None]]:
        messages = list(messages)
        found = [single_arrays(m) if m.has_content() and category(m) in COMPRESSED else None for m in messages]
        models = self.models.number([pair[1] for pair in found if pair is not None])
        sizes: dict[int, int] = {}
        leaving: list[tuple[Message, Sent | None]] = []
        for message, pair in zip(messages, found, strict=True):
            if pair is None:
                leaving.append((message, None))
            else:
                sent = Sent(message, message.metadata.dst_node_id, models[id(pair[1])])
                leaving.append((self._noted(message, pair[0], sent), sent))
            self.meter.leaving(leaving[-1][0], sizes)
        return leaving

    def _noted(self, message: Message, key: str, sent: Sent) -> Message:
        record, have = self.models.for_client(sent.node, sent.model)
        rate = self.rate.instruction() if self.rate and category(message) == "train" else None
        note = Note(self.training, sent.model.number, self._accepted_of(sent.node), rate, have)
        self.meter.dense_model(message, sent.model.record)
        return with_records(message, {**message.content, key: record, NOTE: note.record()})

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

    # ── replies in ──

    def _arrived(self, arrived: Iterable[Message], retry: bool = True) -> tuple[list[Message], list[Message]]:
        """Replies as the strategy gets them, and messages to be sent again, with the whole model.

        Without `retry` the strategy is told that a client needs it; its next message will have it.
        """
        good: list[Message] = []
        again: list[Message] = []
        plain = 0
        for reply in arrived:
            self.meter.arrived(reply)
            sent = self._sent.pop(reply.metadata.reply_to_message_id, None)
            if sent is None:
                good.append(reply)
            elif reply.has_error() and reply.error.code == NEEDS_WHOLE and sent.node in self.models.copies:
                self.models.has_none(sent.node)
                if retry:
                    again.append(sent.original)
                else:
                    good.append(reply)
            elif reply.has_error():
                good.append(_explained(reply, sent.node))
            else:
                plain += category(reply) == "train" and not replies.is_compressed(reply)
                good.append(self._accepted_or_rejected(reply, sent))
        if plain and not self.accepted and not self._warned:
            self._warned = True
            log(WARNING, "gradwire: no update is compressed so far: is gradwire.flower.compress a mod of the app?")
        if self.rate:
            replies.observe(self.rate, [r for r in good if category(r) == "train"], self.weighted_by)
        return good, again

    def _accepted_or_rejected(self, reply: Message, sent: Sent) -> Message:
        traffic = self.meter.of(reply)
        self.models.answered(sent.node, sent.model.number)
        compressed = replies.is_compressed(reply)
        if compressed:
            self.meter.dense_update(reply, sent.model.record)
        else:
            traffic.dense_upload_bytes += sum(map(dense_bytes, reply.content.array_records.values()))
        try:
            if not compressed:
                return replies.raw(reply, sent.model, self.models.chain)
            result, token = replies.decoded(reply, sent.model, self.weighted_by)
        except GradwireError as error:
            traffic.rejected += 1
            reason = f"gradwire: rejected the update of node {sent.node}: {error}"
            log(WARNING, reason)
            return like(reply, error=Error(REFUSED, reason))
        self.accepted[sent.node] = token
        self.accepted.move_to_end(sent.node)
        while len(self.accepted) > MOST_CLIENTS:
            self.accepted.popitem(last=False)
        self.models.has(sent.node, sent.model.number)
        return result


def _explained(reply: Message, node: int) -> Message:
    """Where the mod is only one of the training function, evaluation gets an update that it cannot read."""
    if not all(part in str(reply.error.reason) for part in ("serialization type", f"'{STYPE}'")):  # Flower's words
        return reply
    reason = (
        f"gradwire: node {node} cannot read the compressed model in a message of type {category(reply)!r}: give "
        f"gradwire.flower.compress to the app, ClientApp(mods=[…]), not to its training function alone"
    )
    return like(reply, error=Error(reply.error.code, reason))
