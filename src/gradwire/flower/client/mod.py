"""`compress`: the mod that makes a Flower client send its update as frames."""

from __future__ import annotations

import math
import secrets
import zlib
from collections.abc import Callable
from logging import WARNING
from pathlib import Path

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message
from flwr.supercore import log

from gradwire.catalogue.spec_by_name import Spec, parse_spec
from gradwire.errors import FrameError, GradwireError
from gradwire.flower.client import byte_budget
from gradwire.flower.client.error_memory import ErrorMemory, fitting
from gradwire.flower.client.state_store import Store, client_name, store_of
from gradwire.flower.shared import arrays, update
from gradwire.flower.shared.adaptive_rate import spec_for
from gradwire.flower.shared.message import (
    ARRAY,
    NEEDS_WHOLE,
    NOTE,
    PERSONAL,
    REFUSED,
    TOKEN,
    Note,
    category,
    is_bytes_record,
    seal,
    single_arrays,
    with_records,
)
from gradwire.flower.shared.message_lengths import message_bytes
from gradwire.flower.shared.model_copy import Copy

ClientAppCallable = Callable[[Message, Context], Message]
BUDGET = "upload-budget"  # in the node config
COPY = "model"  # in the store
LENGTHS = 64  # bytes by which a message may grow beside its data: digits of lengths, a chunk of 5 MB more


def compress(recipe: Spec = "co3", *, folder: str | Path | None = None, budget: int | str | None = None) -> Compress:
    """A Flower mod: the client sends the difference to the model it received, compressed by this recipe.

        app = ClientApp(mods=[gradwire.flower.compress("co3")])

    The server's strategy has to be a `gradwire.flower.Compressed`. Put it first among several mods, so that it is
    the last to see the reply. `folder` is where the error memory is kept, and `budget` ("200kB") the most bytes that
    a reply may take; `upload-budget` in a node's config is one for this node. See docs/flower.md.
    """
    parse_spec(update.full_spec(recipe))  # a SpecError now rather than in the first round
    return Compress(recipe, folder, None if budget is None else byte_budget.parse_bytes(budget))


class WholeNeeded(GradwireError):
    """The client cannot use the updates of the model that the server sent."""


