"""Values of a sparse frame as a few magnitudes with signs: their table, and one entropy-coded symbol each.

docs/wire-format.md, codec 5, kind 6. The table travels: a decoder that solved for it anew would need the encoder's
arithmetic to the last bit.
"""

from __future__ import annotations

import numpy as np
import torch

from gradwire import compress, kernels
from gradwire.convert.conversion import in_host_memory, limit_to
from gradwire.convert.levels import choose
from gradwire.errors import FrameError
from gradwire.frame.byte_fields import Reader

MOST = 127  # magnitudes, so that a symbol of either sign is a byte
INFINITY = 0x7F80  # as bf16


def signed(magnitudes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return what the symbols stand for, ascending: fp32 numbers that the dtype holds, and no −0."""
    held = limit_to(magnitudes.float(), dtype).float()
    return torch.cat([-held.flip(0), held]) + 0.0


def encode(values: torch.Tensor, magnitudes: torch.Tensor, dtype: torch.dtype) -> tuple[bytes, torch.Tensor]:
    """Encode each value as the nearest of ±magnitudes (bf16, ascending); return the bytes and each value's error."""
    left = torch.empty_like(values)
    starts = np.array([0, values.numel()], dtype=np.int64)
    symbols, counts = kernels.assign_levels(values, None, left, 1.0, signed(magnitudes, dtype)[None], starts, None)
    in_use = alphabet(len(magnitudes))
    coding = choose(in_use, counts, values.numel(), "auto")
    table = in_host_memory(magnitudes.view(torch.uint8)).tobytes()
    return bytes([len(magnitudes)]) + table + compress.encode(in_host_memory(symbols), in_use, coding), left


def read_table(reader: Reader) -> torch.Tensor:
    """Read the magnitudes, as bf16."""
    number = reader.byte()
    if not 1 <= number <= MOST:
        raise FrameError("invalid number of magnitudes")
    magnitudes = torch.frombuffer(bytearray(reader.take(2 * number)), dtype=torch.bfloat16)
    bits = magnitudes.view(torch.int16)  # as integers, magnitudes are in the order of what they stand for
    if bool((bits < 0).any()) or int(bits.max()) >= INFINITY or bool((bits.diff() < 0).any()):
        raise FrameError("magnitudes are not finite, not in ascending order, or negative")
    return magnitudes


def alphabet(magnitudes: int) -> compress.Alphabet:
    """Return the symbols of this number of magnitudes, of either sign."""
    return compress.Alphabet(2 * magnitudes, magnitudes)
