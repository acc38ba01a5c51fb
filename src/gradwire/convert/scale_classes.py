"""Classes of entries by the scales of their row, column and coefficient, which travel as side information.

The magnitude of a gradient's entry is to a good part that of its row (what the layer's output lacked) times that of its
column (what its input was). With the scale of each known beforehand, every entry has a probability table that fits it,
and no entry waits for another: a decoder knows the class of every entry before it decodes the first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gradwire import compress, kernels
from gradwire.compress import rans
from gradwire.convert.tensor_view import TensorView
from gradwire.errors import FrameError
from gradwire.frame.byte_fields import Reader, varint

MOST_CLASSES, MOST_SCALE, MOST_BASE = 32, 63, 255
LOWEST = -3.0  # log₂ of the scale, in steps, below which entries are as good as all zero: they share class 0
FINE, COARSE = 2, 1  # scales to a factor of two
LARGE = 1 << 17  # entries: from here on a table for every half of a factor of two is worth its bytes


@dataclass(frozen=True)
class ScaleClasses:
    """The scales of rows, columns and coefficients, as small numbers, and which class a sum of them is."""

    scales: tuple[np.ndarray, np.ndarray, np.ndarray]
    base: int
    classes: int

    def scales_of(self, entries: slice) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the scales of the rows that these entries are, as kernels take them, and those of all columns."""
        rows, columns, coefficients = self.scales
        width = len(columns) * len(coefficients)
        part = rows[entries.start // width : -(-entries.stop // width)]
        return part.astype(np.int16), columns.astype(np.int16), coefficients.astype(np.int16)

    @property
    def small_scales(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The scales as kernels take them."""
        rows, columns, coefficients = self.scales
        return rows.astype(np.int16), columns.astype(np.int16), coefficients.astype(np.int16)

    def counts(self, count: int) -> np.ndarray:
        """Return how many of `count` entries are in each class."""
        if self.classes == 1:
            return np.array([count])
        return kernels.class_counts(self.scales, self.base, self.classes, count)

    @cached_property
    def fields(self) -> bytes:
        """The bytes that say all of this."""
        if self.classes == 1:
            return bytes([1])
        return bytes([self.classes, self.base]) + b"".join(_write_scales(s) for s in self.scales if len(s) > 1)


def one_class(view: TensorView) -> ScaleClasses:
    """Return what puts all entries into one class."""
    rows, columns, coefficients = (np.zeros(n, dtype=np.int16) for n in view.shape)
    return ScaleClasses((rows, columns, coefficients), 0, 1)


def fit_classes(view: TensorView, energies: tuple[np.ndarray, np.ndarray, np.ndarray], step: float) -> ScaleClasses:
    """Return classes for a remainder whose rows, columns and coefficients have these energies.

    Scales are logarithms, to half a factor of two or to one. That of an entry estimates log₂ of its root mean square in
    steps; those below LOWEST are class 0. An axis whose scales are worth less than they cost has none.
    """
    total = float(energies[0].sum())
    if not total > 0:
        return one_class(view)
    resolution = FINE if view.count >= LARGE else COARSE
    level = resolution * (math.log2(total / view.count) / 2 - math.log2(step))  # of an entry with average scales
    scales = []
    for energy in energies:
        mean = energy * len(energy) / total  # the last row of blocks may be cut off: then its scale is a bit low
        logs = np.rint(resolution * np.log2(np.maximum(mean, 2.0**-100)) / 2).astype(np.int64)
        scales.append(logs if _is_worth_it(logs, view.count, level, resolution) else np.zeros_like(logs))
    return _with_base(scales, round(level), round(resolution * LOWEST))


def _with_base(scales: list[np.ndarray], level: int, lowest: int) -> ScaleClasses:
    """Return the classes for logarithms of scales around `level`: class 0 is that of `lowest` and of all below."""
    highest = [int(scale.max()) for scale in scales]
    for axis, scale in enumerate(scales):
        # What is in class 0 whatever the other scales are need not be told apart.
        least = max(lowest - level - (sum(highest) - highest[axis]), highest[axis] - MOST_SCALE)
        scales[axis] = np.maximum(scale, min(least, highest[axis]))
    low = [int(scale.min()) for scale in scales]
    lowest = max(lowest, level + sum(low))
    rows, columns, coefficients = ((scale - least).astype(np.int16) for scale, least in zip(scales, low, strict=True))
    classes = min(MOST_CLASSES, max(1, level + sum(highest) - lowest + 1))
    return ScaleClasses((rows, columns, coefficients), lowest - level - sum(low), classes)


def _is_worth_it(logs: np.ndarray, count: int, level: float, resolution: int) -> bool:
    """Tell whether telling the scales of an axis saves more than it costs.

    What is saved is the difference between the logarithm of the mean and the mean of the logarithms, for entries that
    take any bits.
    """
    if len(logs) < 2:
        return False
    active = np.maximum(logs / resolution, LOWEST - level / resolution)
    saved = (0.5 * math.log2(np.mean(4.0**active)) - active.mean()) * count
    counts = np.bincount(logs - logs.min())
    counts = counts[counts > 0]
    cost = float(counts @ np.log2(len(logs) / counts)) + 6 * len(counts) + 16
    share = min(1.0, max(0.05, 0.5 + level / resolution / 4))  # of the entries that take any bits
    return bool(saved * share > cost)


def _write_scales(scales: np.ndarray) -> bytes:
    top = int(scales.max())
    if not top:
        return bytes([0])
    coded = write_symbols(scales.astype(np.uint8), compress.Alphabet(top + 1, (top + 1) // 2))
    return bytes([top]) + varint(len(coded)) + coded


def write_symbols(symbols: np.ndarray, alphabet: compress.Alphabet) -> bytes:
    """Return symbols with the cheapest coding by their histogram."""
    coded = kernels.code_symbols(symbols, alphabet.symbols, alphabet.zero_symbol)
    if coded is not None:
        return coded
    counts = np.bincount(symbols, minlength=alphabet.symbols)
    coding = compress.choose(compress.SymbolStatistics(alphabet, counts, len(symbols)), compress.RANS)
    return compress.encode(symbols, alphabet, coding)


def read_classes(reader: Reader, view: TensorView) -> ScaleClasses:
    """Read the number of classes and, if there are several, the scales."""
    classes = reader.byte()
    if not 1 <= classes <= MOST_CLASSES:
        raise FrameError("invalid number of classes")
    if classes == 1:
        return one_class(view)
    base = reader.byte()
    rows, columns, coefficients = (_read_scales(reader, count) for count in view.shape)
    return ScaleClasses((rows, columns, coefficients), base, classes)


def _read_scales(reader: Reader, count: int) -> np.ndarray:
    top = reader.byte() if count > 1 else 0
    if top > MOST_SCALE:
        raise FrameError("invalid scales")
    if not top:
        return np.zeros(count, dtype=np.uint8)
    alphabet = compress.Alphabet(top + 1, (top + 1) // 2)
    return read_symbols(reader, alphabet, count)


def read_symbols(reader: Reader, alphabet: compress.Alphabet, count: int, out: np.ndarray | None = None) -> np.ndarray:
    """Read a length and so many bytes, which are the coded symbols."""
    length = reader.varint(len(reader.data))
    field = Reader(reader.take(length))
    symbols = np.empty(count, dtype=np.uint8) if out is None else out
    if kernels.read_symbols(field.data, alphabet.symbols, alphabet.zero_symbol, symbols):
        return symbols
    coding = compress.read_head(field, alphabet)
    if out is None:
        return compress.decode(field, alphabet, count, coding)
    # A class may be all of a large tensor: the codes whose bytes say nothing of their length are decoded in place.
    if coding.coder == compress.RANS:
        return rans.decode(field.rest(), count, coding.table, coding.precision, out)
    out[:] = compress.decode(field, alphabet, 1 if coding.coder == compress.CONSTANT else count, coding)
    return out
