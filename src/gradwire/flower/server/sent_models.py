"""The server's models as clients get them: whole, or as the steps that lead to them from the client's copy."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from flwr.app import Array, ArrayRecord

from gradwire.catalogue.spec_by_name import Spec
from gradwire.flower.server import update_norm
from gradwire.flower.server.client_table import ClientTable
from gradwire.flower.server.download_chain import DownloadChain
from gradwire.flower.server.lazy_tensors import LazyTensors
from gradwire.flower.shared import arrays
from gradwire.flower.shared.message import PERSONAL, as_bytes_record


@dataclass
class SentModel:
    """A model that a strategy has sent to clients, with the number by which their updates refer to it.

    It stays the same until all replies are in, since updates are decoded onto its tensors. Nobody changes them. It is
    used in the thread of the server app.
    """

    number: int
    record: ArrayRecord
    integers: frozenset[str] = frozenset()  # names of arrays that were integers when the training began
    lazy_tensors: LazyTensors = field(default_factory=LazyTensors)
    _tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The arrays as tensors, which may share memory with them."""
        if not self._tensors:
            self._tensors = arrays.tensors(self.record)
        return self._tensors

    @functools.cached_property
    def reals(self) -> dict[str, torch.Tensor]:
        """All arrays of numbers as tensors that replies can be compared with; complex entries are pairs."""
        if arrays.supported(self.record.values()):
            return self.tensors
        found = {name: arrays.reals(name, array) for name, array in self.record.items()}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    @functools.cached_property
    def counted(self) -> dict[str, torch.Tensor]:
        """The tensors that count to the norm of an update."""
        return update_norm.counted(self.reals, self.integers)

    @functools.cached_property
    def norms(self) -> dict[str, float]:
        """The norms of the model itself, by group of tensors."""
        return update_norm.model_norms(self.counted)

    def has_layout_of(self, record: ArrayRecord) -> bool:
        """Whether the arrays of a reply are those of the model, by names and shapes."""
        if record.keys() != self.record.keys():
            return False
        return all(tuple(array.shape) == tuple(self.record[name].shape) for name, array in record.items())


class SentModels:
    """Numbers the models of a training and knows which of them each client has.

    A model that goes to all clients gets the next number, from 1; models that differ between clients get numbers from
    `PERSONAL` on, and always go out whole. With a `download` recipe the former go through a `DownloadChain`, and
    clients that are known to have a copy get the steps since then.

    It promises never to count on a copy that the client has not confirmed by an answer. It never changes the records of
    a strategy, and holds one common model at a time. It is used in the thread of the server app.
    """

    def __init__(self, download: Spec | None):
        self.chain = DownloadChain(download) if download is not None else None
        self.copies: ClientTable[int] = ClientTable()  # number of the model that each client is known to have
        self._common: SentModel | None = None
        self._whole: tuple[int, ArrayRecord] | None = None  # number and record of the last whole model
        self._steps: tuple[bytes, ArrayRecord] | None = None  # data and record of the last steps
        self._personal_models = 0
        self._integers: frozenset[str] = frozenset()

    def number_models(self, records: Sequence[ArrayRecord]) -> dict[int, SentModel]:
        """Return the models of one exchange by the identity of their records.

        If all messages carry the same record it is the common model; the same record again has the same number.
        """
        distinct = {id(record): record for record in records}
        for record in distinct.values():
            self._integers |= {
                name for name, array in record.items() if not any(kind in array.dtype for kind in ("float", "complex"))
            }
        if len(distinct) == 1:
            ((identity, record),) = distinct.items()
            return {identity: self._common_model(record)}
        models = {}
        for identity, record in distinct.items():
            self._personal_models = self._personal_models % (PERSONAL - 1) + 1
            models[identity] = SentModel(PERSONAL + self._personal_models, record, self._integers)
        return models

    def _common_model(self, record: ArrayRecord) -> SentModel:
        if self._common is None or self._common.record is not record:
            if self.chain:
                tensors = arrays.tensors(record)
                self._common = SentModel(self.chain.publish(tensors), record, self._integers, _tensors=tensors)
            else:
                number = self._common.number + 1 if self._common else 1
                self._common = SentModel(number, record, self._integers)
        return self._common

    def for_client(self, node: int, model: SentModel) -> tuple[ArrayRecord, int | None]:
        """Return the record to send to a client, and the number of the model that its steps start from.

        The number is 0 if the record is the whole model, and None if clients keep no copy of it.
        """
        if self.chain is None or model.number >= PERSONAL:
            return model.record, None
        have = self.copies.get(node, 0)
        data = self.chain.steps_since(have)
        if data is None:
            return self._whole_record(self.chain), 0
        if self._steps is None or self._steps[0] is not data:  # clients with the same copy share the record
            self._steps = data, as_bytes_record(data)
        return self._steps[1], have

    def _whole_record(self, chain: DownloadChain) -> ArrayRecord:
        if self._whole is None or self._whole[0] != chain.number:
            record = ArrayRecord({name: Array(tensor.numpy()) for name, tensor in chain.shared_copy.items()})
            self._whole = chain.number, record
        return self._whole[1]

    def client_answered(self, node: int, number: int) -> None:
        """Note that a client has answered a message with this model; if it keeps a copy, that is now of this model."""
        if node in self.copies:
            self.client_has(node, number)

    def client_has(self, node: int, number: int) -> None:
        """Note that a client is certain to have a copy of this model."""
        if self.chain is not None and number < PERSONAL:
            self.copies.put(node, number)

    def forget_copy(self, node: int) -> None:
        """Note that a client has no copy that can be used."""
        self.copies.pop(node, None)
