"""What the two sides tell each other beside the frames: the server's note, and the head of an update.

docs/flower.md has every byte.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from gradwire import kernels
from gradwire.errors import FrameError

WIRE = 1  # the version of the note and of updates
NOTE = ARRAY = STYPE = "gradwire"
TOKEN = TRAINING = 8  # bytes
MAGIC = b"GWU"
PERSONAL = 2**31  # numbers from here on are of models that not all clients get
# Codes of error replies: Flower's "a mod failed", and one of our own.
REFUSED, NEEDS_WHOLE = 6, 1606
_HEAD = struct.Struct("<3sBI8sII")
_CHECKED_FROM = 8


@dataclass(frozen=True)
class Note:
    """The record `gradwire` in a message of the server."""

    training: bytes
    model: int  # number of the model in this message
    accepted: tuple[bytes, ...] = ()
    rate: str | None = None
    have: int | None = None  # the model that updates in this message start from, where downloads are compressed

    def record(self) -> ConfigRecord:
        record = ConfigRecord(
            {"wire": WIRE, "training": self.training, "model": self.model, "accepted": b"".join(self.accepted)}
        )
        if self.rate is not None:
            record["rate"] = self.rate
        if self.have is not None:
            record["have"] = self.have
        return record

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> Note:
        if record.get("wire") != WIRE:
            raise FrameError(
                f"the server speaks version {record.get('wire')} of gradwire's messages, this client version {WIRE}: "
                f"install the same gradwire on both"
            )
        try:
            accepted = record["accepted"]
            tokens = tuple(accepted[i : i + TOKEN] for i in range(0, len(accepted), TOKEN))
            note = cls(record["training"], record["model"], tokens, record.get("rate"), record.get("have"))
            note._check()
        except (KeyError, TypeError, ValueError) as error:
            raise FrameError(f"the server's gradwire record is damaged ({error})") from error
        return note

    def _check(self) -> None:
        """Of what a server may say, so that nothing else is met when the training is done."""
        numbers = [self.model] if self.have is None else [self.model, self.have]
        if not all(type(n) is int for n in numbers) or not 0 < self.model < 2**32 or min(numbers) < 0:
            raise ValueError("numbers out of range")
        if not all(type(token) is bytes and len(token) == TOKEN for token in (self.training, *self.accepted)):
            raise ValueError("tokens of other lengths")
        if self.rate is not None and not isinstance(self.rate, str):
            raise ValueError("a rate that is no text")


def with_records(message: Message, records: Mapping[str, Any]) -> Message:
    """The same message with other content."""
    return like(message, content=RecordDict(dict(records)))


def like(message: Message, **content_or_error: Any) -> Message:
    make: Any = Message  # Flower's own engines use `metadata`, which its type hints leave out
    return make(metadata=message.metadata, **content_or_error)


def single_arrays(message: Message) -> tuple[str, ArrayRecord] | None:
    """The one ArrayRecord of a message, and its key; None if there is not exactly one."""
    records = [(k, r) for k, r in message.content.items() if isinstance(r, ArrayRecord)]
    return records[0] if len(records) == 1 else None


def category(message: Message) -> str:
    return message.metadata.message_type.partition(".")[0]


def fingerprint(arrays: ArrayRecord) -> int:
    """Of names and shapes, in order."""
    return zlib.crc32(repr([(name, tuple(array.shape)) for name, array in arrays.items()]).encode())


# ── updates ──


def seal(token: bytes, model: int, arrays: ArrayRecord, data: bytes) -> ArrayRecord:
    """The record of an update to the model in `arrays`."""
    head = _HEAD.pack(MAGIC, WIRE, 0, token, model, fingerprint(arrays))
    checksum = kernels.crc32(memoryview(data), kernels.crc32(memoryview(head)[_CHECKED_FROM:]))
    whole = head[:4] + struct.pack("<I", checksum) + head[_CHECKED_FROM:] + data
    return as_bytes_record(whole)


def as_bytes_record(data: bytes) -> ArrayRecord:
    """Bytes that are gradwire's, in the place of a model's arrays."""
    return ArrayRecord({ARRAY: Array("uint8", (len(data),), STYPE, data)})


def is_bytes_record(arrays: ArrayRecord) -> bool:
    return any(array.stype == STYPE for array in arrays.values())


def open_update(record: ArrayRecord, model: int, arrays: ArrayRecord) -> tuple[bytes, memoryview]:
    """Token and data of an update to this model, checked as far as that goes without decoding."""
    if list(record) != [ARRAY]:
        raise FrameError("other arrays beside the update")
    data = memoryview(record[ARRAY].data)
    entries = sum(_entries(array) for array in arrays.values())
    most = 8 * entries + 1024 * (len(arrays) + 1)  # fp64 as it is, and a head for every tensor
    if len(data) > most:
        raise FrameError(f"{len(data)} bytes, but an update of this model has at most {most}")
    if len(data) < _HEAD.size:
        raise FrameError(f"an update is cut short: {len(data)} bytes")
    magic, version, checksum, token, number, names = _HEAD.unpack_from(data)
    if magic != MAGIC:
        raise FrameError("not an update (wrong magic)")
    if version != WIRE:
        raise FrameError(f"an update of version {version}; this server reads {WIRE}: install the same gradwire on both")
    if checksum != kernels.crc32(data[_CHECKED_FROM:]):
        raise FrameError("checksum mismatch: the update is damaged")
    if number != model:
        raise FrameError(f"a stale update: it is to model {number}, this client was sent model {model}")
    if names != fingerprint(arrays):
        raise FrameError("an update of other tensors or shapes than those of the model")
    return token, data[_HEAD.size :]


def _entries(array: Array) -> int:
    entries = 1
    for size in array.shape:
        entries *= size
    return entries
