"""What a client missed of the server's model, as bytes, and the client's copy that it is applied to.

docs/flower.md has every byte. Server and clients compute the same sums in the same order, so copies are bit-identical
on any path; a digest of the result in every message makes sure of it.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .. import codecs, kernels
from ..errors import FrameError, GradwireError
from ..fields import Reader, varint
from . import update
from .update import Tensors

MAGIC, STORE_MAGIC, VERSION = b"GWD", b"GWC", 1
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
    return _sealed(MAGIC, b"".join(parts))


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
        reader = Reader(_opened(MAGIC, view))
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

    # ── for the client's store ──

    def to_bytes(self) -> bytes:
        file = io.BytesIO()
        torch.save({"number": self.number, "model": self.model}, file)
        return _sealed(STORE_MAGIC, file.getvalue())

    @classmethod
    def from_bytes(cls, data: codecs.Bytes) -> Copy:
        # The checksum comes first: torch does not look at those of its own format.
        body = _opened(STORE_MAGIC, memoryview(codecs.as_bytes(data)))
        try:
            state = torch.load(io.BytesIO(body), map_location="cpu", weights_only=True)
            number, model = state["number"], state["model"]
            usable = isinstance(number, int) and all(isinstance(t, torch.Tensor) for t in model.values())
        except Exception as error:  # whatever torch raises for what it did not write
            raise GradwireError(f"cannot read the stored copy of the model: {error}") from error
        if not usable:
            raise GradwireError("this is no stored copy of a model")
        return cls(number, model)


def _sealed(magic: bytes, body: bytes) -> bytes:
    return magic + bytes([VERSION]) + struct.pack("<I", kernels.crc32(memoryview(body))) + body


def _opened(magic: bytes, view: memoryview) -> memoryview:
    reader = Reader(view)
    if reader.take(3) != magic:
        raise FrameError("this is neither an update of a model nor a stored copy (wrong magic)")
    if (version := reader.byte()) != VERSION:
        raise FrameError(f"version {version} of a download; this gradwire reads version {VERSION}: upgrade it")
    (stated,) = struct.unpack("<I", reader.take(4))
    body = reader.rest()
    if kernels.crc32(body) != stated:
        raise FrameError("checksum mismatch: the download is damaged")
    return body
