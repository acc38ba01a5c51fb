"""Single replies, as a strategy gets them: the server's model plus the client's update, as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from logging import WARNING

import torch
from flwr.app import Array, ArrayRecord, Error, Message
from flwr.supercore import log

from gradwire.errors import FrameError, GradwireError
from gradwire.flower.server.download_chain import DownloadChain
from gradwire.flower.server.lazy_tensors import MakeTensor, check_size
from gradwire.flower.server.reply_checks import in_models_order, metrics
from gradwire.flower.server.sent_models import SentModel
from gradwire.flower.server.update_norm import UpdateNorm
from gradwire.flower.shared import arrays, update
from gradwire.flower.shared.adaptive_rate import Rate
from gradwire.flower.shared.message import (
    NO_SECURE_AGGREGATION,
    SECURE_AGGREGATION,
    STYPE,
    category,
    is_bytes_record,
    open_update,
    single_arrays,
    with_error,
    with_records,
)


def is_compressed(reply: Message) -> bool:
    """Whether a reply carries an update as bytes of gradwire."""
    return any(is_bytes_record(r) for r in reply.content.values() if isinstance(r, ArrayRecord))


def decoded(reply: Message, model: SentModel) -> tuple[Message, bytes, UpdateNorm]:
    """Return the reply with arrays in place of its update, the token of the update, and its norm.

    Raises a GradwireError that says what is wrong with the update. Large tensors are decoded when the strategy asks for
    them.
    """
    update_record = single_arrays(reply)
    if update_record is None:
        raise GradwireError("other arrays beside the update")
    key, record = update_record
    token, data = open_update(record, model.number, model.record)
    changed = _clamp_variances(update.decode(data, model.tensors, deferred=model.lazy_tensors), model)
    length = UpdateNorm(changed, model.counted, model.lazy_tensors.changes)
    makers = {name: _forgiving(name, make, model, reply) for name, make in model.lazy_tensors.makers.items()}
    record = arrays.record(
        {
            name: arrays.DecodedArray(tensor, makers.get(name, tensor.clone))
            for name, tensor in {**model.tensors, **changed}.items()
        }
    )
    return with_records(reply, {**reply.content, key: record}), token, length


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


def _clamp_variances(changed: dict[str, torch.Tensor], model: SentModel) -> dict[str, torch.Tensor]:
    """Set variances to zero that rounding has made negative, of which batch normalization would make NaNs."""
    for name, tensor in changed.items():
        if update.is_variance(name) and tensor.is_floating_point() and not bool((model.tensors[name] < 0).any()):
            changed[name] = tensor.clamp(min=0)
    return changed


def checked_raw(
    reply: Message, model: SentModel, chain: DownloadChain | None, same_layout: bool
) -> tuple[Message, UpdateNorm | None]:
    """Return an uncompressed reply after checking it, and its norm, None if its arrays are not the model's.

    With `same_layout` they have to be. With compressed downloads the model is rebased onto the server's. Raises a
    GradwireError if the bytes of an array are not what it states, or its values are not sound.
    """
    model_record = single_arrays(reply)
    if same_layout and model_record is not None:
        key, record = model_record
        model_record = key, in_models_order(record, model.record)
        reply = with_records(reply, {**reply.content, key: model_record[1]})
    for record in reply.content.array_records.values():
        for name, array in record.items():
            if array.stype == arrays.NUMPY:
                _check_raw(name, array, model)
    if model_record is None or not model.has_layout_of(model_record[1]):
        return reply, None
    key, record = model_record
    # The chain knows only of the present model how its copy differs; personal models went out whole and exact.
    if chain is None or model.number != chain.number:
        return reply, UpdateNorm(_reals(record, model), model.counted)
    rebased = _clamp_variances(chain.rebased(arrays.tensors(record)), model)
    record = arrays.record({name: arrays.array(tensor) for name, tensor in rebased.items()})
    return with_records(reply, {**reply.content, key: record}), UpdateNorm(rebased, model.counted)


def _reals(record: ArrayRecord, model: SentModel) -> dict[str, torch.Tensor]:
    found = {name: arrays.reals(name, array) for name, array in record.items()}
    return {n: t for n, t in found.items() if t is not None and n in model.reals and t.shape == model.reals[n].shape}


def _check_raw(name: str, array: Array, model: SentModel) -> None:
    tensor = arrays.reals(name, array)
    if tensor is None or not tensor.is_floating_point():
        return
    before = model.reals.get(name)
    if before is None:
        before = torch.empty(0, dtype=torch.float32, device="cpu")
    check_size(name, tensor, before)
    if update.is_variance(name) and bool((tensor < 0).any()) and not bool((before < 0).any()):
        raise GradwireError(f"a negative variance in {name!r}")


def observe(rate: Rate, replies: Sequence[Message], weighted_by: str) -> bool:
    """Tell an adaptive rate the losses that clients reported after a round of training.

    Returns False if the rate follows a metric that no client has ever reported.
    """
    reported = [metrics(reply) for reply in replies if not reply.has_error()]
    if not rate.loss or not reported:
        return True
    pairs = [(metric.get(rate.loss), metric.get(weighted_by, 1.0)) for metric in reported]
    rate.observe([(loss, w) for loss, w in pairs if isinstance(loss, (int, float)) and isinstance(w, (int, float))])
    return rate.informed


def explained(reply: Message, node: int) -> Message:
    """Return an error reply with a better reason if it is Flower's error for something that does not go with gradwire.

    That is a mod of secure aggregation, or an evaluation whose compressed model Flower cannot read, since the mod was
    given to the training function only.
    """
    if all(part in str(reply.error.reason) for part in ("KeyError", SECURE_AGGREGATION)):
        return with_error(reply, Error(reply.error.code, f"gradwire: node {node}: {NO_SECURE_AGGREGATION}"))
    if not all(part in str(reply.error.reason) for part in ("serialization type", f"'{STYPE}'")):  # Flower's words
        return reply
    reason = (
        f"gradwire: node {node} cannot read the compressed model in a message of type {category(reply)!r}: give "
        f"gradwire.flower.compress to the app, ClientApp(mods=[…]), not to its training function alone"
    )
    return with_error(reply, Error(reply.error.code, reason))
