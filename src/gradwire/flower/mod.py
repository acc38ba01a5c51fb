"""`compress`: the mod that makes a Flower client send its update as frames."""

from __future__ import annotations

import secrets
import zlib
from collections.abc import Callable
from pathlib import Path

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message
from flwr.common.constant import ErrorCode
from flwr.supercore import log

from ..aggregate.pieces import Spec, parse_spec
from ..errors import GradwireError
from . import arrays, update
from .memory import ErrorMemory
from .message import NOTE, TOKEN, Note, category, seal, single_arrays, with_records
from .store import client_name, store_of

ClientAppCallable = Callable[[Message, Context], Message]
WARNING = 30


def compress(recipe: Spec = "co3", *, folder: str | Path | None = None) -> Compress:
    """A Flower mod: the client sends the difference to the model it received, compressed by this recipe.

        app = ClientApp(mods=[gradwire.flower.compress("co3")])

    The server's strategy has to be a `gradwire.flower.Compressed`. Put it first among several mods, so that it is
    the last to see the reply. `folder` is where the error memory is kept; see docs/flower.md.
    """
    parse_spec(update.full_spec(recipe))  # a SpecError now rather than in the first round
    return Compress(recipe, folder)


class Compress:
    def __init__(self, recipe: Spec, folder: str | Path | None):
        self.recipe, self.folder = recipe, folder

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        record = message.content.get(NOTE)
        if not isinstance(record, ConfigRecord):
            if category(message) == "train":
                _say("the server does not use gradwire.flower.Compressed: updates are sent as they are")
            return call_next(message, context)
        try:
            note = Note.read(record)
            rest = {key: value for key, value in message.content.items() if key != NOTE}
            store = store_of(context, note.training, self.folder)
            memory = ErrorMemory(store)
            left = memory.settle(note.accepted) if category(message) == "train" else {}
            message = with_records(message, rest)
            reply = call_next(message, context)
            if category(message) != "train" or reply.has_error():
                return reply
            return self._compressed(message, reply, note, client_name(context), memory, left)
        except GradwireError as error:
            return Message(Error(ErrorCode.MOD_FAILED_PRECONDITION, f"gradwire: {error}"), reply_to=message)

    def _compressed(
        self, message: Message, reply: Message, note: Note, client: str, memory: ErrorMemory,
        left: dict[str, torch.Tensor],
    ) -> Message:  # fmt: skip
        received, sent = single_arrays(message), single_arrays(reply)
        if received is None or sent is None or not _same_model(received[1], sent[1]):
            _say("the reply does not hold the model that was received, or of other types: it is sent as it is")
            return reply
        key, model = sent[0], received[1]
        differences, values = _changes(model, sent[1])
        encoded = update.encode(
            differences, values, list(model), self.recipe, left, steps=note.model - 1, seed=zlib.crc32(client.encode())
        )
        token = secrets.token_bytes(TOKEN)
        memory.propose(token, encoded.memory)
        return with_records(reply, {**reply.content, key: seal(token, note.model, model, encoded.data)})


def _same_model(received: ArrayRecord, sent: ArrayRecord) -> bool:
    """Whether the two differ by nothing but their values, and integers have at most become floats on the server."""
    if received.keys() != sent.keys() or not arrays.supported(received) or not arrays.supported(sent):
        return False
    pairs = [(received[name], sent[name]) for name in received]
    same_shapes = all(tuple(old.shape) == tuple(new.shape) for old, new in pairs)
    return same_shapes and all(_is_float(old) or not _is_float(new) for old, new in pairs)


def _is_float(array: arrays.Array) -> bool:
    return "float" in array.dtype


def _changes(model: ArrayRecord, sent: ArrayRecord) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Differences of floats, and values of what else has changed."""
    differences, values = {}, {}
    for name, array in model.items():
        old, new = arrays.tensor(name, array), arrays.tensor(name, sent[name])
        if new.is_floating_point():
            differences[name] = new.to(torch.promote_types(new.dtype, torch.float32)) - old
        elif old.dtype != new.dtype or not torch.equal(old, new):
            values[name] = new
    return differences, values


_said: set[str] = set()


def _say(text: str) -> None:
    """Once in a process."""
    if text not in _said:
        _said.add(text)
        log(WARNING, "gradwire: %s", text)
