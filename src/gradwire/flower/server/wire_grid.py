"""`Wire`: Flower's grid, with messages compressed on their way out and decoded on their way in.

A strategy hands its messages to a grid and gets the replies from it. Since the grid does the compression, strategies
and any other code that uses a grid work as before.
"""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from gradwire.catalogue.spec_by_name import Spec
from gradwire.flower.server.client_table import ClientTable
from gradwire.flower.server.grid_wrapper import GridWrapper
from gradwire.flower.server.reply_checks import ReplyRules
from gradwire.flower.server.reply_intake import COMPRESSED, AwaitedMessage, ReplyIntake
from gradwire.flower.server.round_limits import RoundLimits
from gradwire.flower.server.sent_models import SentModel, SentModels
from gradwire.flower.server.traffic import Meter
from gradwire.flower.shared.adaptive_rate import Rate
from gradwire.flower.shared.message import NOTE, TRAINING, Note, category, single_arrays, with_records

MOST_TOKENS = 4096  # to a client that is new to this server
MOST_AWAITED = 1 << 16  # messages without a reply yet


class Wire(GridWrapper):
    """A grid that behaves as the one it wraps, and sends fewer bytes.

    `download` is the recipe of what goes to clients, None for whole models; `rate` says how finely clients quantize;
    `weighted_by` is the metric by which the strategy weights replies. With `require_same_layout`, which the strategies
    of Flower need, every reply has to hold exactly one MetricRecord with that metric, the metrics that most clients
    have, and, after training, the arrays of the model that was sent; `needed_metrics` are others that the strategy
    computes models from. `max_norm` and `max_weight` are those of `Compressed`. With `adds_trees`, for Flower's
    FedXgbBagging, every reply has to hold trees of XGBoost.

    It promises that the caller gets one reply for every reply that arrives, with the model's arrays in place of an
    update, or an error that says why the update was rejected. Messages of other kinds, and replies of clients without
    the mod, pass unchanged. It never changes a message that it is given, and never raises because of what a client has
    sent. As with Flower's own grids, one thread uses it, that of the server app; one `Wire` is one training. A
    client that gets a message before it has answered the last one trains without its error memory.
    """

    def __init__(
        self, grid: Grid, *, download: Spec | None = None, rate: Rate | None = None, weighted_by: str = "num-examples",
        require_same_layout: bool = False, needed_metrics: tuple[str, ...] = (), max_norm: float | str | None = "auto",
        max_weight: float | str | None = "auto", adds_trees: bool = False,
    ):  # fmt: skip
        super().__init__(grid)
        self.rate = rate
        self.training = secrets.token_bytes(TRAINING)
        self.models = SentModels(download)
        self.meter = Meter()
        rules = ReplyRules(weighted_by, require_same_layout, needed_metrics, adds_trees)
        self._intake = ReplyIntake(self.models, self.meter, rate, rules, RoundLimits(max_norm, max_weight))
        self._awaited: OrderedDict[str, AwaitedMessage] = OrderedDict()  # by id of the message

    @property
    def accepted(self) -> ClientTable[bytes]:
        """The token of the last update of each client that the strategy got, by node id."""
        return self._intake.accepted

    # ── Flower's interface ──

    def get_nodes(self) -> Iterable[Any]:
        """Return the nodes that are connected."""
        return self.grid.get_nodes()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages, compressed, without waiting for replies, and return their ids."""
        outgoing = self._prepare(messages)
        ids = list(self.grid.push_messages([message for message, _ in outgoing]))
        self._await_replies(outgoing)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies to these messages that have arrived, decoded."""
        return self._take(self.grid.pull_messages(message_ids), retry=False)[0]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send messages, compressed, and return the decoded replies that arrive within `timeout` seconds.

        A client that cannot use the steps of a compressed download gets the whole model in the same round.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        result: list[Message] = []
        outgoing = self._prepare(messages)
        while outgoing:
            time_left = None if deadline is None else max(0.0, deadline - time.monotonic())
            arrived = list(self.grid.send_and_receive([message for message, _ in outgoing], timeout=time_left))
            self._await_replies(outgoing)
            for_caller, send_again = self._take(arrived, retry=True)
            result += for_caller
            for message, _ in outgoing:  # a reply that has not come by now would be too late
                self._awaited.pop(message.metadata.message_id, None)
            outgoing = self._prepare(send_again) if deadline is None or time.monotonic() < deadline else []
        return result

    # ── messages out ──

    def _prepare(self, messages: Iterable[Message]) -> list[tuple[Message, AwaitedMessage]]:
        """Return the messages as they leave, each with what its reply needs."""
        messages = list(messages)
        model_records = [single_arrays(m) if m.has_content() and category(m) in COMPRESSED else None for m in messages]
        models = self.models.number_models([found[1] for found in model_records if found is not None])
        sizes: dict[int, int] = {}
        busy = self._busy_nodes()
        outgoing: list[tuple[Message, AwaitedMessage]] = []
        for message, model_record in zip(messages, model_records, strict=True):
            if model_record is None:
                outgoing.append((message, AwaitedMessage(message, None)))
            else:
                key, record = model_record
                node = message.metadata.dst_node_id
                awaited = AwaitedMessage(message, models[id(record)], key, uses_memory=node not in busy)
                outgoing.append((self._with_note(message, key, models[id(record)], awaited.uses_memory), awaited))
                if category(message) == "train":
                    busy.add(node)
            self.meter.count_message(outgoing[-1][0], sizes)
        return outgoing

    def _busy_nodes(self) -> set[int]:
        """Return the clients that are training, as far as is known: they have not replied, and still may."""
        now = time.time()
        return {
            awaited.node
            for awaited in self._awaited.values()
            if awaited.kind == "train" and now < awaited.original.metadata.created_at + awaited.original.metadata.ttl
        }

    def _with_note(self, message: Message, key: str, model: SentModel, uses_memory: bool) -> Message:
        """Return the message with the server's note, and with the steps to the model where the client has a copy."""
        node = message.metadata.dst_node_id
        record, have = self.models.for_client(node, model)
        rate = self.rate.instruction() if self.rate and category(message) == "train" else None
        note = Note(self.training, model.number, self._accepted_of(node), rate, have, uses_memory)
        self.meter.count_dense_model(message, model.record)
        return with_records(message, {**message.content, key: record, NOTE: note.record()})

    def _accepted_of(self, node: int) -> tuple[bytes, ...]:
        """Return the last token of this client, or of a new one those of all: it may have had another node id."""
        if node in self.accepted:
            return (self.accepted[node],)
        return tuple(list(self.accepted.values())[-MOST_TOKENS:])

    def _await_replies(self, outgoing: list[tuple[Message, AwaitedMessage]]) -> None:
        for message, awaited in outgoing:  # Flower has given them their ids by now
            self._awaited[message.metadata.message_id] = awaited
        while len(self._awaited) > max(MOST_AWAITED, len(outgoing)):
            self._awaited.popitem(last=False)

    # ── replies in ──

    def _take(self, arrived: Iterable[Message], retry: bool) -> tuple[list[Message], list[Message]]:
        pairs = ((reply, self._awaited.pop(reply.metadata.reply_to_message_id, None)) for reply in arrived)
        return self._intake.take(pairs, retry)
