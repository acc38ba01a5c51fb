"""The model of a received message: whole, whatever of it the server has sent. The client keeps a copy for the next."""

from __future__ import annotations

from typing import Any

import torch
from flwr.app import ArrayRecord, Message

from gradwire.errors import FrameError, GradwireError
from gradwire.flower.client.store import Content, Store
from gradwire.flower.shared import arrays
from gradwire.flower.shared.message import ARRAY, Note, is_bytes_record, single_arrays, with_records
from gradwire.flower.shared.model_copy import ModelCopy

COPY = "model"  # name in the store


class WholeModelNeeded(GradwireError):
    """The client cannot apply the steps that the server sent, and asks for the whole model."""


def with_whole_model(message: Message, note: Note, store: Store) -> Message:
    """Return the message with the whole model in place of the steps to it, and store the client's new copy.

    Raises `WholeModelNeeded` if the steps do not fit the copy in the store.
    """
    model_record = single_arrays(message)
    if model_record is None:
        raise GradwireError("the server's message has no model")
    key, record = model_record
    if not is_bytes_record(record):
        copy = ModelCopy.whole(note.model, arrays.tensors(record))
        store.write(COPY, _content(copy))
        return message
    before = _stored_copy(store)
    copy = _apply_steps(before, record)
    if copy.number != before.number:
        store.write(COPY, _content(copy))
    whole = arrays.record({name: arrays.array(tensor) for name, tensor in copy.model.items()})
    return with_records(message, {**message.content, key: whole})


def _stored_copy(store: Store) -> ModelCopy:
    content = store.read(COPY)
    if not isinstance(content, dict) or not _is_copy(content.get("number"), content.get("model")):
        raise WholeModelNeeded("this client has no copy of the model, and needs the whole")
    return ModelCopy(content["number"], content["model"])


def _is_copy(number: Any, model: Any) -> bool:
    """Tell whether these are a copy of a model and its number: another version may have written something else."""
    return isinstance(number, int) and isinstance(model, dict) and all(
        isinstance(name, str) and isinstance(t, torch.Tensor) and t.layout == torch.strided and not t.is_meta
        for name, t in model.items()
    )  # fmt: skip


def _content(copy: ModelCopy) -> Content:
    return {"number": copy.number, "model": copy.model}


def _apply_steps(copy: ModelCopy, record: ArrayRecord) -> ModelCopy:
    try:
        if list(record) != [ARRAY]:
            raise FrameError("other arrays beside the updates")
        return copy.apply(record[ARRAY].data)
    except FrameError as error:
        raise WholeModelNeeded(f"this client needs the whole model: {error}") from error