class Compress:
    def __init__(self, recipe: Spec, folder: str | Path | None, budget: int | None):
        self.recipe, self.folder, self.budget = recipe, folder, budget

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        record = message.content.get(NOTE)
        if not isinstance(record, ConfigRecord):
            return self._as_it_is(message, context, call_next)
        try:
            budget = self._budget(context)
            note = Note.read(record)
            asked = with_records(message, {key: r for key, r in message.content.items() if key != NOTE})
            store = store_of(context, note.training, self.folder)
            if note.have is not None:
                asked = _with_model(asked, note, store)
            memory = ErrorMemory(store)
            left = memory.settle(note.accepted) if category(asked) == "train" else {}
        except GradwireError as error:
            return _refusal(error, message)
        reply = call_next(asked, context)
        if category(asked) != "train" or reply.has_error():
            return reply
        try:
            return self._compressed(asked, reply, note, client_name(context), memory, left, budget)
        except GradwireError as error:
            return _refusal(error, message)

    def _as_it_is(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        reply = call_next(message, context)
        if category(message) != "train":
            return reply
        _say("the server does not use gradwire.flower.Compressed: updates are sent as they are")
        try:
            return _affordable(reply, self._budget(context))
        except GradwireError as error:
            return _refusal(error, message)

    def _budget(self, context: Context) -> int | None:
        own = context.node_config.get(BUDGET)
        return self.budget if own is None else byte_budget.parse_bytes(own)

    def _compressed(
        self, message: Message, reply: Message, note: Note, client: str, memory: ErrorMemory,
        left: dict[str, torch.Tensor], budget: int | None,
    ) -> Message:  # fmt: skip
        received, sent = single_arrays(message), single_arrays(reply)
        if received is None or sent is None:
            _say("the message or the reply does not have exactly one ArrayRecord: the reply is sent as it is")
            return _affordable(reply, budget)
        if difference := _difference(received[1], sent[1]):
            _say(f"the reply does not hold the model that was received ({difference}): it is sent as it is")
            return _affordable(reply, budget)
        key, model = sent[0], received[1]
        differences, values = _changes(model, sent[1])
        left = fitting(left, differences)
        spec = spec_for(note.rate, differences) if note.rate else self.recipe
        if note.rate or isinstance(spec, str):  # else variances have the recipe that was asked for
            values |= _collapsed(model, differences)
            differences = {name: t for name, t in differences.items() if name not in values}
        token = secrets.token_bytes(TOKEN)

        def sealed(data: bytes) -> Message:
            return with_records(reply, {**reply.content, key: seal(token, note.model, model, data)})

        options = {"steps": note.model % PERSONAL - 1, "seed": zlib.crc32(client.encode())}
        if budget is None:
            encoded = update.encode(differences, values, list(model), spec, left, **options)
        else:
            beside = message_bytes(sealed(b"")) + LENGTHS * (2 + budget // 5_000_000)
            encoded = byte_budget.within(budget, differences, values, list(model), spec, left, **options, beside=beside)
        result = _affordable(sealed(encoded.data), budget)
        memory.propose(token, encoded.memory)
        return result


def _refusal(error: GradwireError, message: Message) -> Message:
    code = NEEDS_WHOLE if isinstance(error, WholeNeeded) else REFUSED
    return Message(Error(code, f"gradwire: {error}"), reply_to=message)


def _affordable(reply: Message, budget: int | None) -> Message:
    if budget is not None and not reply.has_error() and (length := message_bytes(reply)) > budget:
        raise GradwireError(
            f"the reply has {length} bytes, which its budget of {budget} does not allow: it is not sent"
        )
    return reply


def _with_model(message: Message, note: Note, store: Store) -> Message:
    """The message with the whole model in place of what this client missed of it; the copy is kept for the next."""
    found = single_arrays(message)
    if found is None:
        raise GradwireError("the server's message has no model")
    key, record = found
    if not is_bytes_record(record):
        copy = Copy.whole(note.model, arrays.tensors(record))
    else:
        kept = store.read(COPY)
        if not isinstance(kept, dict) or kept.keys() != {"number", "model"}:  # of another version
            raise WholeNeeded("this client has no copy of the model, and needs the whole")
        try:
            if list(record) != [ARRAY]:
                raise FrameError("other arrays beside the updates")
            copy = Copy(kept["number"], kept["model"]).apply(record[ARRAY].data)
        except FrameError as error:
            raise WholeNeeded(f"this client needs the whole model: {error}") from error
        record = arrays.record({name: arrays.array(tensor) for name, tensor in copy.model.items()})
        if copy.number == kept["number"]:  # it is stored already
            return with_records(message, {**message.content, key: record})
    store.write(COPY, {"number": copy.number, "model": copy.model})
    return with_records(message, {**message.content, key: record})


def _difference(received: ArrayRecord, sent: ArrayRecord) -> str | None:
    """What differs beside the values, where integers may have become floats on the server; None for nothing."""
    if names := received.keys() ^ sent.keys():
        name = min(names)
        return f"{name!r} is only in the {'reply' if name in sent else 'model'}"
    for name, old in received.items():
        new = sent[name]
        if not arrays.supported((old, new)):
            return f"{name!r} has a type that cannot be compressed"
        if tuple(old.shape) != tuple(new.shape):
            return f"{name!r} has the shape {tuple(new.shape)}, not {tuple(old.shape)}"
        if _is_float(new) and not _is_float(old):
            return f"{name!r} is {new.dtype}, not {old.dtype}"
    return None


def _is_float(array: arrays.Array) -> bool:
    return "float" in array.dtype


def _changes(model: ArrayRecord, sent: ArrayRecord) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Differences of floats, and values of what else has changed."""
    differences, values = {}, {}
    for name, array in model.items():
        old, new = arrays.tensor(name, array), arrays.tensor(name, sent[name])
        if new.is_floating_point():
            difference = new.to(torch.promote_types(new.dtype, torch.float32)) - old
            if not math.isfinite(difference.sum()):  # as that of two infinities, in a mask that nobody changed
                difference[(new == old) | (new.isnan() & old.isnan())] = 0
            differences[name] = difference
        elif old.dtype != new.dtype or not torch.equal(old, new):
            values[name] = new
    return differences, values


def _collapsed(model: ArrayRecord, differences: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Variances that fell so far that the difference in bf16 says little of what is left, or takes them below zero:
    they travel as values."""
    result = {}
    for name, difference in differences.items():
        if update.is_variance(name) and difference.numel():
            old = arrays.tensor(name, model[name])
            new, reached = old + difference, old + difference.bfloat16()
            if bool(((reached - new).abs() > new.abs() / 2).any()):
                result[name] = new.to(old.dtype)
    return result


_said: set[str] = set()


def _say(text: str) -> None:
    """Once in a process."""
    if text not in _said:
        _said.add(text)
        log(WARNING, "gradwire: %s", text)
