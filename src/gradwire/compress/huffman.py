"""Canonical, length-limited Huffman codes: the coder of the CO3 paper."""

from __future__ import annotations

import numpy as np

from gradwire import kernels
from gradwire.compress.coding import Coding, EntropyCoder
from gradwire.compress.precision import finest_precision
from gradwire.errors import FrameError
from gradwire.frame.byte_fields import Reader
from gradwire.models.symbol_statistics import AnyAlphabet

LIMIT = kernels.HUFFMAN_LIMIT  # bits


def code_lengths(frequencies: np.ndarray) -> np.ndarray:
    """Return the bits of each symbol's code, 0 where it has none; at least two symbols must have a frequency."""
    return kernels.huffman_lengths(frequencies)


def canonical_codes(lengths: np.ndarray) -> np.ndarray:
    """Return the codes of all symbols; they are numbered by (length, symbol), so that the lengths alone define them."""
    codes = np.zeros(len(lengths), dtype=np.uint16)
    code = previous = 0
    for symbol in np.lexsort((np.arange(len(lengths)), lengths)):
        length = int(lengths[symbol])
        if length:
            code <<= length - previous
            codes[symbol], previous = code, length
            code += 1
    return codes


class HuffmanCoder(EntropyCoder):
    """Gives each symbol a code of whole bits."""

    name = "huffman"
    wire_number = 2

    def precisions(self, symbols: int, total: int) -> tuple[int, ...]:
        """Return the finest precision alone: coarse tables make Huffman codes no faster."""
        return (finest_precision(symbols),)

    def symbol_bits(self, frequencies: np.ndarray, precision: int) -> np.ndarray:
        """Return the length of each code."""
        lengths = code_lengths(frequencies)
        return np.where(lengths > 0, lengths, np.inf)

    def check(self, frequencies: np.ndarray) -> None:
        """Raise FrameError if fewer than two symbols can occur."""
        if np.count_nonzero(frequencies) < 2:
            raise FrameError("invalid huffman table")

    def encode(self, symbols: np.ndarray, alphabet: AnyAlphabet, coding: Coding) -> memoryview:
        """Return the codes of all symbols, one after the other."""
        lengths = code_lengths(coding.table)
        return kernels.huffman_encode(symbols, lengths, canonical_codes(lengths))

    def decode(self, reader: Reader, alphabet: AnyAlphabet, count: int, coding: Coding) -> np.ndarray:
        """Return the symbols whose codes these are."""
        lengths = code_lengths(coding.table)
        return kernels.huffman_decode(reader.rest(), count, lengths, canonical_codes(lengths))
