"""Replies on their way in: decoded for the strategy, rejected if they are damaged, and their tokens accepted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from logging import WARNING

from flwr.app import Error, Message
from flwr.supercore import log

from gradwire.errors import GradwireError
from gradwire.flower.server import replies
from gradwire.flower.server.client_table import ClientTable
from gradwire.flower.server.rejected_replies import LayoutVote, reply_layout
from gradwire.flower.server.sent_models import SentModel, SentModels
from gradwire.flower.server.traffic import Meter
from gradwire.flower.shared.adaptive_rate import Rate
from gradwire.flower.shared.message import NEEDS_WHOLE, PERSONAL, REFUSED, category, with_error

COMPRESSED = ("train", "evaluate")  # categories of messages whose models may be compressed


@dataclass(frozen=True)
class AwaitedMessage:
    """A message that waits for its reply."""

    original: Message  # as the strategy made it
    node: int
    model: SentModel


@dataclass
class ReceivedReply:
    """A reply as the strategy will get it, and the token of its update if it was compressed."""

    reply: Message
    awaited: AwaitedMessage | None = None
    token: bytes | None = None

    def turn_into(self, error_reply: Message) -> None:
        """Hand an error to the strategy in place of this reply."""
        self.reply = error_reply


class ReplyIntake:
    """Turns replies as they arrive into replies as a strategy expects them.

    It promises that every reply which it passes on without an error holds arrays of the model's names and shapes with
    sound values, and that the token of an update is accepted if and only if the strategy gets that update: a client
    whose update is rejected keeps its error memory of before. A reply that is rejected becomes an error reply with the
    reason, and is never dropped. It is called in the thread of the server app only.
    """

    def __init__(
        self, models: SentModels, meter: Meter, rate: Rate | None, weighted_by: str, require_same_layout: bool
    ):
        self.models, self.meter, self.rate, self.weighted_by = models, meter, rate, weighted_by
        self.accepted: ClientTable[bytes] = ClientTable()  # the last token of each client
        self._votes = {kind: LayoutVote() for kind in COMPRESSED} if require_same_layout else {}
        self._warned = False

    def take(
        self, arrived: Iterable[tuple[Message, AwaitedMessage | None]], retry: bool
    ) -> tuple[list[Message], list[Message]]:
        """Return the replies for the strategy, and the messages that have to be sent again with the whole model.

        Each reply comes with the message that it answers, or None if no such message waits for one. Without `retry`
        nothing is sent again: the strategy is told that the client needs the whole model, which is in its next message.
        """
        results: list[ReceivedReply] = []
        send_again: list[Message] = []
        uncompressed = 0
        for reply, awaited in arrived:
            self.meter.count_reply(reply)
            if awaited is None:
                results.append(self._unexpected(reply))
            elif reply.has_error():
                if reply.error.code == NEEDS_WHOLE and self._forget_copy(awaited) and retry:
                    send_again.append(awaited.original)
                else:
                    results.append(ReceivedReply(replies.explained(reply, awaited.node), awaited))
            else:
                uncompressed += category(reply) == "train" and not replies.is_compressed(reply)
                results.append(self._opened(reply, awaited))
        for kind, vote in self._votes.items():
            self._reject_unlike([r for r in results if r.awaited and category(r.awaited.original) == kind], vote)
        for result in results:
            if result.awaited and result.token and not result.reply.has_error():
                self._accept(result.awaited, result.token)
        if uncompressed and not self.accepted and not self._warned:
            self._warned = True
            log(WARNING, "gradwire: no update is compressed so far: is gradwire.flower.compress a mod of the app?")
        for_strategy = [result.reply for result in results]
        if self.rate:
            replies.observe(self.rate, [r for r in for_strategy if category(r) == "train"], self.weighted_by)
        return for_strategy, send_again

    def _unexpected(self, reply: Message) -> ReceivedReply:
        """Pass on a reply to a message that gradwire did not change, unless it holds an update."""
        if reply.has_content() and replies.is_compressed(reply):
            return ReceivedReply(self._rejected(reply, "it answers no message that waits for a reply"))
        return ReceivedReply(reply)

    def _forget_copy(self, awaited: AwaitedMessage) -> bool:
        """Forget the client's copy of the model; return False if the client was sent the whole model just now."""
        had_copy = awaited.node in self.models.copies and awaited.model.number < PERSONAL
        self.models.forget_copy(awaited.node)
        return had_copy

    def _opened(self, reply: Message, awaited: AwaitedMessage) -> ReceivedReply:
        """Return the reply with arrays for the strategy, or with an error that says why it is rejected."""
        self.models.client_answered(awaited.node, awaited.model.number)
        try:
            if not replies.is_compressed(reply):
                self.meter.count_dense_reply(reply)
                checked = replies.checked_raw(reply, awaited.model, self.models.chain, self.weighted_by)
                return ReceivedReply(checked, awaited)
            self.meter.count_dense_update(reply, awaited.model.record)
            opened, token = replies.decoded(reply, awaited.model, self.weighted_by)
            return ReceivedReply(opened, awaited, token)
        except GradwireError as error:
            return ReceivedReply(self._rejected(reply, str(error)), awaited)

    def _reject_unlike(self, results: list[ReceivedReply], vote: LayoutVote) -> None:
        """Reject replies that differ from most of their round, and all of them if every weight is zero."""
        usable = [(r, r.awaited.model.record) for r in results if r.awaited and not r.reply.has_error()]
        for i in vote.outvoted([reply_layout(result.reply, record) for result, record in usable]):
            reason = "its records, arrays or metrics are unlike those of most replies"
            usable[i][0].turn_into(self._rejected(usable[i][0].reply, reason))
        rest = [result for result, _ in usable if not result.reply.has_error()]
        weights = [replies.metrics(result.reply).get(self.weighted_by) for result in rest]
        if rest and all(weight == 0 for weight in weights):  # their mean would be a division by zero
            for result in rest:
                result.turn_into(self._rejected(result.reply, f"the weights ({self.weighted_by}) of all are zero"))

    def _rejected(self, reply: Message, why: str) -> Message:
        self.meter.count_rejected(reply)
        reason = f"gradwire: rejected the update of node {reply.metadata.src_node_id}: {why}"
        log(WARNING, "%s", reason)
        return with_error(reply, Error(REFUSED, reason))

    def _accept(self, awaited: AwaitedMessage, token: bytes) -> None:
        self.accepted.put(awaited.node, token)
        self.models.client_has(awaited.node, awaited.model.number)
