"""Symbols to bytes and back: any model with any coder.

`choose` looks at counts and takes the cheapest way to code them, everything that travels included;
`encode` and `decode` do it. Models give integer frequencies, coders spend the bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TypeGuard

import numpy as np

from gradwire import kernels
from gradwire.compress import huffman, rans
from gradwire.errors import FrameError
from gradwire.float_formats import Format
from gradwire.frame.byte_fields import Reader
from gradwire.models import gennorm, histogram

RAW, CONSTANT, HUFFMAN, RANS = 0, 1, 2, 3
NO_MODEL, GENNORM, HISTOGRAM = 0, 1, 2
CODERS = {"raw": RAW, "huffman": HUFFMAN, "rans": RANS}
MODELS = {"auto": (GENNORM, HISTOGRAM), "gennorm": (GENNORM,), "histogram": (HISTOGRAM,)}
COARSE, FINE, FINEST = 8, 12, 14  # bits of precision; 8-bit tables decode half as fast again
SMALL_ALPHABET = 16  # symbols
SMALLEST_RANS = 32  # bits beside those of the symbols: the layout and one state
# From this size on a coarse table may cost this factor in bytes: what it saves in decoding is worth that many bytes
# on any link above 100 Mbit/s. Smaller tensors need the margin for their headers.
LARGE, TOLERANCE = 1 << 20, 1.006


@dataclass(frozen=True)
class Alphabet:
    """Symbols 0 … symbols−1 of a converter that has no GenNorm tables: what coders need of a `Format`."""

    symbols: int
    zero_symbol: int  # its frequency is not sent: it follows from the others


@dataclass(frozen=True)
class Coding:
    """How symbols are coded: what the first bytes of the coded symbols say."""

    coder: int
    model: int = NO_MODEL
    precision: int = 0
    parameters: bytes = b""
    frequencies: np.ndarray | None = None
    expected_bits: float = 0.0

    @property
    def table(self) -> np.ndarray:
        assert self.frequencies is not None, "raw and constant codings have no table"
        return self.frequencies

    @property
    def head(self) -> bytes:
        return bytes([self.coder | self.model << 2 | self.precision << 4]) + self.parameters


def raw_width(symbols: int) -> int:
    return max(1, (symbols - 1).bit_length())


@lru_cache(maxsize=1024)
def _gennorm_frequencies(fmt: Format, index: int, zero_mass: int, precision: int) -> np.ndarray:
    frequencies = histogram.normalize(gennorm.counts(fmt, index, zero_mass), precision)
    frequencies.setflags(write=False)
    return frequencies


def _has_gennorm(alphabet: Format | Alphabet) -> TypeGuard[Format]:
    return isinstance(alphabet, Format) and gennorm.has_table(alphabet) and bool(alphabet.sign)


def _symbol_bits(coder: int, frequencies: np.ndarray, precision: int) -> np.ndarray:
    """What each symbol costs under this coder."""
    if coder == HUFFMAN:
        lengths = huffman.code_lengths(frequencies)
        return np.where(lengths > 0, lengths, np.inf)
    return histogram.bits_per_symbol(frequencies, precision)


def choose(
    fmt: Format | Alphabet, counts: np.ndarray, total: int, coder: int, models: tuple[int, ...] = (HISTOGRAM,),
    beta_index: int = 0, zero_mass: int = 0,
) -> Coding:  # fmt: skip
    """The cheapest coding of `total` symbols whose counts (of all, or of a sample) these are."""
    sampled = int(counts.sum()) < total
    present = np.flatnonzero(counts)
    if len(present) == 1 and not sampled:
        return Coding(CONSTANT, parameters=bytes([present[0]]))
    width = raw_width(len(counts))
    best = Coding(RAW, expected_bits=float(total * width))
    if coder == RAW:
        return best
    if sampled:
        counts = 2 * counts + 1  # a symbol that the sample missed may still come
    share = counts * (total / counts.sum())
    used = counts > 0
    found = []
    for precision in _precisions(coder, len(counts), total):
        for model in models:
            if model == HISTOGRAM:
                frequencies = histogram.normalize(counts, precision)
                side = histogram.packed_length(frequencies, fmt.zero_symbol)
            elif _has_gennorm(fmt):
                frequencies = _gennorm_frequencies(fmt, beta_index, zero_mass, precision)
                side = 2
            else:
                continue
            bits = float(share[used] @ _symbol_bits(coder, frequencies, precision)[used]) + 8 * side
            found.append((bits, model, precision, frequencies))
    if not found:
        return best
    least = min(bits for bits, *_ in found)
    limit = least * TOLERANCE if total >= LARGE else least
    bits, model, precision, frequencies = next(candidate for candidate in found if candidate[0] <= limit)
    if bits + (SMALLEST_RANS if coder == RANS else 0) >= best.expected_bits:
        return best
    parameters = histogram.pack(frequencies, fmt.zero_symbol) if model == HISTOGRAM else bytes([beta_index, zero_mass])
    return Coding(coder, model, precision, parameters, frequencies, bits)


def finest_precision(symbols: int) -> int:
    """Bits of the frequencies of an alphabet of this size, where bytes matter more than speed."""
    return FINE if symbols <= SMALL_ALPHABET else FINEST


def _precisions(coder: int, symbols: int, total: int) -> tuple[int, ...]:
    """The fast one first; it loses bits on skewed symbols, and huffman gains nothing from it."""
    finest = finest_precision(symbols)
    if symbols > SMALL_ALPHABET or coder == HUFFMAN:
        return (finest,)
    # On small tensors the size of the table itself counts.
    return (COARSE, finest) if total >= LARGE else (COARSE, finest - 1, finest)


def encode(symbols: np.ndarray, fmt: Format | Alphabet, coding: Coding) -> bytes:
    """The bytes of all symbols, `coding.head` first."""
    if coding.coder == CONSTANT:
        body = b""
    elif coding.coder == RAW:
        body = kernels.pack_bits(symbols, raw_width(fmt.symbols))
    elif coding.coder == HUFFMAN:
        lengths = huffman.code_lengths(coding.table)
        body = kernels.huffman_encode(symbols, lengths, huffman.canonical_codes(lengths))
    else:
        body = rans.encode(symbols, coding.table, coding.precision, coding.expected_bits).tobytes()
    return coding.head + body


def read_head(reader: Reader, fmt: Format | Alphabet) -> Coding:
    """The coding at the front of coded symbols; `reader` then stands at the coder's data."""
    byte = reader.byte()
    coder, model, precision = byte & 3, byte >> 2 & 3, byte >> 4
    if coder in (RAW, CONSTANT):
        if model != NO_MODEL or precision:
            raise FrameError("invalid coding byte")
        return Coding(coder)
    if not COARSE <= precision <= FINEST or (1 << precision) < fmt.symbols:
        raise FrameError(f"invalid precision {precision}")
    if model == GENNORM and _has_gennorm(fmt):
        index, zero_mass = reader.byte(), reader.byte()
        if index >= gennorm.GRID:
            raise FrameError("invalid β index")
        frequencies = _gennorm_frequencies(fmt, index, zero_mass, precision)
    elif model == HISTOGRAM:
        table = reader.data[reader.position :]
        frequencies, used = histogram.unpack(table, fmt.symbols, precision, fmt.zero_symbol)
        reader.take(used)
    else:
        raise FrameError("invalid model for this format")
    if coder == HUFFMAN and np.count_nonzero(frequencies) < 2:
        raise FrameError("invalid huffman table")
    return Coding(coder, model, precision, frequencies=frequencies)


def read_constant(reader: Reader, fmt: Format | Alphabet) -> int:
    """The symbol that all entries have."""
    symbol = reader.byte()
    if symbol >= fmt.symbols or reader.rest():
        raise FrameError("invalid constant")
    return symbol


def decode(reader: Reader, fmt: Format | Alphabet, count: int, coding: Coding) -> np.ndarray:
    """The symbols behind a head that `read_head` has read."""
    if coding.coder == CONSTANT:
        return np.full(count, read_constant(reader, fmt), dtype=np.uint8)
    data = reader.rest()
    if coding.coder == RAW:
        return kernels.unpack_bits(data, count, raw_width(fmt.symbols), fmt.symbols)
    if coding.coder == HUFFMAN:
        lengths = huffman.code_lengths(coding.table)
        return kernels.huffman_decode(data, count, lengths, huffman.canonical_codes(lengths))
    return rans.decode(data, count, coding.table, coding.precision)
