"""Positions of the entries that are sent: ascending numbers below the size of the tensor, coded by their gaps.

There are two codes. Golomb–Rice suits entries that were selected with the same probability each. In practice
positions come in clusters (such as the rows of an embedding that a batch has used), and then classes are shorter: the
class of a gap says about how large it is (there are 2ᵐ classes an octave) and is entropy-coded, and the low bits, which
the class leaves open, follow as they are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import torch

from gradwire import kernels
from gradwire.compress import golomb, symbols
from gradwire.compress.choice import choose
from gradwire.compress.coders import RANS
from gradwire.compress.precision import COARSE, SMALL_ALPHABET, finest_precision
from gradwire.compress.raw import raw_width
from gradwire.errors import FrameError
from gradwire.frame.byte_fields import Reader, varint
from gradwire.models.symbol_statistics import Alphabet, SymbolStatistics

GOLOMB, CLASSES = 0, 1
WAYS = ("auto", "golomb", "rans")
FINEST = 2  # the largest m: 2ᵐ classes an octave
PART = 1 << 13  # positions that are decoded at a time where there are many
MANY = 1 << 16  # from this number of gaps on, a part of them decides whether classes are tried at all
CLEARLY = 0.995  # classes are worth their time if they take less than this part of the bits of Golomb–Rice


def encode(positions: np.ndarray, elements: int, way: str = "auto") -> tuple[int, bytes]:
    """Return the number of the code that was chosen, and the bytes of the positions."""
    gaps = kernels.split_gaps(positions)
    b, bits = golomb.choose(gaps, elements)
    if way != "golomb":
        classes = _encode_classes(gaps, elements, bits * CLEARLY if way == "auto" else None)
        if classes is not None and (way == "rans" or 8 * len(classes) < bits):
            return CLASSES, classes
    return GOLOMB, bytes([b]) + kernels.golomb_encode(gaps, b)


def _encode_classes(gaps: np.ndarray, elements: int, limit: float | None) -> bytes | None:
    """Return the bytes of the gaps by classes, or None if they cannot come below `limit` bits."""
    if limit is not None and len(gaps) >= MANY:
        part = gaps[len(gaps) // 2 :][: len(gaps) // 8]  # enough to see that it will not pay
        if _entropy_bits(seen := kernels.gap_counts(part, FINEST)) + _open_bits(seen, FINEST) > limit / 8:
            return None
    counts = kernels.gap_counts(gaps, FINEST)
    found = []
    for m in range(FINEST + 1):
        merged = _merge(counts, m)[: alphabet(len(gaps), elements, m).symbols]
        low_bits = _open_bits(merged, m)
        if limit is not None and _least_bits(merged) + low_bits >= limit:
            continue
        statistics = SymbolStatistics(alphabet(len(gaps), elements, m), merged, len(gaps))
        coding = choose(statistics, RANS)
        found.append((coding.expected_bits + low_bits, m, coding))
    if not found:
        return None
    bits, m, coding = min(found, key=lambda f: f[0])
    if limit is not None and bits >= limit:
        return None
    classes, low = kernels.gap_classes(gaps, m)
    coded = symbols.encode(classes, alphabet(len(gaps), elements, m), coding)
    return bytes([m]) + varint(len(coded)) + coded + low


def class_of(gap: int, m: int) -> int:
    """Return the class of a gap.

    Gaps below 2ᵐ have a class each; from there on the bit length and the m bits below the leading one decide.
    """
    octave = gap.bit_length() - 1
    return gap if gap < 1 << m else (octave - m << m) + (gap >> octave - m)


def alphabet(count: int, elements: int, m: int) -> Alphabet:
    """Return the classes up to that of the largest possible gap; the frequency of the mean gap's class is not sent."""
    spare = elements - count
    return Alphabet(class_of(spare, m) + 1, class_of(spare // count, m))


def _low_bits(classes: np.ndarray, m: int) -> np.ndarray:
    low: np.ndarray = np.maximum((classes >> m) - 1, 0)
    return low


def _open_bits(counts: np.ndarray, m: int) -> int:
    """Return how many low bits all gaps leave open together, given the number of gaps in each class."""
    return int(counts @ _low_bits(np.arange(len(counts)), m))


def _merge(counts: np.ndarray, m: int) -> np.ndarray:
    """Turn the counts of the finest classes into those of the coarser classes at m."""
    merged = np.zeros(256, dtype=np.int64)
    np.add.at(merged, _coarser(m), counts)
    return merged


@lru_cache
def _coarser(m: int) -> np.ndarray:
    """Return the class at m that each of the finest classes belongs to, by the smallest gap in it."""
    classes = np.arange(256)
    low = _low_bits(classes, FINEST)
    smallest = np.where(low > 0, classes & (1 << FINEST) - 1 | 1 << FINEST, classes) << np.minimum(low, 47)
    return np.array([class_of(int(gap), m) for gap in smallest])


def _least_bits(counts: np.ndarray) -> float:
    """Return a lower bound of the bits that `choose` would find, which takes far less time than to call it."""
    total, used = int(counts.sum()), counts[counts > 0]
    if len(used) == 1:
        return 0.0
    precision = COARSE if len(counts) <= SMALL_ALPHABET else finest_precision(len(counts))
    codes = np.maximum(1, 2 * np.log2(1 + used * (2.0**precision / total)) - 1)  # Elias gamma, rounded down
    table = float(codes.sum() - codes.max()) + len(counts) - len(used)
    return min(total * raw_width(len(counts)), _entropy_bits(counts) + table + RANS.fixed_bits)


def _entropy_bits(counts: np.ndarray) -> float:
    used = counts[counts > 0]
    return float(used @ np.log2(used.sum() / used))


# ── reading ───────────────────────────────────────────────────────────────────────────────────────


def read(reader: Reader, way: int, count: int, elements: int) -> np.ndarray:
    """Take `count` positions below `elements` off the reader."""
    coded = open_positions(reader, way, count, elements)
    (found,) = coded.parts(count)
    reader.position = coded.end
    return found


def open_positions(reader: Reader, way: int, count: int, elements: int) -> CodedPositions:
    """Return the positions at which the reader stands, without decoding them yet; the reader stays where it is."""
    if way not in (GOLOMB, CLASSES):
        raise FrameError(f"unknown code of positions {way}")
    return (GolombPositions, ClassPositions)[way](reader, count, elements)


class CodedPositions(ABC):
    """Positions in a frame, which are decoded part by part, as often as they are asked for.

    A frame of few bytes may have as many positions as its tensor has entries. Eight bytes for each of them would be
    more than the tensor takes.
    """

    def __init__(self, reader: Reader, count: int, elements: int):
        self.count, self.elements = count, elements
        self._data, self._start = reader.data, reader.position

    @property
    @abstractmethod
    def end(self) -> int:
        """Where the bytes behind the positions begin. If nothing else says so, all positions are decoded to see."""

    def parts(self, size: int) -> Iterator[np.ndarray]:
        """Yield all positions in ascending order, up to `size` at a time; FrameError if they are damaged."""
        at, before = 0, -1
        for start in range(0, self.count, size):
            found, at = self._decode(slice(start, min(self.count, start + size)), at, before)
            before = int(found[-1])
            yield found
        self._finish(at)

    @abstractmethod
    def _decode(self, part: slice, at: int, before: int) -> tuple[np.ndarray, int]:
        """Return this part of the positions, behind the position `before`, from bit `at` on; and where they end."""

    @abstractmethod
    def _finish(self, at: int) -> None:
        """Take note that the last position ends at bit `at`; FrameError if that cannot be."""


class GolombPositions(CodedPositions):
    """Positions in the Golomb–Rice code, whose length is not written anywhere."""

    def __init__(self, reader: Reader, count: int, elements: int):
        super().__init__(reader, count, elements)
        front = Reader(reader.data, reader.position)
        self._b = front.byte()
        self._codes, self._codes_at = front.data[front.position :], front.position
        self._end: int | None = None
        if self._b > golomb.LARGEST:
            raise FrameError("invalid parameter of a Golomb code")
        if count * (self._b + 1) > 8 * len(self._codes):
            raise FrameError("coded positions are cut short")

    @property
    def end(self) -> int:
        """Where the bytes behind the positions begin."""
        if self._end is None:
            for _ in self.parts(PART):
                pass
        assert self._end is not None
        return self._end

    def _decode(self, part: slice, at: int, before: int) -> tuple[np.ndarray, int]:
        count = part.stop - part.start
        return kernels.golomb_positions(self._codes, at, count, self._b, self.elements, before)

    def _finish(self, at: int) -> None:
        _check_padding(self._codes, at)
        self._end = self._codes_at + -(-at // 8)


class ClassPositions(CodedPositions):
    """Positions as classes of gaps, which take a byte each here, and their low bits."""

    def __init__(self, reader: Reader, count: int, elements: int):
        super().__init__(reader, count, elements)
        front = Reader(reader.data, reader.position)
        self._m = front.byte()
        if self._m > FINEST:
            raise FrameError("invalid classes of gaps")
        coded = Reader(front.take(front.varint(len(front.data))))
        classes_in_use = alphabet(count, elements, self._m)
        self._classes = symbols.decode(coded, classes_in_use, count, symbols.read_head(coded, classes_in_use))
        counts = kernels.histogram(torch.from_numpy(self._classes), 256)
        low_bits = _open_bits(counts, self._m)
        self._low = front.take(-(-low_bits // 8))
        self._end = front.position

    @property
    def end(self) -> int:
        """Where the bytes behind the positions begin."""
        return self._end

    def _decode(self, part: slice, at: int, before: int) -> tuple[np.ndarray, int]:
        return kernels.class_positions(self._classes[part], self._m, self._low, at, self.elements, before)

    def _finish(self, at: int) -> None:
        _check_padding(self._low, at)


def _check_padding(data: memoryview, at: int) -> None:
    """Raise FrameError if anything but zeros follows the last bit in its byte."""
    if at & 7 and data[at >> 3] >> (at & 7):
        raise FrameError("damaged padding of positions")
