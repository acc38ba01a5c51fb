"""One byte for a tensor in which all symbols are the same."""

from __future__ import annotations

import numpy as np

from gradwire.compress.coding import Coder, Coding
from gradwire.errors import FrameError
from gradwire.frame.byte_fields import Reader
from gradwire.models.symbol_statistics import AnyAlphabet


def read_constant(reader: Reader, alphabet: AnyAlphabet) -> int:
    """Read the symbol that all entries have; FrameError if it is not in the alphabet, or if anything follows it."""
    symbol = reader.byte()
    if symbol >= alphabet.symbols or reader.rest():
        raise FrameError("invalid constant")
    return symbol


class ConstantCoder(Coder):
    """Writes nothing: the symbol is the parameter of the coding."""

    name = "constant"
    wire_number = 1

    def encode(self, symbols: np.ndarray, alphabet: AnyAlphabet, coding: Coding) -> bytes:
        """Return no bytes."""
        return b""

    def decode(self, reader: Reader, alphabet: AnyAlphabet, count: int, coding: Coding) -> np.ndarray:
        """Return `count` times the symbol that the reader holds."""
        return np.full(count, read_constant(reader, alphabet), dtype=np.uint8)
