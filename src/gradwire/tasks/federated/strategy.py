"""`SeededFedAvg`: federated averaging whose outcome depends on the seed alone."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

from gradwire.errors import AggregateError
from gradwire.flower import message_bytes
from gradwire.tasks.example_order import derived_seed
from gradwire.tasks.federated.settings import FederatedSettings

LONGEST_REASON = 300
OnFailure = Callable[[int, int, str], None]  # round, client, reason


class SeededFedAvg(FedAvg):
    """FedAvg that samples clients, and adds up their replies, by the clients' numbers.

    Flower's FedAvg samples by node ids, which are random, and adds up replies in the order of their arrival. A client
    whose reply cannot be used is left out of the round and reported to `on_failure`. A round without any usable reply
    raises an AggregateError, which ends the run, and so does the loss of a process.
    """

    def __init__(
        self, settings: FederatedSettings, nodes: Sequence[int], message_type: str, on_failure: OnFailure
    ) -> None:
        super().__init__(fraction_evaluate=0.0)  # the server evaluates: that costs no bytes
        self.settings, self.nodes, self.message_type, self.on_failure = settings, nodes, message_type, on_failure
        self.numbers = {node: number for number, node in enumerate(nodes)}
        self.raw_download = self.raw_upload = 0  # bytes of a message and its reply as Flower would send them
        self.failed = 0
        self.seconds: list[float] = []  # of each round, without the evaluation

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the messages of a round to clients that the seed chooses."""
        self._started = time.perf_counter()
        draw = random.Random(derived_seed(self.settings.seed, 1 << 32, server_round))
        chosen = sorted(draw.sample(range(self.settings.clients), self.settings.per_round))
        config["server-round"] = server_round
        record = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: config})
        messages = [Message(record, self.nodes[number], self.message_type) for number in chosen]
        self.raw_download = self.raw_download or message_bytes(messages[0])
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the weighted mean of the usable replies, and their metrics."""
        arrived = sorted(replies, key=lambda reply: self.numbers[reply.metadata.src_node_id])
        usable = [reply for reply in arrived if not reply.has_error()]
        if any(reply.has_error() and reply.error.code == ErrorCode.UNKNOWN for reply in arrived):
            # An error of the engine, not of the client. Flower would go on sending messages to a dead process.
            raise AggregateError(
                f"round {server_round}: a process of the simulation was lost: is there enough memory? With more "
                "--threads, fewer clients run at a time"
            )
        reasons = {
            self.numbers[reply.metadata.src_node_id]: " ".join(str(reply.error.reason).split())[:LONGEST_REASON]
            for reply in arrived
            if reply.has_error()
        }
        if not usable:
            client, reason = next(iter(reasons.items()), (None, "no client has replied"))
            who = "" if client is None else f"client {client}: "
            raise AggregateError(f"round {server_round} has no reply that can be used; {who}{reason}")
        for client, reason in reasons.items():
            self.on_failure(server_round, client, reason)
        self.failed += len(reasons)
        self.raw_upload = self.raw_upload or message_bytes(usable[0])
        outcome = super().aggregate_train(server_round, usable)
        self.seconds.append(time.perf_counter() - self._started)
        return outcome
