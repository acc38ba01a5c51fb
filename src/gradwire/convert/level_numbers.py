"""The numbers that describe levels: rounded to their precision, outwards where no entry may lie outside, and packed."""

from __future__ import annotations

import numpy as np
import torch

from gradwire.convert.conversion import limit_to
from gradwire.errors import FrameError
from gradwire.frame.byte_fields import Reader

PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}  # in the order of the wire
LARGEST = 2.0**126  # magnitude: differences of two levels are then finite


def round_to(numbers: np.ndarray, precision: torch.dtype) -> np.ndarray:
    """To nearest, as fp32."""
    return limit_to(torch.from_numpy(numbers), precision).float().numpy() + np.float32(0)  # no −0


def round_outward(numbers: np.ndarray, precision: torch.dtype, direction: int) -> np.ndarray:
    """The nearest numbers of this precision that are not above (direction −1) or not below (1) the given ones."""
    if precision in (torch.float32, torch.float64):
        return numbers
    x = direction * torch.from_numpy(numbers)  # now always upwards
    y = limit_to(x, precision)
    bits = y.view(torch.int16)
    # The next number up is the next pattern, for negative ones the one before; −0 is followed by the smallest.
    up = torch.where(y > 0, bits + 1, torch.where(y < 0, bits - 1, torch.ones_like(bits))).view(precision)
    up = torch.where(torch.isfinite(up), up, y)
    return (direction * torch.where(y.float() < x, up, y).float()).numpy() + np.float32(0)


def sent(sizes: np.ndarray, width: int) -> np.ndarray:
    """How many of its numbers each bucket sends: no more than it has entries, but two, to have them between."""
    return np.asarray(np.minimum(np.maximum(sizes, 2), width))


def pack_numbers(numbers: np.ndarray, sizes: np.ndarray, precision: torch.dtype) -> bytes:
    """Row by row, without those that only repeat the last of a small bucket."""
    width = numbers.shape[1]
    used = sent(sizes, width)
    if used.min() < width:
        numbers = numbers[np.arange(width) < used[:, None]]
    return torch.from_numpy(numbers).reshape(-1).to(precision).view(torch.uint8).numpy().tobytes()


def read_numbers(reader: Reader, sizes: np.ndarray, width: int, precision: torch.dtype) -> np.ndarray:
    """fp32, one row for each bucket."""
    used = sent(sizes, width)
    raw = bytearray(reader.take(int(used.sum()) * precision.itemsize))
    numbers = torch.frombuffer(raw, dtype=precision).float().numpy()
    if not (np.abs(numbers) <= LARGEST).all() or (np.signbit(numbers) & (numbers == 0)).any():
        raise FrameError("invalid level")
    if used.min() < width:
        last = np.cumsum(used) - 1
        rows = (last - used + 1)[:, None] + np.arange(width)
        numbers = numbers[np.minimum(rows, last[:, None])]
    numbers = numbers.reshape(-1, width)
    if (np.diff(numbers, axis=1) < 0).any():
        raise FrameError("levels are not in ascending order")
    return numbers
