"""Steps in a frame: that of a whole tensor, or those of its segments, each with the length of its segment."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from gradwire.convert.blocks import BLOCK
from gradwire.errors import FrameError
from gradwire.frame.byte_fields import Reader

SMALLEST_STEP, LARGEST_STEP = 2.0**-126, 2.0**126  # so that 1/step is a normal fp32 number
SMALLEST_BITS, LARGEST_BITS = 0x0080, 0x7E80  # the same as bfloat16
MOST = 1024  # segments whose steps are spread over their entries at a time


def read_step(reader: Reader) -> float:
    """Read a step in the allowed range."""
    step = reader.bfloat16()
    if not SMALLEST_STEP <= step <= LARGEST_STEP:
        raise FrameError("invalid step")
    return step


class Segments:
    """Length and step of every segment of a tensor, as they stand in its frame.

    They are read again whenever they are asked for, and never kept: a frame may have as many segments as entries, and
    objects for all of them would take a hundred times the memory of its tensor.
    """

    def __init__(self, reader: Reader, count: int):
        """Take all segments off the reader; FrameError if one is invalid, or if they do not add up to `count`."""
        self._data = reader.data
        self._number = reader.varint(len(reader.data))
        self._start = self._end = reader.position
        total = 0
        for length, _ in self._walk():
            total += length
        if total != count:
            raise FrameError("segments do not add up to the tensor")
        reader.position = self._end

    def __iter__(self) -> Iterator[tuple[int, float]]:
        """Yield (length, step) of every segment."""
        for length, bits in self._walk():
            yield length, float(_from_bits([bits])[0])

    def runs(self, values: int) -> Iterator[tuple[slice, np.ndarray, np.ndarray]]:
        """Yield which entries some segments have, where each of them begins and ends there, and their steps.

        That is all segments in order, no more at a time than a table with so many values for each of them has room for.
        """
        most, start = max(1, BLOCK // values), 0
        lengths: list[int] = []
        bits: list[int] = []
        for length, step in self._walk():
            if length:
                lengths.append(length)
                bits.append(step)
            if len(lengths) == most:
                starts = _starts(lengths)
                yield slice(start, start + int(starts[-1])), starts, _from_bits(bits)
                start, lengths, bits = start + int(starts[-1]), [], []
        if lengths:
            starts = _starts(lengths)
            yield slice(start, start + int(starts[-1])), starts, _from_bits(bits)

    def steps(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield the step of every entry, as fp32, and which entries these are; a block at a time."""
        lengths: list[int] = []
        bits: list[int] = []
        start = filled = 0
        for length, step in self._walk():
            left = length
            while left:
                taken = min(left, BLOCK - filled)
                lengths.append(taken)
                bits.append(step)
                filled, left = filled + taken, left - taken
                if filled == BLOCK or len(lengths) == MOST:
                    yield slice(start, start + filled), _spread(lengths, bits)
                    start, filled, lengths, bits = start + filled, 0, [], []
        if filled:
            yield slice(start, start + filled), _spread(lengths, bits)

    def _walk(self) -> Iterator[tuple[int, int]]:
        """Yield the length of every segment and the bits of its step.

        There may be many, so that a call for each field of each segment would take most of the time of a decoder.
        """
        data, at, end = self._data, self._start, len(self._data)
        for _ in range(self._number):
            if at + 3 > end:
                raise FrameError("frame is cut short")
            length = data[at]
            if length > 127:
                reader = Reader(data, at)
                length, at = reader.varint(2**48), reader.position - 1
            if at + 3 > end:
                raise FrameError("frame is cut short")
            bits = data[at + 1] | data[at + 2] << 8
            at += 3
            if not SMALLEST_BITS <= bits <= LARGEST_BITS:
                raise FrameError("invalid step")
            yield length, bits
        self._end = at


def _starts(lengths: list[int]) -> np.ndarray:
    starts = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=starts[1:])
    return starts


def _spread(lengths: list[int], bits: list[int]) -> torch.Tensor:
    return torch.from_numpy(np.repeat(_from_bits(bits), lengths))


def _from_bits(bits: list[int]) -> np.ndarray:
    numbers: np.ndarray = (np.array(bits, dtype=np.uint32) << 16).view(np.float32)
    return numbers
