"""`Wire`: Flower's grid, with messages compressed on their way out and decoded on their way in.

A strategy hands its messages to the grid and gets replies from it, so that whatever a strategy does, and any other
code that uses a grid, works as before.
"""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from logging import WARNING
from typing import Any

from flwr.app import Error, Message
from flwr.serverapp import Grid
from flwr.supercore import log

from gradwire.catalogue.spec_by_name import Spec
from gradwire.errors import GradwireError
from gradwire.flower.server import rejected_replies, replies
from gradwire.flower.server.grid_wrapper import Around
from gradwire.flower.server.sent_models import Model, Models, put_last
from gradwire.flower.server.traffic import Meter, dense_bytes
from gradwire.flower.shared.adaptive_rate import Rate
from gradwire.flower.shared.message import (
    NEEDS_WHOLE,
    NOTE,
    PERSONAL,
    REFUSED,
    TRAINING,
    Note,
    category,
    like,
    single_arrays,
    with_records,
)

MOST_TOLD = 4096  # tokens to a client that this server has not heard of
MOST_WAITED_FOR = 1 << 16  # messages without a reply yet
COMPRESSED = ("train", "evaluate")


@dataclass
class Sent:
    """A message on its way, until its reply is here."""

    original: Message
    node: int
    model: Model


@dataclass
class Arrived:
    """A reply as the strategy will get it; `token` is that of its update."""

    reply: Message
    sent: Sent | None = None
    token: bytes | None = None


class Wire(Around):
    """Flower's grid around which nothing changes but the bytes.

    `download` is the recipe of what goes to clients, None for raw arrays; `rate` says how finely they quantize;
    `weighted_by` is the metric that strategies weight replies by, and `alike` says that the strategy averages replies
    as Flower's own do, so that one that is unlike the others is rejected.
    """

    def __init__(
        self, grid: Grid, *, download: Spec | None = None, rate: Rate | None = None, weighted_by: str = "num-examples",
        alike: bool = False,
    ):  # fmt: skip
        super().__init__(grid)
        self.rate, self.weighted_by = rate, weighted_by
        self.training = secrets.token_bytes(TRAINING)
        self.accepted: OrderedDict[int, bytes] = OrderedDict()  # last token of each client
        self.models = Models(download)
        self.meter = Meter()
        self._sent: OrderedDict[str, Sent] = OrderedDict()
        self._warned = False
        self._alike = rejected_replies
        self._usual: dict[str, set[Hashable]] = {}

    # ── Flower's interface ──

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
        results: list[Arrived] = []
        again: list[Message] = []
        plain = 0
        for reply in arrived:
            self.meter.arrived(reply)
            sent = self._sent.pop(reply.metadata.reply_to_message_id, None)
            if sent is None:
                unasked = reply.has_content() and replies.is_compressed(reply)
                reason = "it answers no message that waits for a reply"
                results.append(Arrived(self._rejected(reply, reason) if unasked else reply))
            elif reply.has_error():
                if reply.error.code == NEEDS_WHOLE and self._forget_copy(sent) and retry:
                    again.append(sent.original)
                else:
                    results.append(Arrived(replies.explained(reply, sent.node), sent))
            else:
                plain += category(reply) == "train" and not replies.is_compressed(reply)
                results.append(self._opened(reply, sent))
        if self._alike:
            for kind in COMPRESSED:
                self._reject_odd_ones([r for r in results if r.sent and category(r.sent.original) == kind], kind)
        for result in results:
            if result.sent and result.token and not result.reply.has_error():
                self._accept(result.sent, result.token)
        if plain and not self.accepted and not self._warned:
            self._warned = True
            log(WARNING, "gradwire: no update is compressed so far: is gradwire.flower.compress a mod of the app?")
        good = [result.reply for result in results]
        if self.rate:
            replies.observe(self.rate, [r for r in good if category(r) == "train"], self.weighted_by)
        return good, again

    def _forget_copy(self, sent: Sent) -> bool:
        """Whether a client that needs the whole model was not sent just that."""
        known = sent.node in self.models.copies and sent.model.number < PERSONAL
        self.models.has_none(sent.node)
        return known

    def _opened(self, reply: Message, sent: Sent) -> Arrived:
        traffic = self.meter.of(reply)
        self.models.answered(sent.node, sent.model.number)
        compressed = replies.is_compressed(reply)
        if compressed:
            self.meter.dense_update(reply, sent.model.record)
        else:
            traffic.dense_upload_bytes += sum(map(dense_bytes, reply.content.array_records.values()))
        try:
            if not compressed:
                return Arrived(replies.raw(reply, sent.model, self.models.chain, self.weighted_by), sent)
            result, token = replies.decoded(reply, sent.model, self.weighted_by)
        except GradwireError as error:
            return Arrived(self._rejected(reply, str(error)), sent)
        return Arrived(result, sent, token)

    def _reject_odd_ones(self, results: list[Arrived], kind: str) -> None:
        usable = [(r, r.sent.model.record) for r in results if r.sent and not r.reply.has_error()]
        layouts = [rejected_replies.layout(result.reply, record) for result, record in usable]
        for i in rejected_replies.odd_ones(layouts, self._usual.setdefault(kind, set())):
            reason = "its records, arrays or metrics are unlike those of most replies"
            usable[i][0].reply = self._rejected(usable[i][0].reply, reason)
        rest = [result for result, _ in usable if not result.reply.has_error()]
        weights = [replies.metrics(result.reply).get(self.weighted_by) for result in rest]
        if rest and all(weight == 0 for weight in weights):  # their mean would be a division by zero
            for result in rest:
                result.reply = self._rejected(result.reply, f"the weights ({self.weighted_by}) of all are zero")

    def _rejected(self, reply: Message, why: str) -> Message:
        self.meter.of(reply).rejected += 1
        reason = f"gradwire: rejected the update of node {reply.metadata.src_node_id}: {why}"
        log(WARNING, "%s", reason)
        return like(reply, error=Error(REFUSED, reason))

    def _accept(self, sent: Sent, token: bytes) -> None:
        put_last(self.accepted, sent.node, token)
        self.models.has(sent.node, sent.model.number)
