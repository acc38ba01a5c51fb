"""The numbers that describe the levels of buckets: how they are rounded to their precision, packed and read."""

from __future__ import annotations

import numpy as np
import torch

from gradwire.convert.conversion import limit_to
from gradwire.errors import FrameError
from gradwire.frame.byte_fields import Reader

PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}  # in the order of the wire
LARGEST = 2.0**126  # the largest magnitude of a level, so that the difference of two levels is finite


def round_to(numbers: np.ndarray, precision: torch.dtype) -> np.ndarray:
    """Round numbers to the nearest of this precision; the result is fp32."""
    return limit_to(torch.from_numpy(numbers), precision).float().numpy() + np.float32(0)  # no −0


def round_outward(numbers: np.ndarray, precision: torch.dtype, direction: int) -> np.ndarray:
    """Round numbers to this precision, down if the direction is −1 and up if it is 1; the result is fp32."""
    if precision in (torch.float32, torch.float64):
        return numbers
    x = direction * torch.from_numpy(numbers)  # now always upwards
    y = limit_to(x, precision)
    bits = y.view(torch.int16)
    # The next larger number has the next bit pattern, or the one before if it is negative; after 0 and −0 comes the
    # smallest positive number, whose pattern is 1.
    up = torch.where(y > 0, bits + 1, torch.where(y < 0, bits - 1, torch.ones_like(bits))).view(precision)
    up = torch.where(torch.isfinite(up), up, y)
    return (direction * torch.where(y.float() < x, up, y).float()).numpy() + np.float32(0)


def sent(sizes: np.ndarray, width: int) -> np.ndarray:
    """Return how many of its numbers each bucket sends: as many as it has entries, but at least two and at most all."""
    return np.asarray(np.minimum(np.maximum(sizes, 2), width))


def pack_numbers(numbers: np.ndarray, sizes: np.ndarray, precision: torch.dtype) -> bytes:
    """Return the bytes of all numbers, bucket by bucket, without those that only repeat the last of a small bucket."""
    width = numbers.shape[1]
    used = sent(sizes, width)
    if used.min() < width:
        numbers = numbers[np.arange(width) < used[:, None]]
    return torch.from_numpy(numbers).reshape(-1).to(precision).view(torch.uint8).numpy().tobytes()


def read_numbers(reader: Reader, sizes: np.ndarray, width: int, precision: torch.dtype) -> np.ndarray:
    """Read the numbers of all buckets and return them as fp32, one row for each bucket."""
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
