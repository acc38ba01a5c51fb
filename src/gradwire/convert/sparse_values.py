"""The values of a sparse frame: how they travel, and how they are read part by part (docs/wire-format.md, codec 5)."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

import numpy as np
import torch

from gradwire import compress, kernels
from gradwire.convert import magnitudes, minifloat
from gradwire.convert.conversion import limit_to
from gradwire.convert.segments import read_step
from gradwire.errors import FrameError
from gradwire.frame.byte_fields import Reader
from gradwire.frame.headers import Header

ONE_VALUE, ONE_MAGNITUDE, FP32, FP16, BF16, SMALL_FLOATS, MAGNITUDES = range(7)  # how values travel
DTYPES = {FP32: torch.float32, FP16: torch.float16, BF16: torch.bfloat16}

# Returns the values of a part of the entries that were sent, or one for all of them, as fp32 numbers that the tensor's
# dtype holds. Except for symbols, parts begin at multiples of eight.
Values = Callable[[slice], torch.Tensor]


def received(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the values as a receiver decodes them: limited and rounded to the dtype of the tensor, as fp32."""
    if dtype.itemsize >= 4:
        return values.float()  # finite, and so in range
    return limit_to(values.float(), dtype).float()


def open_values(header: Header, kind: int, data: np.ndarray, count: int) -> Values:
    """Return the `count` values that are the rest of a frame; FrameError if they are damaged, here or when called."""
    if kind in (ONE_VALUE, ONE_MAGNITUDE):
        return _one_value(header, kind, Reader(memoryview(data)), count)
    if kind == SMALL_FLOATS:
        reader = Reader(memoryview(data))
        fmt, step = minifloat.read_format(reader), read_step(reader)
        return _symbols(reader, fmt, count, minifloat.values(fmt, step, header.dtype))
    if kind == MAGNITUDES:
        reader = Reader(memoryview(data))
        table = magnitudes.signed(magnitudes.read_table(reader), header.dtype)
        return _symbols(reader, magnitudes.alphabet(len(table) // 2), count, table)
    if kind not in DTYPES or len(data) != count * DTYPES[kind].itemsize:
        raise FrameError("damaged values of a sparse frame")
    return _numbers(data, DTYPES[kind], header.dtype)


def _numbers(data: np.ndarray, sent: torch.dtype, dtype: torch.dtype) -> Values:
    def values(part: slice) -> torch.Tensor:
        # Copied: the values may start at an odd address.
        raw = data[part.start * sent.itemsize : part.stop * sent.itemsize].copy()
        numbers = torch.from_numpy(raw).view(sent).float()
        if not math.isfinite(kernels.absmax(numbers)):
            raise FrameError("a value of a sparse frame is not finite")
        return received(numbers, dtype)

    return values


def _symbols(reader: Reader, alphabet: compress.AnyAlphabet, count: int, table: torch.Tensor) -> Values:
    coding = compress.read_head(reader, alphabet)
    if coding.coder == compress.CONSTANT:
        value = table[compress.read_constant(reader, alphabet)].reshape(1)
        return lambda part: value
    symbols = compress.decode(reader, alphabet, count, coding)

    def values(part: slice) -> torch.Tensor:
        out = torch.empty(part.stop - part.start, dtype=torch.float32, device="cpu")
        kernels.spread_levels(symbols[part], table[None], np.array([0, out.numel()]), out, False)
        return out

    return values


def _one_value(header: Header, kind: int, reader: Reader, count: int) -> Values:
    (value,) = struct.unpack("<f", reader.take(4))
    rest = reader.rest()
    if not math.isfinite(value) or not value or (kind == ONE_MAGNITUDE and value < 0):
        raise FrameError("damaged value of a sparse frame")
    values = received(torch.tensor([value], dtype=torch.float32, device="cpu"), header.dtype)
    if kind == ONE_VALUE:
        if rest:
            raise FrameError("trailing bytes of a sparse frame")
        return lambda part: values
    if len(rest) != -(-count // 8):
        raise FrameError("wrong length of packed symbols")

    def signed(part: slice) -> torch.Tensor:
        signs = kernels.unpack_bits(rest[part.start // 8 : -(-part.stop // 8)], part.stop - part.start, 1, 2)
        return torch.where(torch.from_numpy(signs) > 0, -values, values)

    return signed
