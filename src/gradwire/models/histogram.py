"""The histogram model: the frequencies themselves travel, as Elias-gamma codes."""

from __future__ import annotations

import numpy as np

from gradwire.errors import FrameError
from gradwire.frame.byte_fields import Reader
from gradwire.models.integer_frequencies import LARGEST, normalize
from gradwire.models.probability_model import ProbabilityModel
from gradwire.models.symbol_statistics import AnyAlphabet, SymbolStatistics

_GAMMA_BITS = np.array([2 * (f + 1).bit_length() - 1 for f in range(LARGEST + 1)])


class Histogram(ProbabilityModel):
    """Models any alphabet by the counts of its symbols; the parameters are the table of frequencies."""

    name = "histogram"
    wire_number = 2

    def supports(self, alphabet: AnyAlphabet) -> bool:
        """Tell that every alphabet can be modelled."""
        return True

    def fit(self, statistics: SymbolStatistics, precision: int) -> np.ndarray:
        """Return the counts, scaled to 2^precision."""
        return normalize(statistics.counts, precision)

    def packed_length(self, frequencies: np.ndarray, statistics: SymbolStatistics) -> int:
        """Return the length of the packed table in bytes."""
        return packed_length(frequencies, statistics.alphabet.zero_symbol)

    def pack(self, frequencies: np.ndarray, statistics: SymbolStatistics) -> bytes:
        """Return the packed table, without the symbol of zero, which is the most frequent as a rule."""
        return pack(frequencies, statistics.alphabet.zero_symbol)

    def read(self, reader: Reader, alphabet: AnyAlphabet, precision: int) -> np.ndarray:
        """Take a packed table off the reader."""
        table = reader.data[reader.position :]
        frequencies, used = unpack(table, alphabet.symbols, precision, alphabet.zero_symbol)
        reader.take(used)
        return frequencies


def packed_length(frequencies: np.ndarray, implied: int) -> int:
    """Return the number of bytes that `pack` will give."""
    bits = _GAMMA_BITS[frequencies]
    return (int(bits.sum() - bits[implied]) + 7) // 8


def pack(frequencies: np.ndarray, implied: int) -> bytes:
    """Return Elias-gamma codes of f+1 of all symbols but `implied`, whose frequency follows from the sum."""
    sent = frequencies.tolist()
    del sent[implied]
    codes = [f"{f + 1:0{2 * (f + 1).bit_length() - 1}b}" for f in sent]
    bits = np.frombuffer("".join(codes).encode(), dtype=np.uint8) & 1  # "0" and "1" differ in that bit
    return np.packbits(bits, bitorder="little").tobytes()


def unpack(data: memoryview, symbols: int, precision: int, implied: int) -> tuple[np.ndarray, int]:
    """Return the frequencies at the front of `data`, and how many bytes they took; FrameError if they are damaged."""
    # No table is longer: each code has at most 2·precision + 1 bits.
    limit = ((symbols - 1) * (2 * precision + 1) + 7) // 8
    table = data[:limit]
    # Python finds and reads digits in a string faster than in a list. The first bit of a byte is its lowest.
    bits = f"{int.from_bytes(table, 'little'):0{8 * len(table)}b}"[::-1]
    frequencies, position, most = [], 0, len(bits)
    for _ in range(symbols - 1):
        one = bits.find("1", position, position + precision + 1)
        end = 2 * one - position + 1
        if one < 0 or end > most:
            raise FrameError("damaged frequency table")
        frequencies.append(int(bits[one:end], 2) - 1)
        position = end
    rest = (1 << precision) - sum(frequencies)
    if rest < 0 or "1" in bits[position : -(-position // 8) * 8]:
        raise FrameError("damaged frequency table")
    frequencies.insert(implied, rest)
    return np.array(frequencies, dtype=np.int64), -(-position // 8)
