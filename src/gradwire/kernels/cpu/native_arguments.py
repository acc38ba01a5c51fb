"""Arguments as the native module takes them: arrays over the same memory, numbers in its ranges."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def flat_fp32(tensor: torch.Tensor) -> bool:
    """Tell whether the native kernels read a CPU tensor as it is."""
    return tensor.dtype == torch.float32 and tensor.is_contiguous()


def as_array(tensor: torch.Tensor | None) -> Any:
    """Return the same memory as an array: numpy hands it to native code ten times as fast as torch does."""
    return None if tensor is None else tensor.numpy()


def as_bytes(data: memoryview | np.ndarray) -> np.ndarray:
    """Return the same memory as an array of bytes."""
    return np.frombuffer(data, dtype=np.uint8)


def as_lengths(lengths: np.ndarray | list[int]) -> np.ndarray:
    """Return the lengths of chunks as an array."""
    return np.asarray(lengths, dtype=np.int64)


def as_seed(seed: int | None) -> int | None:
    """Return the 64 low bits of a seed; None, which asks for rounding to nearest, stays None."""
    return None if seed is None else seed & 0xFFFFFFFFFFFFFFFF
