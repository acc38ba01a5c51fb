"""Every symbol in the same number of bits."""

from __future__ import annotations

import numpy as np

from gradwire import kernels
from gradwire.compress.coding import Coder, Coding
from gradwire.frame.byte_fields import Reader
from gradwire.models.symbol_statistics import AnyAlphabet


def raw_width(symbols: int) -> int:
    """Return the bits that a symbol of an alphabet of this size needs."""
    return max(1, (symbols - 1).bit_length())


class RawCoder(Coder):
    """Packs symbols bit by bit."""

    name = "raw"
    wire_number = 0

    def encode(self, symbols: np.ndarray, alphabet: AnyAlphabet, coding: Coding) -> bytes:
        """Return the packed symbols."""
        return kernels.pack_bits(symbols, raw_width(alphabet.symbols))

    def decode(self, reader: Reader, alphabet: AnyAlphabet, count: int, coding: Coding) -> np.ndarray:
        """Unpack the symbols; FrameError if one of them is not in the alphabet."""
        return kernels.unpack_bits(reader.rest(), count, raw_width(alphabet.symbols), alphabet.symbols)
