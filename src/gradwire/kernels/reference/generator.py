"""The documented counter-based random generator (docs/wire-format.md), which also serves as a hash.

Every entry has its own number, which depends on the seed and on the entry's index alone: the same in every kernel, on
every device, with any number of threads.
"""

from __future__ import annotations

import torch

__all__ = ["mix", "uniform"]


def mix(x: torch.Tensor) -> torch.Tensor:
    """Hash 32-bit numbers, which are held in int64, to 32-bit numbers."""
    mask = 0xFFFFFFFF
    x = (x ^ (x >> 16)) * 0x21F0AAAD & mask
    x = (x ^ (x >> 15)) * 0x735A2D97 & mask
    return x ^ (x >> 15)


def uniform(count: int, seed: int, start: int = 0, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return 24-bit uniform fractions in [0, 1) for the entries start … start+count−1 (fp32, exact)."""
    i = torch.arange(start, start + count, dtype=torch.int64, device=device)
    key1 = mix((seed & 0xFFFFFFFF) ^ 0x9E3779B9 ^ mix(i >> 32))
    key2 = mix(key1 ^ (seed >> 32 & 0xFFFFFFFF))
    bits = mix((mix((i & 0xFFFFFFFF) ^ key1) + key2) & 0xFFFFFFFF)
    return (bits >> 8).float() / 2**24
