"""Compressed downloads: a client's copy of the server's model, and the bytes of the steps that bring it up to date.

docs/flower.md specifies every byte. Server and clients compute the same sums in the same order, so all copies of one
number are identical bit for bit, whichever messages led there; every message has a digest of the result to prove it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gradwire import codecs, kernels
from gradwire.errors import FrameError
from gradwire.flower.shared import update
from gradwire.flower.shared.update import Tensors
from gradwire.frame.byte_fields import Reader, varint

MAGIC, VERSION = b"GWD", 1
_HEAD = struct.Struct("<III")  # from, to, digest


def private_copy(model: Tensors) -> dict[str, torch.Tensor]:
    """Return a copy on the CPU, contiguous, that shares no memory with the model."""
    return {name: t.detach().cpu().clone(memory_format=torch.contiguous_format) for name, t in model.items()}


def names_and_shapes(model: Tensors) -> list[tuple[str, torch.Size]]:
    """Return the names and shapes of a model's tensors, in its order."""
    return [(name, t.shape) for name, t in model.items()]


def is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and entries."""
    return a.dtype == b.dtype and torch.equal(a, b)


def whole_bytes(model: Tensors) -> int:
    """Return the bytes of all entries of a model, uncompressed."""
    return sum(t.numel() * t.dtype.itemsize for t in model.values())


def digest(model: Tensors) -> int:
    """Return a CRC-32 of names, dtypes, shapes and entries, in the model's order, whatever the strides are."""
    value = 0
    for name, t in model.items():
        text = f"{name} {str(t.dtype).removeprefix('torch.')} {','.join(map(str, t.shape))}\n"
        value = kernels.crc32(memoryview(text.encode()), value)
        if t.numel():
            flat = t.detach().cpu().contiguous().as_strided((t.numel(),), (1,))  # one entry may have any stride
            value = kernels.crc32(flat.view(torch.uint8).numpy().data, value)
    return value


def pack_steps(first: int, last: int, digest_of_last: int, steps: Sequence[bytes]) -> bytes:
    """Return the message with all steps that lead from model number `first` to model number `last`."""
    parts = [_HEAD.pack(first, last, digest_of_last)]
    for step in steps:
        parts += [varint(len(step)), step]
    body = b"".join(parts)
    return MAGIC + bytes([VERSION]) + struct.pack("<I", kernels.crc32(memoryview(body))) + body


@dataclass(frozen=True)
class ModelCopy:
    """A client's copy of the server's model, with the number of that model.

    Nobody may change its tensors, since successive copies share those that a step leaves alone.
    """

    number: int
    model: dict[str, torch.Tensor]

    @classmethod
    def whole(cls, number: int, model: Tensors) -> ModelCopy:
        """Return the copy of a model that arrived whole."""
        return cls(number, private_copy(model))

    def apply(self, data: codecs.Bytes) -> ModelCopy:
        """Return the copy after the steps in `data`, a message that `pack_steps` made.

        Raises a FrameError if they are damaged, do not continue from this copy, or do not lead to the server's model;
        the client then has to ask for the whole model.
        """
        view = memoryview(codecs.as_bytes(data))
        if len(view) >= whole_bytes(self.model):
            raise FrameError(f"{len(view)} bytes of updates: the server would have sent the whole model, which is less")
        reader = Reader(_checked_body(view))
        first, last, stated = _HEAD.unpack(reader.take(_HEAD.size))
        if not first <= self.number <= last:
            raise FrameError(f"updates from model {first} to {last} do not continue from model {self.number}")
        steps = [reader.take(reader.varint(len(view))) for _ in range(last - first)]
        if len(reader.rest()):
            raise FrameError(f"more bytes than those of {len(steps)} updates")
        model = self.model
        for step in steps[self.number - first :]:  # those before are in the copy already
            model = {**model, **update.decode(step, model, new_dtypes=True)}
        if digest(model) != stated:
            raise FrameError(f"model {last} is not the server's after these updates")
        return ModelCopy(last, model)


def _checked_body(view: memoryview) -> memoryview:
    """Return the bytes behind the checksum, or raise a FrameError if they do not have this checksum."""
    reader = Reader(view)
    if reader.take(3) != MAGIC:
        raise FrameError("these are no updates of a model (wrong magic)")
    if (version := reader.byte()) != VERSION:
        raise FrameError(f"version {version} of a download; this gradwire reads version {VERSION}: upgrade it")
    (stated,) = struct.unpack("<I", reader.take(4))
    body = reader.rest()
    if kernels.crc32(body) != stated:
        raise FrameError("checksum mismatch: the download is damaged")
    return body
