"""How many bytes Flower's messages take: the lengths of the objects that it pushes for them, one by one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flwr.app import Array, ArrayRecord, Message
from flwr.app.message.arraychunk import ArrayChunk
from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE as CHUNK
from flwr.supercore.inflatable.inflatable_object import InflatableObject, no_object_id_recompute

from gradwire.flower.shared.message import is_bytes_record, with_records


class _AsLong(Array):
    """Stands for an array of ours when lengths are measured: Flower would hash its megabytes to name them."""

    def __init__(self, array: Array):
        self.__dict__.update(array.__dict__)
        chunks = [memoryview(array.data)[i : i + CHUNK] for i in range(0, len(array.data), CHUNK)]
        self.__dict__["_chunks"] = [(f"{id(array):032x}{i:032x}", ArrayChunk(chunk)) for i, chunk in enumerate(chunks)]


_AsLong.__qualname__ = Array.__qualname__


def message_bytes(message: InflatableObject) -> int:
    """What a message or a record takes on the wire: the lengths of all objects that Flower would push for it."""
    if isinstance(message, Message) and message.has_content():
        records = {key: _as_long(record) for key, record in message.content.items()}
        message = with_records(message, records)
    with no_object_id_recompute():  # else every object is hashed again for each that refers to it
        return sum(map(_length, _nested(message)))


def _as_long(record: Any) -> Any:
    if not isinstance(record, ArrayRecord) or not is_bytes_record(record):
        return record
    result = ArrayRecord()
    for name, array in record.items():
        result[name] = _AsLong(array)
    return result


def _nested(root: InflatableObject) -> Iterable[InflatableObject]:
    """The objects of a message, each once."""
    found: dict[str, InflatableObject] = {}

    def visit(name: str, part: InflatableObject) -> None:
        for child, inner in (part.children or {}).items():
            visit(child, inner)
        found[name] = part

    visit("", root)
    return found.values()


def _length(part: InflatableObject) -> int:
    if not isinstance(part, ArrayChunk):
        return len(part.deflate())
    # As it is deflated, a chunk has its length in digits before it.
    return _EMPTY_CHUNK + len(str(len(part.data))) - 1 + len(part.data)


_EMPTY_CHUNK = len(ArrayChunk(memoryview(b"")).deflate())
