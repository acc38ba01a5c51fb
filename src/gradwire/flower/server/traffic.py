"""Counts of the messages and bytes that travel between server and clients, measured at Flower's messages."""

from __future__ import annotations

from dataclasses import dataclass

from flwr.app import ArrayRecord, Message

from gradwire.flower.shared.message import category
from gradwire.flower.shared.message_lengths import message_bytes


@dataclass
class Traffic:
    """The counts of one category of messages. docs/flower.md explains them; `Compressed.stats` returns them."""

    messages: int = 0
    replies: int = 0
    download_bytes: int = 0  # from the server to clients
    upload_bytes: int = 0
    dense_download_bytes: int = 0  # of the same models and replies as raw arrays, without Flower's own bytes
    dense_upload_bytes: int = 0  # an update counts as a model in the dtypes of the first that clients were sent
    rejected: int = 0  # replies


class Meter:
    """The counts of a training, by category of message: `train`, `evaluate`, `query`.

    Its methods are the only ones that change the counts. They are called in the thread of the server app.
    """

    def __init__(self) -> None:
        self.by_category: dict[str, Traffic] = {}
        self._first_sizes: dict[tuple[str, tuple[int, ...]], int] = {}  # bytes of the first model, by name and shape

    def _traffic(self, kind: str) -> Traffic:
        return self.by_category.setdefault(kind, Traffic())

    def count_message(self, message: Message, sizes: dict[int, int]) -> None:
        """Count a message that leaves.

        `sizes` are the bytes of records by their identity, which this method fills: many messages carry the same model,
        which is measured once.
        """
        traffic = self._traffic(category(message))
        traffic.messages += 1
        if not message.has_content():
            return
        for record in message.content.values():
            if id(record) not in sizes:
                sizes[id(record)] = message_bytes(record)
        records = sum(sizes[id(record)] for record in message.content.values())
        traffic.download_bytes += records + len(message.content.deflate()) + len(message.deflate())

    def count_reply(self, reply: Message, kind: str) -> None:
        """Count a reply that arrived, whether it can be used or not, to a message of this category."""
        traffic = self._traffic(kind)
        traffic.replies += 1
        traffic.upload_bytes += message_bytes(reply)

    def count_dense_model(self, message: Message, model: ArrayRecord) -> None:
        """Count the uncompressed bytes of the model that a message stands for."""
        if not self._first_sizes:
            self._first_sizes = {(name, tuple(a.shape)): len(a.data) for name, a in model.items()}
        self._traffic(category(message)).dense_download_bytes += _dense_bytes(model)

    def count_dense_update(self, model: ArrayRecord, kind: str) -> None:
        """Count the bytes that a client would have sent without compression in place of an update to this model.

        Clients keep the dtypes they began with, while some strategies (FedAdam) turn the server's fp32 into fp64.
        """
        sizes = ((self._first_sizes.get((name, tuple(a.shape))), a) for name, a in model.items())
        self._traffic(kind).dense_upload_bytes += sum(len(a.data) if size is None else size for size, a in sizes)

    def count_dense_reply(self, reply: Message, kind: str) -> None:
        """Count the bytes of the arrays in a reply that is not compressed."""
        self._traffic(kind).dense_upload_bytes += sum(map(_dense_bytes, reply.content.array_records.values()))

    def count_rejected(self, kind: str) -> None:
        """Count a reply that the server rejected."""
        self._traffic(kind).rejected += 1


def _dense_bytes(record: ArrayRecord) -> int:
    return sum(len(array.data) for array in record.values())
