"""Replies on their way in: decoded for the strategy, rejected if they cannot be used, and their tokens accepted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from logging import WARNING

from flwr.app import Error, Message
from flwr.supercore import log

from gradwire.errors import GradwireError
from gradwire.flower.server import replies
from gradwire.flower.server.client_table import ClientTable
from gradwire.flower.server.layout_vote import Layout, LayoutVote, in_common_layout
from gradwire.flower.server.reply_checks import ReplyRules, metrics
from gradwire.flower.server.round_limits import ReplySize, RoundLimits
from gradwire.flower.server.sent_models import SentModel, SentModels
from gradwire.flower.server.traffic import Meter
from gradwire.flower.server.update_norm import UpdateNorm
from gradwire.flower.shared.adaptive_rate import Rate
from gradwire.flower.shared.message import NEEDS_WHOLE, NO_MEMORY, PERSONAL, REFUSED, category, with_error

COMPRESSED = ("train", "evaluate")  # categories of messages whose models may be compressed


@dataclass(frozen=True)
class AwaitedMessage:
    """A message that waits for its reply. `model` is None if it has not exactly one model, and left as it was."""

    original: Message  # as the strategy made it
    model: SentModel | None
    model_key: str = ""
    uses_memory: bool = True  # False if another message to this client was without a reply when it left

    @property
    def node(self) -> int:
        """The node id of the client that it was sent to."""
        return self.original.metadata.dst_node_id

    @property
    def kind(self) -> str:
        """The category of the message, whatever the reply claims to be."""
        return category(self.original)


@dataclass
class ReceivedReply:
    """A reply as the strategy will get it, and what its update is if it was compressed."""

    reply: Message
    awaited: AwaitedMessage | None = None
    token: bytes | None = None
    size: ReplySize | None = None

    def turn_into(self, reply: Message) -> None:
        """Hand another reply to the strategy in place of this one, such as an error."""
        self.reply = reply


class ReplyIntake:
    """Turns replies as they arrive into replies as a strategy expects them.

    It promises that every reply which it passes on without an error follows the rules, that its arrays have sound
    values, and, if the rules want one layout, the names and shapes of the model; and that the token of an update is
    accepted if and only if the strategy gets that update: a client whose update is rejected keeps its error memory of
    before. A reply that is rejected becomes an error reply with the reason, and is never dropped. Nothing that a client
    sends makes it raise. It is called in the thread of the server app only.
    """

    def __init__(self, models: SentModels, meter: Meter, rate: Rate | None, rules: ReplyRules, limits: RoundLimits):
        self.models, self.meter, self.rate, self.rules, self.limits = models, meter, rate, rules, limits
        self.accepted: ClientTable[bytes] = ClientTable()  # the last token of each client
        self._votes = {kind: LayoutVote() for kind in COMPRESSED} if rules.same_layout else {}
        self._warnings_given: set[str] = set()

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
            self.meter.count_reply(reply, awaited.kind if awaited else _known_category(reply))
            if awaited is None:
                results.append(self._unexpected(reply))
            elif reply.has_error():
                if reply.error.code == NEEDS_WHOLE and self._forget_copy(awaited) and retry:
                    send_again.append(awaited.original)
                else:
                    results.append(ReceivedReply(replies.explained(reply, awaited.node), awaited))
            else:
                uncompressed += awaited.kind == "train" and reply.has_content() and not replies.is_compressed(reply)
                results.append(self._opened(reply, awaited))
        for kind in COMPRESSED:
            self._compare([r for r in results if r.awaited and r.awaited.kind == kind], kind)
        for result in results:
            if result.awaited and result.awaited.model and result.token and not result.reply.has_error():
                if result.token != NO_MEMORY:
                    self.accepted.put(result.awaited.node, result.token)
                self.models.client_has(result.awaited.node, result.awaited.model.number)
        if uncompressed and not self.accepted:
            self._warn_once("no update is compressed so far: is gradwire.flower.compress a mod of the app?")
        self._observe([r.reply for r in results if r.awaited and r.awaited.kind == "train"])
        return [result.reply for result in results], send_again

    def _observe(self, trained: list[Message]) -> None:
        """Tell the adaptive rate, if there is one, what clients reported."""
        if not self.rate or replies.observe(self.rate, trained, self.rules.weighted_by):
            return
        reported = {name[:40] for reply in trained if not reply.has_error() for name in metrics(reply)}
        self._warn_once(
            f"the rate stays as it is: it follows the metric {self.rate.loss!r}, which no client has reported. "
            f"Name one that they do, of {', '.join(sorted(reported)[:10]) or 'none'}, as in AdaQuantFL(loss=…)"
        )

    def _unexpected(self, reply: Message) -> ReceivedReply:
        """Reject what answers no message that waits, such as a second reply; an error remains what it is."""
        if reply.has_error():
            return ReceivedReply(reply)
        reason = "it answers no message that waits for a reply"
        return ReceivedReply(self._rejected(reply, _known_category(reply), reason))

    def _forget_copy(self, awaited: AwaitedMessage) -> bool:
        """Forget the client's copy of the model; return False if the client was sent the whole model just now."""
        had_copy = awaited.node in self.models.copies and awaited.model is not None and awaited.model.number < PERSONAL
        self.models.forget_copy(awaited.node)
        return had_copy

    def _opened(self, reply: Message, awaited: AwaitedMessage) -> ReceivedReply:
        """Return the reply with arrays for the strategy, or with an error that says why it is rejected."""
        try:
            _check_answer(reply, awaited.original)
            if awaited.model is None:
                return ReceivedReply(reply, awaited)
            self.models.client_answered(awaited.node, awaited.model.number)
            return self._opened_update(reply, awaited, awaited.model)
        except GradwireError as error:
            return ReceivedReply(self._rejected(reply, awaited.kind, str(error)), awaited)

    def _opened_update(self, reply: Message, awaited: AwaitedMessage, model: SentModel) -> ReceivedReply:
        self.rules.check_records(reply, awaited.kind)
        weight = metrics(reply).get(self.rules.weighted_by)
        token: bytes | None = None
        norm: UpdateNorm | None
        if awaited.kind == "train" and replies.is_compressed(reply):
            self.meter.count_dense_update(model.record, awaited.kind)
            reply, token, norm = replies.decoded(reply, model)
            if token != NO_MEMORY and not awaited.uses_memory:
                raise GradwireError(
                    "it sends the error memory, which an update of the same client at the same time has sent already: "
                    "install the same gradwire on both sides"
                )
        else:
            self.meter.count_dense_reply(reply, awaited.kind)
            same_layout = self.rules.same_layout and awaited.kind == "train"
            reply, norm = replies.checked_raw(reply, model, self.models.chain, same_layout)
        self.rules.check_arrays(reply, awaited.kind)
        norms = model.norms if norm is not None else {}
        size = ReplySize(awaited.node, weight, norm if awaited.kind == "train" else None, norms)
        return ReceivedReply(reply, awaited, token, size)

    def _compare(self, results: list[ReceivedReply], kind: str) -> None:
        """Reject replies of a round that exceed its limits or are outvoted, and all of them if every weight is zero."""
        measured = [(r, r.size) for r in results if r.size and not r.reply.has_error()]
        for i, reason in self.limits.too_large([size for _, size in measured], kind).items():
            measured[i][0].turn_into(self._rejected(measured[i][0].reply, kind, reason))
        self._vote([result for result, _ in measured if not result.reply.has_error()], kind)
        left = [(result, size) for result, size in measured if not result.reply.has_error()]
        if left and all(size.weight == 0 for _, size in left):  # their mean would be a division by zero
            for result, _ in left:
                reason = f"the weights ({self.rules.weighted_by}) of all replies are zero"
                result.turn_into(self._rejected(result.reply, kind, reason))
        self.limits.accept([size for result, size in left if not result.reply.has_error()], kind)

    def _vote(self, results: list[ReceivedReply], kind: str) -> None:
        """Give all replies the same names of records and metrics, if the strategy needs that."""
        if kind not in self._votes or not results:
            return
        layouts = [Layout.of(result.reply, kind) for result in results]
        nodes = [result.reply.metadata.src_node_id for result in results]
        outvoted = self._votes[kind].outvoted(list(zip(nodes, layouts, strict=True)))
        for i in outvoted:
            reason = "its metrics, or the names of its records, are not those of most clients"
            results[i].turn_into(self._rejected(results[i].reply, kind, reason))
        rest = [i for i in range(len(results)) if i not in outvoted]
        if len({layouts[i] for i in rest}) > 1:
            self._warn_once("replies name different metrics: the strategy gets only those that all of them have")
            keys = {r.awaited.model_key for r in results if r.awaited}
            common = in_common_layout([results[i].reply for i in rest], [layouts[i] for i in rest], min(keys))
            for i, reply in zip(rest, common, strict=True):
                results[i].turn_into(reply)

    def _rejected(self, reply: Message, kind: str, why: str) -> Message:
        self.meter.count_rejected(kind)
        reason = f"gradwire: rejected the reply of node {reply.metadata.src_node_id}: {why}"
        log(WARNING, "%s", reason)
        return with_error(reply, Error(REFUSED, reason))

    def _warn_once(self, text: str) -> None:
        """Log a warning of a kind that this training has not logged before."""
        kind = text.partition(":")[0]
        if kind not in self._warnings_given:
            self._warnings_given.add(kind)
            log(WARNING, "gradwire: %s", text)


def _check_answer(reply: Message, message: Message) -> None:
    """Raise a GradwireError if a reply is not what the message asked for, or not by the client that was asked."""
    if not reply.has_content():
        raise GradwireError("it has no content")
    if reply.metadata.src_node_id != message.metadata.dst_node_id:
        raise GradwireError(f"node {message.metadata.dst_node_id} was asked, and not this one")
    if reply.metadata.message_type != message.metadata.message_type:
        asked = message.metadata.message_type
        raise GradwireError(f"it answers {reply.metadata.message_type[:40]!r}, but was asked to {asked!r}")


def _known_category(reply: Message) -> str:
    """Return the category that a reply claims, if there is such a one: clients must not fill the server's tables."""
    kind = category(reply)
    return kind if kind in (*COMPRESSED, "query") else "other"
