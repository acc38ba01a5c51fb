"""Which tensors a message carries. A gradient that is zero everywhere is not sent, and leaves its memory as it is.

So a parameter that a rank did not use in a step (an expert that no example went to, or what DDP calls unused) costs
one bit, and what its error memory holds waits for the next step in which it is used.

A message begins with one byte: 0 if all tensors are there, or 1, followed by a bit for each, in order, lowest first,
and the CRC-32 of these bits: tensors may be equally large, so that their frames do not tell them apart.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import torch

from gradwire.errors import FrameError

CHECKSUM = 4  # bytes
LOOK = 64  # entries that tell of nearly all gradients that they are not zero


def is_zero(tensor: torch.Tensor) -> bool:
    """Return whether all entries are zero; of most tensors the first few entries tell."""
    flat = tensor.view(-1) if tensor.is_contiguous() else tensor.reshape(-1)
    return not bool(flat[:LOOK].any()) and not bool(flat.any())


def pack(present: Sequence[bool]) -> bytes:
    """Return the front of a message that carries the tensors whose flags are set."""
    if all(present):
        return b"\0"
    bits = np.packbits(np.array(present), bitorder="little").tobytes()
    return b"\1" + bits + zlib.crc32(bits).to_bytes(CHECKSUM, "little")


def most_bytes(count: int) -> int:
    """Return the most bytes that `pack` makes of so many flags."""
    return 1 + -(-count // 8) + CHECKSUM


def unpack(message: np.ndarray, count: int) -> tuple[list[bool], int]:
    """Return which of the tensors the message carries, and where what follows begins; a FrameError if it is damaged."""
    if not len(message):
        raise FrameError("the message is empty")
    if message[0] == 0:
        return [True] * count, 1
    length = 1 + -(-count // 8)
    end = length + CHECKSUM
    if message[0] != 1 or len(message) < end:
        raise FrameError("the message does not tell which tensors it carries")
    if zlib.crc32(message[1:length].tobytes()) != int.from_bytes(message[length:end].tobytes(), "little"):
        raise FrameError("checksum mismatch: what tells which tensors the message carries is damaged")
    bits = np.unpackbits(message[1:length], bitorder="little")
    if bits[count:].any():
        raise FrameError("the message tells of more tensors than there are")
    return bits[:count].astype(bool).tolist(), end
