"""Replies of clients as a strategy gets them: the server's model plus the update, as arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from logging import WARNING
from typing import Any

import torch
from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.supercore import log

from ..errors import FrameError, GradwireError
from . import arrays, update
from .download import Chain
from .message import is_bytes_record, open_update, single_arrays, with_records
from .models import Model
from .rate import Rate


def is_compressed(reply: Message) -> bool:
    return any(is_bytes_record(r) for r in reply.content.values() if isinstance(r, ArrayRecord))


def decoded(reply: Message, model: Model, weighted_by: str) -> tuple[Message, bytes]:
    """The reply with arrays in place of its update, and the update's token; a GradwireError that says why not."""
    found = single_arrays(reply)
    if found is None:
        raise GradwireError("other arrays beside the update")
    weight = metrics(reply).get(weighted_by)
    # One that is not a number would spoil the mean of all.
    if weight is not None and (isinstance(weight, list) or not math.isfinite(weight) or weight < 0):
        raise GradwireError(f"a weight ({weighted_by}) of {weight}")
    key, record = found
    token, data = open_update(record, model.number, model.record)
    changed = {**model.tensors, **update.decode(data, model.tensors, later=model.later)}
    later = {name: _sound(name, make, model, reply) for name, make in model.later.tensors.items()}
    record = arrays.record(
        {name: arrays.Decoded(tensor, later.get(name, tensor.clone)) for name, tensor in changed.items()}
    )
    return with_records(reply, {**reply.content, key: record}), token


def _sound(name: str, make: update.Tensor, model: Model, reply: Message) -> update.Tensor:
    """A tensor that is decoded when the strategy asks for it: of a forged frame, the server's own."""

    def made() -> torch.Tensor:
        try:
            return make()
        except FrameError as error:
            node = reply.metadata.src_node_id
            log(WARNING, "gradwire: %s in the update of node %s is left out: %s", name, node, error)
            return model.tensors[name].clone()

    return made


def raw(reply: Message, model: Model, chain: Chain | None) -> Message:
    """Raw arrays pass; a model that was made of the clients' copy gets what the copy does not have."""
    found = single_arrays(reply)
    # Only of the present model it is known what the copy does not have; a personal one went out as it is.
    if chain is None or model.number != chain.number or found is None:
        return reply
    if found[1].keys() != model.record.keys() or not arrays.supported(found[1].values()):
        return reply
    whole = chain.restored(arrays.tensors(found[1]))
    record = arrays.record({name: arrays.array(tensor) for name, tensor in whole.items()})
    return with_records(reply, {**reply.content, found[0]: record})


def metrics(reply: Message) -> dict[str, Any]:
    records = [record for record in reply.content.values() if isinstance(record, MetricRecord)]
    return {key: value for record in records for key, value in record.items()}


def observe(rate: Rate, replies: Sequence[Message], weighted_by: str) -> None:
    """Tell the rate what a round of training has come to."""
    reported = [metrics(reply) for reply in replies if not reply.has_error()]
    if not rate.loss or not reported:
        return
    if not any(rate.loss in found for found in reported):
        known = sorted({key for found in reported for key in found})
        raise GradwireError(
            f"the rate goes by the metric {rate.loss!r}, which no client reports: name one that they do, of "
            f"{', '.join(known) or 'none'}, as in AdaQuantFL(loss=…)"
        )
    rate.observe([(found[rate.loss], found.get(weighted_by, 1.0)) for found in reported if rate.loss in found])
