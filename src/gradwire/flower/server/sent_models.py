"""The server's models as clients get them: whole, or what they missed of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from flwr.app import Array, ArrayRecord

from gradwire.catalogue.spec_by_name import Spec
from gradwire.flower.server.download_chain import Chain
from gradwire.flower.shared import arrays
from gradwire.flower.shared.lazy_tensors import Later
from gradwire.flower.shared.message import PERSONAL, as_bytes_record

MOST_CLIENTS = 1 << 20
Known = TypeVar("Known")


def put_last(of_clients: OrderedDict[int, Known], node: int, known: Known) -> None:
    """What is known of a client; of too many, those that were not heard of for longest are forgotten."""
    of_clients[node] = known
    of_clients.move_to_end(node)
    while len(of_clients) > MOST_CLIENTS:
        of_clients.popitem(last=False)


@dataclass
class Model:
    """A model as a strategy handed it over."""

    number: int
    record: ArrayRecord
    later: Later = field(default_factory=Later)
    _tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        if not self._tensors:
            self._tensors = arrays.tensors(self.record)
        return self._tensors


class Models:
    def __init__(self, download: Spec | None):
        self.chain = Chain(download) if download is not None else None
        self.copies: OrderedDict[int, int] = OrderedDict()  # number of the model that each client is known to have
        self._last: Model | None = None
        self._whole: tuple[int, ArrayRecord] | None = None
        self._missed: tuple[bytes | None, ArrayRecord] | None = None
        self._numbers = 0

    def number(self, records: Sequence[ArrayRecord]) -> dict[int, Model]:
        """The models of an exchange, by identity of their records; one for all clients has a number in the chain."""
        distinct = {id(record): record for record in records}
        if len(distinct) == 1:
            ((identity, record),) = distinct.items()
            return {identity: self._common(record)}
        models = {}
        for identity, record in distinct.items():
            self._numbers = self._numbers % (PERSONAL - 1) + 1
            models[identity] = Model(PERSONAL + self._numbers, record)
        return models

    def _common(self, record: ArrayRecord) -> Model:
        if self._last is None or self._last.record is not record:
            model = Model(self._last.number + 1 if self._last else 1, record)
            if self.chain:
                model.number = self.chain.publish(model.tensors)
            self._last = model
        return self._last

    def for_client(self, node: int, model: Model) -> tuple[ArrayRecord, int | None]:
        """What to send, and which model it starts from: 0 for none, None where clients keep no copy."""
        if self.chain is None or model.number >= PERSONAL:
            return model.record, None
        have = self.copies.get(node, 0)
        data = self.chain.missed(have)
        if data is None:
            return self._whole_record(), 0
        if self._missed is None or self._missed[0] is not data:  # the same bytes for all with the same model
            self._missed = data, as_bytes_record(data)
        return self._missed[1], have

    def _whole_record(self) -> ArrayRecord:
        assert self.chain is not None
        if self._whole is None or self._whole[0] != self.chain.number:
            record = ArrayRecord({name: Array(tensor.numpy()) for name, tensor in self.chain.common.items()})
            self._whole = self.chain.number, record
        return self._whole[1]

    def answered(self, node: int, number: int) -> None:
        """A client with a copy has used this model, so that its copy is of it."""
        if node in self.copies:
            self.has(node, number)

    def has(self, node: int, number: int) -> None:
        """A client has told that it has this model."""
        if self.chain is not None and number < PERSONAL:
            put_last(self.copies, node, number)

    def has_none(self, node: int) -> None:
        self.copies.pop(node, None)
