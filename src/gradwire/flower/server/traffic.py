"""What travelled between server and clients, measured at Flower's messages."""

from __future__ import annotations

from dataclasses import dataclass

from flwr.app import ArrayRecord, Message

from gradwire.flower.shared.message import category
from gradwire.flower.shared.message_lengths import message_bytes


@dataclass
class Traffic:
    """Of one category of messages."""

    messages: int = 0
    replies: int = 0
    download_bytes: int = 0  # from the server to clients
    upload_bytes: int = 0
    dense_download_bytes: int = 0  # of the same models and replies as raw arrays, without Flower's own bytes
    dense_upload_bytes: int = 0  # an update counts as a model in the dtypes of the first that clients were sent
    rejected: int = 0


class Meter:
    def __init__(self) -> None:
        self.by_category: dict[str, Traffic] = {}
        self._first: dict[tuple[str, tuple[int, ...]], int] = {}  # bytes of the first model's arrays, by name and shape

    def of(self, message: Message) -> Traffic:
        return self.by_category.setdefault(category(message), Traffic())

    def leaving(self, message: Message, sizes: dict[int, int]) -> None:
        """`sizes` are those of records by identity: models are the same in many messages, and are measured once."""
        traffic = self.of(message)
        traffic.messages += 1
        if not message.has_content():
            return
        for record in message.content.values():
            if id(record) not in sizes:
                sizes[id(record)] = message_bytes(record)
        records = sum(sizes[id(record)] for record in message.content.values())
        traffic.download_bytes += records + len(message.content.deflate()) + len(message.deflate())

    def arrived(self, reply: Message) -> None:
        traffic = self.of(reply)
        traffic.replies += 1
        traffic.upload_bytes += message_bytes(reply)

    def dense_model(self, message: Message, model: ArrayRecord) -> None:
        """A model that leaves, whole or not."""
        self._first = self._first or {(name, tuple(a.shape)): len(a.data) for name, a in model.items()}
        self.of(message).dense_download_bytes += dense_bytes(model)

    def dense_update(self, reply: Message, model: ArrayRecord) -> None:
        """What a client would have sent in place of an update to this model.

        Clients keep to the dtypes they began with, while some strategies (FedAdam) make fp64 of the server's fp32.
        """
        sizes = ((self._first.get((name, tuple(a.shape))), a) for name, a in model.items())
        self.of(reply).dense_upload_bytes += sum(len(a.data) if size is None else size for size, a in sizes)


def dense_bytes(record: ArrayRecord) -> int:
    return sum(len(array.data) for array in record.values())
