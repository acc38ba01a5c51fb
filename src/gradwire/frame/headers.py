"""The header of a frame: every field that stands before the payload of the codec.

    bytes     field
    0–1       magic, "GW"
    2         version
    3         codec (low four bits) and flags (high four bits)
    4         dtype (low four bits) and number of dimensions (high four bits)
    5–8       checksum, CRC-32 of the whole frame but these four bytes
    varint    length of the payload in bytes
    varints   sizes of the dimensions

docs/wire-format.md is the authority. `seal` writes the header; `read_header` reads it and returns a `Header`.

A new field needs a new version, and a row in the table above and in docs/wire-format.md. If its size is fixed, it is
an entry of FIXED_FIELDS in front of the checksum, which has to stay the last of them; `seal` packs and `read_header`
unpacks these fields by position, so both change as well. A varint is written in `seal`, counted in `header_length` and
read in `read_header`. What readers have to know becomes a field of `Header`. A new flag is a bit of its own that
`read_header` accepts. The tests have a writer and a reader of their own (`assemble` in tests/support/helpers.py,
`plain_decode` in tests/support/plain_decoder.py), and golden frames that are then made again.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from functools import cached_property

import torch

from gradwire import kernels
from gradwire.errors import FrameError
from gradwire.frame.byte_fields import Reader, varint

MAGIC = b"GW"
VERSION = 1
STORED, MINIFLOAT, CAST, GRID, LEVELS, SPARSE, SKETCH, HOMOMORPHIC, STRUCTURED = range(9)
NONFINITE, SEGMENTED = 1, 2  # flags
MAX_ELEMENTS = 2**48
MAX_RANK = 15

DTYPES = (
    torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.uint8,
    torch.int8, torch.int16, torch.int32, torch.int64, torch.bool,
)  # fmt: skip
_DTYPE_NUMBER = {dtype: i for i, dtype in enumerate(DTYPES)}
FIXED_FIELDS = {"magic": "2s", "version": "B", "codec and flags": "B", "dtype and rank": "B", "checksum": "I"}
_FIXED = struct.Struct("<" + "".join(FIXED_FIELDS.values()))
_CHECKSUM_AT = _FIXED.size - 4  # it is the last of them


@dataclass(frozen=True)
class Header:
    """What a frame says of its tensor, after validation."""

    codec: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    flags: int
    payload_length: int
    length: int  # of the header itself

    @cached_property
    def elements(self) -> int:
        """How many entries the tensor has."""
        return math.prod(self.shape)

    @property
    def frame_length(self) -> int:
        """The length of the whole frame in bytes."""
        return self.length + self.payload_length

    @property
    def nonfinite(self) -> bool:
        """Whether the tensor held a NaN or an infinity."""
        return bool(self.flags & NONFINITE)


def header_length(shape: tuple[int, ...], payload_length: int) -> int:
    """Return the length of a header in bytes."""
    return _FIXED.size + len(varint(payload_length)) + sum(len(varint(d)) for d in shape)


def seal(
    out: memoryview, codec: int, dtype: torch.dtype, shape: tuple[int, ...], flags: int, payload_length: int
) -> int:
    """Write header and checksum before a payload that already stands in `out`, and return the frame's length."""
    sizes = varint(payload_length) + b"".join(varint(d) for d in shape)
    start = _FIXED.size + len(sizes)
    length = start + payload_length
    kind, tensor = codec | flags << 4, _DTYPE_NUMBER[dtype] | len(shape) << 4
    out[: _FIXED.size] = _FIXED.pack(MAGIC, VERSION, kind, tensor, 0)
    out[_FIXED.size : start] = sizes
    out[_CHECKSUM_AT : _FIXED.size] = struct.pack("<I", _checksum(out[:length]))
    return length


def _checksum(frame: memoryview) -> int:
    return kernels.crc32(frame[_FIXED.size :], kernels.crc32(frame[:_CHECKSUM_AT]))


def read_header(data: memoryview) -> Header:
    """Parse and validate the header at the front of `data`; `open_frame` verifies the checksum."""
    if len(data) < _FIXED.size + 1:
        raise FrameError(f"frame is cut short: {len(data)} bytes")
    magic, version, kind, tensor, _ = _FIXED.unpack_from(data)
    codec, flags, dtype, rank = kind & 15, kind >> 4, tensor & 15, tensor >> 4
    if magic != MAGIC:
        raise FrameError("not a gradwire frame (wrong magic)")
    if version != VERSION:
        raise FrameError(f"frame has version {version}; this gradwire reads version {VERSION}: upgrade it")
    if dtype >= len(DTYPES):
        raise FrameError(f"unknown dtype {dtype} in frame")
    if flags & ~(NONFINITE | SEGMENTED):
        raise FrameError(f"unknown flags {flags:#x} in frame")
    reader = Reader(data, _FIXED.size)
    payload_length = reader.varint(2**56)
    shape = tuple(reader.varint(MAX_ELEMENTS) for _ in range(rank))
    if math.prod(shape) >= MAX_ELEMENTS:
        raise FrameError("frame declares 2^48 elements or more")
    return Header(codec, DTYPES[dtype], shape, flags, payload_length, reader.position)


def open_frame(data: memoryview) -> tuple[Header, memoryview]:
    """Return the header and the payload of `data`, which must be exactly one frame; the checksum is verified."""
    header = read_header(data)
    verify(header, data)
    return header, data[header.length :]


def verify(header: Header, data: memoryview) -> None:
    """Raise FrameError unless `data` is exactly one frame, with this header and the right checksum."""
    if header.frame_length != len(data):
        raise FrameError(f"frame declares {header.frame_length} bytes, but there are {len(data)}")
    (stated,) = struct.unpack_from("<I", data, _CHECKSUM_AT)
    if stated != _checksum(data):
        raise FrameError("checksum mismatch: the frame is damaged")


def split(message: memoryview, most: int | None = None) -> list[memoryview]:
    """Return the frames that stand one after the other in a message; FrameError if there are more than `most`."""
    return [frame for _, frame in split_with_headers(message, most)]


def split_with_headers(message: memoryview, most: int | None = None) -> list[tuple[Header, memoryview]]:
    """Return what `split` does, each frame with its header."""
    frames: list[tuple[Header, memoryview]] = []
    while len(message):
        if len(frames) == most:
            raise FrameError(f"more frames than the {most} that are announced")
        header = read_header(message)
        length = header.frame_length
        if length > len(message):
            raise FrameError("last frame of the message is cut short")
        frames.append((header, message[:length]))
        message = message[length:]
    return frames
