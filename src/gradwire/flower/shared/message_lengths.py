"""How many bytes a Flower message takes: the sum of the lengths of the objects that Flower pushes for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flwr.app import Array, ArrayRecord, Message
from flwr.app.message.arraychunk import ArrayChunk
from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE as CHUNK
from flwr.supercore.inflatable.inflatable_object import InflatableObject, no_object_id_recompute

from gradwire.flower.shared.message import is_bytes_record, with_records


class _UnhashedArray(Array):
    """Stands for an array of gradwire's bytes while lengths are measured.

    Flower would hash the megabytes of each chunk to find its name; here chunks are named by their position.
    """

    def __init__(self, array: Array):
        self.__dict__.update(array.__dict__)
        chunks = [memoryview(array.data)[i : i + CHUNK] for i in range(0, len(array.data), CHUNK)]
        self.__dict__["_chunks"] = [(f"{id(array):032x}{i:032x}", ArrayChunk(chunk)) for i, chunk in enumerate(chunks)]


_UnhashedArray.__qualname__ = Array.__qualname__


def message_bytes(message: InflatableObject) -> int:
    """Return the bytes that a message or a record takes on the wire: those of all objects that Flower pushes for it."""
    if isinstance(message, Message) and message.has_content():
        records = {key: _unhashed(record) for key, record in message.content.items()}
        message = with_records(message, records)
    with no_object_id_recompute():  # otherwise every object would be hashed again for each that refers to it
        return sum(map(_length, _all_objects(message)))


def _unhashed(record: Any) -> Any:
    if not isinstance(record, ArrayRecord) or not is_bytes_record(record):
        return record
    result = ArrayRecord()
    for name, array in record.items():
        result[name] = _UnhashedArray(array)
    return result


def _all_objects(root: InflatableObject) -> Iterable[InflatableObject]:
    """Return the objects of a message, each of them once."""
    objects: dict[str, InflatableObject] = {}

    def visit(name: str, part: InflatableObject) -> None:
        for child, inner in (part.children or {}).items():
            visit(child, inner)
        objects[name] = part

    visit("", root)
    return objects.values()


def _length(part: InflatableObject) -> int:
    if not isinstance(part, ArrayChunk):
        return len(part.deflate())
    # A deflated chunk begins with its length in decimal digits.
    return _EMPTY_CHUNK + len(str(len(part.data))) - 1 + len(part.data)


_EMPTY_CHUNK = len(ArrayChunk(memoryview(b"")).deflate())
