"""`compress`: the mod that makes a Flower client send its update as frames."""

from __future__ import annotations

import os
import secrets
import zlib
from collections.abc import Callable
from logging import WARNING
from pathlib import Path

import torch
from flwr.app import ConfigRecord, Context, Error, Message
from flwr.supercore import log

from gradwire.catalogue.spec_by_name import Recipes, Spec, idle_patterns, parse_spec
from gradwire.errors import GradwireError, SpecError
from gradwire.flower.client import byte_budget, model_changes
from gradwire.flower.client.client_memory import ClientMemory, usable
from gradwire.flower.client.instructed_spec import spec_for
from gradwire.flower.client.received_model import WholeModelNeeded, with_whole_model
from gradwire.flower.client.state_store import client_name, store_of
from gradwire.flower.shared import update
from gradwire.flower.shared.message import (
    NEEDS_WHOLE,
    NO_MEMORY,
    NO_SECURE_AGGREGATION,
    NOTE,
    PERSONAL,
    REFUSED,
    SECURE_AGGREGATION,
    TOKEN,
    Note,
    category,
    seal,
    single_arrays,
    with_records,
)
from gradwire.flower.shared.message_lengths import message_bytes

ClientAppCallable = Callable[[Message, Context], Message]
BUDGET = "upload-budget"  # key in the node config
# By so many bytes a message may grow beside its data: by digits of lengths, and once more for every chunk of 5 MB.
LENGTHS = 64


def compress(recipe: Spec = "co3", *, folder: str | Path | None = None, budget: int | str | None = None) -> CompressMod:
    """Return a Flower mod: the client sends the difference to the model it received, compressed by this recipe.

        app = ClientApp(mods=[gradwire.flower.compress("co3")])

    The server's strategy has to be a `gradwire.flower.Compressed`. Put this mod first among several, so that it is
    the last to see the reply. `folder` is where the error memory is kept, and `budget` ("200kB") is the largest number
    of bytes that a reply may take; `upload-budget` in a node's config sets the budget of this node. See docs/flower.md.
    """
    parse_spec(recipe)  # a SpecError now rather than in the first round
    if folder is not None and not isinstance(folder, str | os.PathLike):
        raise SpecError(f"folder is the path of a folder for the error memory, not {folder!r}")
    return CompressMod(recipe, folder, None if budget is None else byte_budget.parse_bytes(budget))


