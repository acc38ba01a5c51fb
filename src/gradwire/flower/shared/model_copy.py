"""What a client missed of the server's model, as bytes, and the client's copy that it is applied to.

docs/flower.md has every byte. Server and clients compute the same sums in the same order, so copies are bit-identical
on any path; a digest of the result in every message makes sure of it.
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


def own(model: Tensors) -> dict[str, torch.Tensor]:
    """A copy that nobody else changes, on the CPU and contiguous."""
    return {name: t.detach().cpu().clone(memory_format=torch.contiguous_format) for name, t in model.items()}


def layout(model: Tensors) -> list[tuple[str, torch.Size]]:
    return [(name, t.shape) for name, t in model.items()]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


def whole_bytes(model: Tensors) -> int:
    """What the model takes as it is."""
    return sum(t.numel() * t.dtype.itemsize for t in model.values())


def digest(model: Tensors) -> int:
    """CRC-32 of names, dtypes, shapes and entries, in the model's order; strides do not count."""
    value = 0
    for name, t in model.items():
        text = f"{name} {str(t.dtype).removeprefix('torch.')} {','.join(map(str, t.shape))}\n"
        value = kernels.crc32(memoryview(text.encode()), value)
        if t.numel():
            flat = t.detach().cpu().contiguous().as_strided((t.numel(),), (1,))  # one entry may have any stride
            value = kernels.crc32(flat.view(torch.uint8).numpy().data, value)
    return value


def message(have: int, number: int, stated: int, steps: Sequence[bytes]) -> bytes:
    """The steps from model `have` to model `number`, whose digest is `stated`."""
    parts = [_HEAD.pack(have, number, stated)]
    for step in steps:
        parts += [varint(len(step)), step]
    body = b"".join(parts)
    return MAGIC + bytes([VERSION]) + struct.pack("<I", kernels.crc32(memoryview(body))) + body


@dataclass(frozen=True)
class Copy:
    """A client's copy of the common model. Its tensors are not to be changed: copies share them."""

    number: int
    model: dict[str, torch.Tensor]

    @classmethod
    def whole(cls, number: int, model: Tensors) -> Copy:
        """Of a model that arrived whole."""
        return cls(number, own(model))

    def apply(self, data: codecs.Bytes) -> Copy:
        """The copy after what the server says it missed; where that does not fit, a FrameError: ask for the whole."""
        view = memoryview(codecs.as_bytes(data))
        if len(view) >= whole_bytes(self.model):
            raise FrameError(f"{len(view)} bytes of updates: the server would have sent the whole model, which is less")
        reader = Reader(_opened(view))
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
        return Copy(last, model)


def _opened(view: memoryview) -> memoryview:
    """What stands behind the checksum, if it is right."""
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
