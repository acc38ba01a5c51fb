"""Positions of the entries that are sent: ascending numbers below the size of the tensor, coded by their gaps.

There are two codes. Golomb–Rice suits entries that were selected with the same probability each. In practice
positions come in clusters (such as the rows of an embedding that a batch has used), and then classes are shorter: the
class of a gap says about how large it is (there are 2ᵐ classes an octave) and is entropy-coded, and the low bits, which
the class leaves open, follow as they are.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

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


def read(reader: Reader, way: int, count: int, elements: int) -> np.ndarray:
    """Take `count` positions below `elements` off the reader."""
    if way == GOLOMB:
        b = reader.byte()
        if b > golomb.LARGEST:
            raise FrameError("invalid parameter of a Golomb code")
        found, used = kernels.golomb_decode(reader.data[reader.position :], count, b, elements)
        reader.take(used)
        return found
    if way != CLASSES:
        raise FrameError(f"unknown code of positions {way}")
    m = reader.byte()
    if m > FINEST:
        raise FrameError("invalid classes of gaps")
    coded = Reader(reader.take(reader.varint(len(reader.data))))
    classes_in_use = alphabet(count, elements, m)
    classes = symbols.decode(coded, classes_in_use, count, symbols.read_head(coded, classes_in_use))
    low = _open_bits(np.bincount(classes), m)
    return kernels.join_gaps(kernels.gap_tails(classes, m, reader.take(-(-low // 8))), elements)
