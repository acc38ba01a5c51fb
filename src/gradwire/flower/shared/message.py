"""What server and clients tell each other beside the frames: the server's note, and the header of an update.

docs/flower.md specifies every byte.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict

from gradwire import kernels
from gradwire.errors import FrameError

WIRE = 1  # the version of the note and of updates
NOTE = ARRAY = STYPE = "gradwire"
TOKEN = TRAINING = 8  # bytes
NO_MEMORY = bytes(TOKEN)  # the token of an update that has left the error memory alone
MAGIC = b"GWU"
PERSONAL = 2**31  # models with this number or a higher one are not the same for all clients
SECURE_AGGREGATION = "secaggplus_configs"  # the record of Flower's SecAgg+ in messages
NO_SECURE_AGGREGATION = (
    "secure aggregation (SecAgg+) and gradwire exclude each other: it adds up masked integers, which cannot be "
    "compressed. Leave out gradwire.flower.compress and Compressed, or secaggplus_mod and SecAggPlusWorkflow"
)
# Codes of error replies: REFUSED is Flower's own for a mod that failed; NEEDS_WHOLE asks for the whole model.
REFUSED, NEEDS_WHOLE = 6, 1606
_HEAD = struct.Struct("<3sBI8sII")
_CHECKED_FROM = 8


@dataclass(frozen=True)
class Note:
    """What the server tells a client beside the model: the record `gradwire` in its message."""

    training: bytes  # identifies the training
    model: int  # number of the model in this message
    accepted: tuple[bytes, ...] = ()  # tokens of the updates of this client that the server accepted last
    rate: str | None = None  # instruction of an adaptive rate
    have: int | None = None  # with compressed downloads: the model that the steps start from, 0 if the model is whole
    uses_memory: bool = True  # False while another update of this client may be under way, with the same memory

    def record(self) -> ConfigRecord:
        """Return the note as a record for Flower's message."""
        record = ConfigRecord(
            {"wire": WIRE, "training": self.training, "model": self.model, "accepted": b"".join(self.accepted)}
        )
        if self.rate is not None:
            record["rate"] = self.rate
        if self.have is not None:
            record["have"] = self.have
        if not self.uses_memory:
            record["memory"] = False
        return record

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> Note:
        """Read the record of a received message. Raises a FrameError if it is damaged or of another version."""
        if record.get("wire") != WIRE:
            raise FrameError(
                f"the server speaks version {record.get('wire')} of gradwire's messages, this client version {WIRE}: "
                f"install the same gradwire on both"
            )
        try:
            accepted = record["accepted"]
            tokens = tuple(accepted[i : i + TOKEN] for i in range(0, len(accepted), TOKEN))
            note = cls(
                record["training"],
                record["model"],
                tokens,
                record.get("rate"),
                record.get("have"),
                record.get("memory", True),
            )
            note._check()
        except (KeyError, TypeError, ValueError) as error:
            raise FrameError(f"the server's gradwire record is damaged ({error})") from error
        return note

    def _check(self) -> None:
        """Raise a ValueError for anything that no server sends, before a training is spent on it."""
        numbers = [self.model] if self.have is None else [self.model, self.have]
        if not all(type(n) is int for n in numbers) or not 0 < self.model < 2**32 or min(numbers) < 0:
            raise ValueError("numbers out of range")
        if not all(type(token) is bytes and len(token) == TOKEN for token in (self.training, *self.accepted)):
            raise ValueError("tokens of other lengths")
        if self.rate is not None and not isinstance(self.rate, str):
            raise ValueError("a rate that is no text")
        if not isinstance(self.uses_memory, bool):
            raise ValueError("neither with the memory nor without")


def with_records(message: Message, records: Mapping[str, Any]) -> Message:
    """Return a message with the same metadata and other records."""
    return _with_metadata_of(message, content=RecordDict(dict(records)))


def with_error(message: Message, error: Error) -> Message:
    """Return a message with the same metadata that carries an error in place of its content."""
    return _with_metadata_of(message, error=error)


def _with_metadata_of(message: Message, **content_or_error: Any) -> Message:
    construct: Any = Message  # Flower's own engines pass `metadata`, which its type hints leave out
    result: Message = construct(metadata=message.metadata, **content_or_error)
    return result


def single_arrays(message: Message) -> tuple[str, ArrayRecord] | None:
    """Return the key and the value of the only ArrayRecord of a message, or None if there is not exactly one."""
    records = [(k, r) for k, r in message.content.items() if isinstance(r, ArrayRecord)]
    return records[0] if len(records) == 1 else None


def category(message: Message) -> str:
    """Return what a message is for: `train`, `evaluate` or `query`, without the name of an action behind it."""
    return message.metadata.message_type.partition(".")[0]


def fingerprint(arrays: ArrayRecord) -> int:
    """Return a CRC-32 of the names and shapes of the arrays, in their order."""
    return zlib.crc32(repr([(name, tuple(array.shape)) for name, array in arrays.items()]).encode())


# ── updates ──


def seal(token: bytes, model: int, arrays: ArrayRecord, data: bytes) -> ArrayRecord:
    """Return the record of an update: a header with its token, the number and fingerprint of the model in `arrays`
    and a checksum, then `data`, the bytes of `update.encode`."""
    head = _HEAD.pack(MAGIC, WIRE, 0, token, model, fingerprint(arrays))
    checksum = kernels.crc32(memoryview(data), kernels.crc32(memoryview(head)[_CHECKED_FROM:]))
    whole = head[:4] + struct.pack("<I", checksum) + head[_CHECKED_FROM:] + data
    return as_bytes_record(whole)


def as_bytes_record(data: bytes) -> ArrayRecord:
    """Return a record that carries bytes of gradwire in place of a model's arrays."""
    return ArrayRecord({ARRAY: Array("uint8", (len(data),), STYPE, data)})


def is_bytes_record(arrays: ArrayRecord) -> bool:
    """Whether a record carries bytes of gradwire rather than a model's arrays."""
    return any(array.stype == STYPE for array in arrays.values())


def open_update(record: ArrayRecord, model: int, arrays: ArrayRecord) -> tuple[bytes, memoryview]:
    """Return the token and the data of a record that `seal` made, or raise a FrameError.

    `model` and `arrays` are the number and the arrays of the model that this client was sent. Everything is checked
    that can be checked without decoding: length, version, checksum, model and fingerprint.
    """
    if list(record) != [ARRAY]:
        raise FrameError("other arrays beside the update")
    data = memoryview(record[ARRAY].data)
    entries = sum(_entries(array) for array in arrays.values())
    most = 8 * entries + 1024 * (len(arrays) + 1)  # fp64 as it is, and a header for every tensor
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
