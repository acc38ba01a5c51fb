"""Single replies, as a strategy gets them: the server's model plus the client's update, as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from logging import WARNING
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, Error, Message, MetricRecord
from flwr.supercore import log

from gradwire.errors import FrameError, GradwireError
from gradwire.flower.server.download_chain import DownloadChain
from gradwire.flower.server.lazy_tensors import MakeTensor, check_size
from gradwire.flower.server.sent_models import SentModel
from gradwire.flower.shared import arrays, update
from gradwire.flower.shared.adaptive_rate import Rate
from gradwire.flower.shared.message import (
    STYPE,
    category,
    is_bytes_record,
    open_update,
    single_arrays,
    with_error,
    with_records,
)

LARGEST_WEIGHT = 2.0**63  # so that the sum over all clients is finite


def is_compressed(reply: Message) -> bool:
    """Whether a reply carries an update as bytes of gradwire."""
    return any(is_bytes_record(r) for r in reply.content.values() if isinstance(r, ArrayRecord))


def decoded(reply: Message, model: SentModel, weighted_by: str) -> tuple[Message, bytes]:
    """Return the reply with arrays in place of its update, and the token of the update.

    Raises a GradwireError that says what is wrong with the update. Large tensors are decoded when the strategy asks for
    them.
    """
    update_record = single_arrays(reply)
    if update_record is None:
        raise GradwireError("other arrays beside the update")
    check_weight(reply, weighted_by)
    key, record = update_record
    token, data = open_update(record, model.number, model.record)
    changed = _clamp_variances(update.decode(data, model.tensors, deferred=model.lazy_tensors), model)
    makers = {name: _forgiving(name, make, model, reply) for name, make in model.lazy_tensors.makers.items()}
    record = arrays.record(
        {
            name: arrays.DecodedArray(tensor, makers.get(name, tensor.clone))
            for name, tensor in {**model.tensors, **changed}.items()
        }
    )
    return with_records(reply, {**reply.content, key: record}), token


def _forgiving(name: str, make: MakeTensor, model: SentModel, reply: Message) -> MakeTensor:
    """Return a function that makes the tensor, or returns the server's own if the frame turns out to be forged."""

    def make_or_keep() -> torch.Tensor:
        try:
            return make()
        except FrameError as error:
            node = reply.metadata.src_node_id
            log(WARNING, "gradwire: %s in the update of node %s is left out: %s", name, node, error)
            return model.tensors[name].clone()

    return make_or_keep


def check_weight(reply: Message, weighted_by: str) -> None:
    """Raise a GradwireError if the weight of a reply cannot be a number of examples: it would spoil the mean of all."""
    weight = metrics(reply).get(weighted_by)
    if weight is not None and (isinstance(weight, list) or not 0 <= weight <= LARGEST_WEIGHT):
        raise GradwireError(f"a weight ({weighted_by}) of {weight}")


def _clamp_variances(changed: dict[str, torch.Tensor], model: SentModel) -> dict[str, torch.Tensor]:
    """Set variances to zero that rounding has made negative, of which batch normalization would make NaNs."""
    for name, tensor in changed.items():
        if update.is_variance(name) and tensor.is_floating_point() and not bool((model.tensors[name] < 0).any()):
            changed[name] = tensor.clamp(min=0)
    return changed


def checked_raw(reply: Message, model: SentModel, chain: DownloadChain | None, weighted_by: str) -> Message:
    """Return an uncompressed reply after checking it; with compressed downloads, rebase its model onto the server's.

    Raises a GradwireError if the bytes of an array are not what it states, or its values are not sound.
    """
    check_weight(reply, weighted_by)
    for record in reply.content.array_records.values():
        for name, array in record.items():
            if array.stype == arrays.NUMPY:
                _check_raw(name, array, model)
    model_record = single_arrays(reply)
    # The chain knows only of the present model how its copy differs; personal models went out whole and exact.
    if chain is None or model.number != chain.number or model_record is None:
        return reply
    key, record = model_record
    if record.keys() != model.record.keys() or not arrays.supported(record.values()):
        return reply
    rebased = _clamp_variances(chain.rebased(arrays.tensors(record)), model)
    record = arrays.record({name: arrays.array(tensor) for name, tensor in rebased.items()})
    return with_records(reply, {**reply.content, key: record})


def _check_raw(name: str, array: Array, model: SentModel) -> None:
    values = arrays.values(name, array)
    if array.dtype not in ("float16", "float32", "float64"):
        return
    known = name in model.record and arrays.supported(model.record.values())
    before = model.tensors[name] if known else torch.empty(0, dtype=torch.float32, device="cpu")
    tensor = torch.from_numpy(values.copy())
    check_size(name, tensor, before)
    if update.is_variance(name) and bool((tensor < 0).any()) and not bool((before < 0).any()):
        raise GradwireError(f"a negative variance in {name!r}")


def metrics(reply: Message) -> dict[str, Any]:
    """Return the metrics of all records of a reply, by name."""
    records = [record for record in reply.content.values() if isinstance(record, MetricRecord)]
    return {key: value for record in records for key, value in record.items()}


def observe(rate: Rate, replies: Sequence[Message], weighted_by: str) -> None:
    """Tell an adaptive rate the losses that clients reported after a round of training.

    Raises a GradwireError if no client has ever reported the metric that it follows.
    """
    reported = [metrics(reply) for reply in replies if not reply.has_error()]
    if not rate.loss or not reported:
        return
    if not rate.informed and not any(rate.loss in metric for metric in reported):
        names = sorted({name for metric in reported for name in metric})
        raise GradwireError(
            f"the rate goes by the metric {rate.loss!r}, which no client reports: name one that they do, of "
            f"{', '.join(names) or 'none'}, as in AdaQuantFL(loss=…)"
        )
    pairs = [(metric.get(rate.loss), metric.get(weighted_by, 1.0)) for metric in reported]
    rate.observe([(loss, w) for loss, w in pairs if isinstance(loss, (int, float)) and isinstance(w, (int, float))])


def explained(reply: Message, node: int) -> Message:
    """Return an error reply with a better reason if it is Flower's error for a compressed model that it cannot read.

    That happens in evaluation if the mod was given to the training function only.
    """
    if not all(part in str(reply.error.reason) for part in ("serialization type", f"'{STYPE}'")):  # Flower's words
        return reply
    reason = (
        f"gradwire: node {node} cannot read the compressed model in a message of type {category(reply)!r}: give "
        f"gradwire.flower.compress to the app, ClientApp(mods=[…]), not to its training function alone"
    )
    return with_error(reply, Error(reply.error.code, reason))