class CompressMod:
    """The mod that `compress` returns: it stands between Flower and the client's functions.

    It promises that the training function gets the model as it would without gradwire, that the reply carries every
    difference that the recipe sends, and that what the recipe leaves out is in the error memory before the reply
    leaves. A reply is never longer than the budget, and what the mod cannot compress it sends unchanged. It never
    changes metrics or other records, and never raises a GradwireError, except under secure aggregation, which cannot go
    with it: the server gets it as an error reply.

    Flower calls it once for each message, in the thread and process of the client app. The object itself holds
    settings only, so that engines may copy it and threads may share it; the state of a client is in its `Store`. Of
    several messages to one client at the same time, the server lets only the first use the error memory.
    """

    def __init__(self, recipe: Spec, folder: str | Path | None, budget: int | None):
        self.recipe, self.folder, self.budget = recipe, folder, budget

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Handle one message: prepare the model, let the app train or evaluate, and compress its update."""
        if SECURE_AGGREGATION in message.content:
            raise GradwireError(NO_SECURE_AGGREGATION)  # a reply with an error would end in another one in its mod
        record = message.content.get(NOTE)
        if not isinstance(record, ConfigRecord):
            return self._without_note(message, context, call_next)
        try:
            budget = self._budget(context)
            note = Note.read(record)
            request = with_records(message, {key: r for key, r in message.content.items() if key != NOTE})
            store = store_of(context, note.training, self.folder)
            if note.have is not None:
                request = with_whole_model(request, note, store)
            memory = ClientMemory(store)
            settles = category(request) == "train" and note.uses_memory
            left_out = memory.settle(note.accepted, self._recipes(note)) if settles else {}
        except GradwireError as error:
            return _error_reply(error, message)
        try:
            reply = call_next(request, context)
        except KeyError as error:
            if error.args != (SECURE_AGGREGATION,):
                raise
            return _error_reply(GradwireError(NO_SECURE_AGGREGATION), message)
        if category(request) != "train" or reply.has_error():
            return reply
        try:
            return self._compressed(request, reply, note, client_name(context), memory, left_out, budget)
        except GradwireError as error:
            return _error_reply(error, message)

    def _without_note(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Handle a message of a server that does not use gradwire: the reply stays as it is."""
        reply = call_next(message, context)
        if category(message) != "train":
            return reply
        _warn_once("the server does not use gradwire.flower.Compressed: updates are sent as they are")
        try:
            return _within_budget(reply, self._budget(context))
        except GradwireError as error:
            return _error_reply(error, message)

    def _budget(self, context: Context) -> int | None:
        node_budget = context.node_config.get(BUDGET)
        return self.budget if node_budget is None else byte_budget.parse_bytes(node_budget)

    def _compressed(
        self, message: Message, reply: Message, note: Note, client: str, memory: ClientMemory,
        left_out: dict[str, torch.Tensor], budget: int | None,
    ) -> Message:  # fmt: skip
        """Return the reply with an update in place of its model, after the memory of this update is stored."""
        received, trained = single_arrays(message), single_arrays(reply)
        if received is None or trained is None:
            _warn_once("the message or the reply does not have exactly one ArrayRecord: the reply is sent as it is")
            return _within_budget(reply, budget)
        if mismatch := model_changes.mismatch(received[1], trained[1]):
            _warn_once(f"the reply does not hold the model that was received ({mismatch}): it is sent as it is")
            return _within_budget(reply, budget)
        key, model = trained[0], received[1]
        differences, values = model_changes.changes(model, trained[1])
        left_out = usable(left_out, differences)
        for sentence in idle_patterns(self._recipes(note) or {}, model):
            _warn_once(sentence)
        spec = spec_for(note.rate, differences) if note.rate else self.recipe
        if note.rate or isinstance(spec, str):  # a dict may name a recipe for variances
            values |= model_changes.collapsed_variances(model, differences)
            differences = {name: t for name, t in differences.items() if name not in values}
        token = secrets.token_bytes(TOKEN) if note.uses_memory else NO_MEMORY

        def sealed(data: bytes) -> Message:
            return with_records(reply, {**reply.content, key: seal(token, note.model, model, data)})

        options = {"steps": note.model % PERSONAL - 1, "seed": zlib.crc32(client.encode())}
        if budget is None:
            encoded = update.encode(differences, values, list(model), spec, left_out, **options)
        else:
            overhead = message_bytes(sealed(b"")) + LENGTHS * (2 + budget // 5_000_000)
            encoded = byte_budget.within(
                budget, differences, values, list(model), spec, left_out, **options, overhead=overhead
            )
        result = _within_budget(sealed(encoded.data), budget)
        if note.uses_memory:
            memory.propose(token, encoded.memory, self._recipes(note))
        return result

    def _recipes(self, note: Note) -> Recipes | None:
        """Return the recipes that memories are kept under; None where the server chooses others in every round."""
        return None if note.rate else parse_spec(self.recipe)


def _error_reply(error: GradwireError, message: Message) -> Message:
    code = NEEDS_WHOLE if isinstance(error, WholeModelNeeded) else REFUSED
    return Message(Error(code, f"gradwire: {error}"), reply_to=message)


def _within_budget(reply: Message, budget: int | None) -> Message:
    """Return the reply, or raise a GradwireError if it is longer than the budget."""
    if budget is not None and not reply.has_error() and (length := message_bytes(reply)) > budget:
        raise GradwireError(
            f"the reply has {length} bytes, which its budget of {budget} does not allow: it is not sent"
        )
    return reply


_warnings_given: set[str] = set()


def _warn_once(text: str) -> None:
    """Log a warning that this process has not logged before."""
    if text not in _warnings_given:
        _warnings_given.add(text)
        log(WARNING, "gradwire: %s", text)
