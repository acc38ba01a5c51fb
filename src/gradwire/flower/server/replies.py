"""Replies of clients as a strategy gets them: the server's model plus the update, as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from logging import WARNING
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, Error, Message, MetricRecord
from flwr.supercore import log

from gradwire.errors import FrameError, GradwireError
from gradwire.flower.server.download_chain import Chain
from gradwire.flower.server.sent_models import Model
from gradwire.flower.shared import arrays, update
from gradwire.flower.shared.adaptive_rate import Rate
from gradwire.flower.shared.lazy_tensors import Tensor
from gradwire.flower.shared.message import (
    STYPE,
    category,
    is_bytes_record,
    like,
    open_update,
    single_arrays,
    with_records,
)

MOST_WEIGHT = 2.0**63  # so that weights of all clients have a finite sum


def is_compressed(reply: Message) -> bool:
    return any(is_bytes_record(r) for r in reply.content.values() if isinstance(r, ArrayRecord))


def decoded(reply: Message, model: Model, weighted_by: str) -> tuple[Message, bytes]:
    """The reply with arrays in place of its update, and the update's token; a GradwireError that says why not."""
    found = single_arrays(reply)
    if found is None:
        raise GradwireError("other arrays beside the update")
    check_weight(reply, weighted_by)
    key, record = found
    token, data = open_update(record, model.number, model.record)
    changed = {**model.tensors, **_not_negative(update.decode(data, model.tensors, later=model.later), model)}
    later = {name: _sound(name, make, model, reply) for name, make in model.later.tensors.items()}
    record = arrays.record(
        {name: arrays.Decoded(tensor, later.get(name, tensor.clone)) for name, tensor in changed.items()}
    )
    return with_records(reply, {**reply.content, key: record}), token


def _sound(name: str, make: Tensor, model: Model, reply: Message) -> Tensor:
    """A tensor that is decoded when the strategy asks for it: of a forged frame, the server's own."""

    def made() -> torch.Tensor:
        try:
            return make()
        except FrameError as error:
            node = reply.metadata.src_node_id
            log(WARNING, "gradwire: %s in the update of node %s is left out: %s", name, node, error)
            return model.tensors[name].clone()

    return made


def check_weight(reply: Message, weighted_by: str) -> None:
    """One that is no number of examples would spoil the mean of all."""
    weight = metrics(reply).get(weighted_by)
    if weight is not None and (isinstance(weight, list) or not 0 <= weight <= MOST_WEIGHT):
        raise GradwireError(f"a weight ({weighted_by}) of {weight}")


def _not_negative(changed: dict[str, torch.Tensor], model: Model) -> dict[str, torch.Tensor]:
    """Variances that rounding has taken below zero, where batch normalization would make NaNs of them, are zero."""
    for name, tensor in changed.items():
        if update.is_variance(name) and tensor.is_floating_point() and not bool((model.tensors[name] < 0).any()):
            changed[name] = tensor.clamp(min=0)
    return changed


def raw(reply: Message, model: Model, chain: Chain | None, weighted_by: str) -> Message:
    """Raw arrays pass if they are what they say they are, and finite; a model that was made of the clients' copy gets
    what the copy does not have."""
    check_weight(reply, weighted_by)
    for record in reply.content.array_records.values():
        for name, array in record.items():
            if array.stype == arrays.NUMPY:
                _check_raw(name, array, model)
    found = single_arrays(reply)
    # Only of the present model it is known what the copy does not have; a personal one went out as it is.
    if chain is None or model.number != chain.number or found is None:
        return reply
    if found[1].keys() != model.record.keys() or not arrays.supported(found[1].values()):
        return reply
    whole = _not_negative(chain.restored(arrays.tensors(found[1])), model)
    record = arrays.record({name: arrays.array(tensor) for name, tensor in whole.items()})
    return with_records(reply, {**reply.content, found[0]: record})


def _check_raw(name: str, array: Array, model: Model) -> None:
    values = arrays.values(name, array)
    if array.dtype not in ("float16", "float32", "float64"):
        return
    before = model.tensors[name] if name in model.record and arrays.supported(model.record.values()) else torch.empty(0)
    tensor = torch.from_numpy(values.copy())
    update.check_size(name, tensor, before)
    if update.is_variance(name) and bool((tensor < 0).any()) and not bool((before < 0).any()):
        raise GradwireError(f"a negative variance in {name!r}")


def metrics(reply: Message) -> dict[str, Any]:
    records = [record for record in reply.content.values() if isinstance(record, MetricRecord)]
    return {key: value for record in records for key, value in record.items()}


def observe(rate: Rate, replies: Sequence[Message], weighted_by: str) -> None:
    """Tell the rate what a round of training has come to."""
    reported = [metrics(reply) for reply in replies if not reply.has_error()]
    if not rate.loss or not reported:
        return
    if not rate.informed and not any(rate.loss in found for found in reported):
        known = sorted({key for found in reported for key in found})
        raise GradwireError(
            f"the rate goes by the metric {rate.loss!r}, which no client reports: name one that they do, of "
            f"{', '.join(known) or 'none'}, as in AdaQuantFL(loss=…)"
        )
    pairs = [(found.get(rate.loss), found.get(weighted_by, 1.0)) for found in reported]
    rate.observe([(loss, w) for loss, w in pairs if isinstance(loss, (int, float)) and isinstance(w, (int, float))])


def explained(reply: Message, node: int) -> Message:
    """Where the mod is only one of the training function, evaluation gets an update that it cannot read."""
    if not all(part in str(reply.error.reason) for part in ("serialization type", f"'{STYPE}'")):  # Flower's words
        return reply
    reason = (
        f"gradwire: node {node} cannot read the compressed model in a message of type {category(reply)!r}: give "
        f"gradwire.flower.compress to the app, ClientApp(mods=[…]), not to its training function alone"
    )
    return like(reply, error=Error(reply.error.code, reason))
