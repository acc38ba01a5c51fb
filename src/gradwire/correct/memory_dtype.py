"""In which dtype error memory is kept: fp32, or bf16 with stochastic rounding, which takes half of the room.

Rounded to nearest, bf16 would lose what is added to a memory that is 512 times larger; sparse recipes add for thousands
of steps. Rounded up or down at random, with the probabilities that make the mean right, nothing is lost on average.
"""

from __future__ import annotations

import zlib

import torch

from gradwire.errors import unknown_name

BLOCK = 1 << 16  # entries: what is made of a block on its way stays in a cache
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def memory_dtype(name: str) -> torch.dtype:
    """Return the dtype of a memory that users name; SpecError if there is no such memory."""
    if not isinstance(name, str) or name not in DTYPES:
        raise unknown_name("memory", name, list(DTYPES))
    return DTYPES[name]


def keep(values: torch.Tensor, memory: torch.Tensor, seed: int) -> None:
    """Write fp32 values to a memory of as many entries; the same values and seed give the same memory."""
    values, flat = values.reshape(-1), memory.view(-1)
    if memory.dtype == values.dtype:
        flat.copy_(values)
        return
    size = BLOCK if values.is_cpu else max(1, values.numel())
    for start in range(0, values.numel(), size):
        part = slice(start, start + size)
        flat[part].copy_(_rounded_at_random(values[part], start, seed))


def _rounded_at_random(values: torch.Tensor, start: int, seed: int) -> torch.Tensor:
    """Add 16 random bits below the last one that bf16 has, and cut off: in integers, which order floats by magnitude.

    The random bits are a hash of the entry's index (the first one has the index `start`) and the seed, so that torch's
    generators are left alone. Products of int32 wrap around, on every device.
    """
    key = zlib.crc32(seed.to_bytes(16, "little", signed=True)) - 2**31
    random = torch.arange(start, start + values.numel(), dtype=torch.int32, device=values.device)
    random.mul_(-1640531535).bitwise_xor_(key)
    random.bitwise_xor_(random >> 15).mul_(-2048144789)
    random.bitwise_xor_(random >> 13).mul_(-1028477379)
    random.bitwise_right_shift_(16).bitwise_and_(0xFFFF)
    limit = torch.finfo(torch.bfloat16).max  # nothing is rounded to infinity
    return (values.view(torch.int32) + random).bitwise_and_(-65536).view(torch.float32).clamp_(-limit, limit)
