"""The symbols of a structured frame, class by class: on their way into it and out of it (wire-format.md, codec 8).

Where a kernel does all classes at once, it is asked first; what stands here class by class is the definition.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from gradwire import compress, kernels
from gradwire.compress import rans
from gradwire.convert.conversion import in_host_memory
from gradwire.convert.grid_search import MeasuredGrid
from gradwire.convert.kept_memory import KeptMemory
from gradwire.convert.scale_classes import ScaleClasses, read_symbols
from gradwire.errors import FrameError
from gradwire.frame.byte_fields import Reader, varint

# Classes of many symbols have lanes enough to be coded side by side in vector registers. A lane takes two bytes, so
# there is one for so many bits of the frame, and as many in a chunk as that allows.
BITS_PER_LANE = 4096
MANY_LANES, SOME_LANES = 400, 200
LONG, LONG_ENOUGH = 1 << 15, 1 << 12  # symbols: of a class that has such lanes, where there are few and where many
KEPT = KeptMemory()


class WrittenStreams:
    """A remainder on its way into a frame: its symbols in order, and class by class."""

    def __init__(
        self, x: torch.Tensor, prediction: kernels.Prediction | None, grid: MeasuredGrid, values: torch.Tensor,
        classes: ScaleClasses, capacity: int, kept: kernels.Kept | None,
    ):  # fmt: skip
        self._largest, self._classes = grid.largest, classes
        self.symbols, self._streams = (KEPT.room(name, len(x), torch.uint8) for name in ("symbols", "streams"))
        listed, self._counts = kernels.quantize_classes(
            x, prediction, grid.step, grid.shift, values, capacity, classes.small_scales, classes.base,
            classes.classes, self.symbols, self._streams, kept,
        )  # fmt: skip
        self.outliers = in_host_memory(listed[0]), in_host_memory(listed[1])

    def coded(self) -> tuple[bytes, bytes]:
        """Return the fields and the bytes of the classes, or of one for all where that takes fewer bits."""
        fields, counts = self._classes.fields, self._counts
        if len(counts) > 1:
            whole = counts.sum(0, keepdims=True)
            if _class_bits(whole) + 8 < _class_bits(counts) + 8 * len(fields):
                return bytes([1]), _code(in_host_memory(self.symbols).copy(), whole)
        return fields, _code(in_host_memory(self._streams), counts)


def _each(streams: np.ndarray, counts: np.ndarray) -> list[_Stream]:
    parts = np.split(streams, np.cumsum(counts.sum(1))[:-1])
    return [_Stream(part, of_class) for part, of_class in zip(parts, counts, strict=True)]


def _class_bits(counts: np.ndarray) -> float:
    """Return about how many bits classes with these counts of symbols take."""
    bits = kernels.class_bits(counts)
    return sum(stream.bits for stream in _each(np.empty(0), counts)) if bits is None else bits


def _code(streams: np.ndarray, counts: np.ndarray) -> bytes:
    """Return the bytes of all classes."""
    coded = kernels.code_classes(streams, counts)
    if coded is not None:
        return coded
    each = _each(streams, counts)
    lanes = sum(stream.coding_bits for stream in each) / BITS_PER_LANE
    return b"".join(stream.coded(lanes, len(streams)) for stream in each)


class _Stream:
    """The symbols of one class on their way into a frame."""

    def __init__(self, symbols: np.ndarray, counts: np.ndarray):
        largest, total = len(counts) // 2, int(counts.sum())
        used = np.flatnonzero(counts)
        self._symbols, self._shift = symbols, 0
        self._largest = int(max(abs(used[0] - largest), abs(used[-1] - largest))) if len(used) else 0
        self._shift = largest - self._largest
        self.bits, self.coding_bits = 8.0, 0.0
        if self._largest:
            self._alphabet = compress.Alphabet(2 * self._largest + 1, self._largest)
            counts = counts[self._shift : len(counts) - self._shift]
            statistics = compress.SymbolStatistics(self._alphabet, counts, total)
            self._coding = compress.choose(statistics, compress.RANS)
            self.coding_bits = self._coding.expected_bits
            self.bits += self.coding_bits + 8 * (len(varint(total // 4)) + len(self._coding.head))

    def coded(self, lanes: float, total: int) -> bytes:
        """Return the bytes of the class; all classes, of `total` entries, may have so many lanes for speed."""
        if not len(self._symbols):
            return b""
        if not self._largest:
            return bytes([0])
        symbols, coding = self._symbols - np.uint8(self._shift), self._coding
        if coding.coder == compress.RANS:
            count, together, at = len(symbols), 64 if lanes >= MANY_LANES else 32 if lanes >= SOME_LANES else 16, None
            if count >= (LONG_ENOUGH if lanes >= SOME_LANES else LONG):
                at = rans.fast_layout(count, coding.expected_bits, together, lanes * (count / total))
            coded = rans.encode(symbols, coding.table, coding.precision, coding.expected_bits, at=at)
            data = coding.head + coded.tobytes()
        else:
            data = compress.encode(symbols, self._alphabet, coding)
        return bytes([self._largest]) + varint(len(data)) + data


@dataclass
class ReadStreams:
    """The symbols of all classes, one class after the other, from which rows are put together in order."""

    classes: ScaleClasses
    symbols: np.ndarray
    zeros: np.ndarray  # of each class: what makes its symbols those of the grid
    positions: np.ndarray  # where the next symbol of each class is

    def next(self, entries: slice) -> torch.Tensor:
        """Return the symbols of these entries, which follow those of the last call."""
        if self.classes.classes == 1:
            return torch.from_numpy(self.symbols[entries] + np.uint8(self.zeros[0]))
        return kernels.merge_classes(
            self.symbols, self.positions, self.zeros, self.classes.scales_of(entries), self.classes.base, 0,
            entries.stop - entries.start,
        )  # fmt: skip


def read_streams(reader: Reader, classes: ScaleClasses, count: int, largest: int) -> ReadStreams:
    """Read all classes."""
    counts, symbols, start = classes.counts(count), KEPT.room("streams", count, torch.uint8).numpy(), 0
    zeros = np.zeros(len(counts), dtype=np.uint8)
    streams = ReadStreams(classes, symbols, zeros, np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int64))
    used = kernels.read_classes(reader.data[reader.position :], counts, largest, symbols, zeros)
    if used is not None:
        reader.take(used)
        return streams
    for t, number in enumerate(counts.tolist()):
        if not number:
            continue
        most = reader.byte()
        if most > largest:
            raise FrameError("invalid class")
        zeros[t] = largest - most
        of_class = symbols[start : start + number]
        if most:
            read_symbols(reader, compress.Alphabet(2 * most + 1, most), number, of_class)
        else:
            of_class[:] = 0
        start += number
    return streams
