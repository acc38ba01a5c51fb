"""Symbols to bytes and back: any probability model with any coder.

Models give integer frequencies, coders spend the bits. `choose` takes the cheapest of both for given counts; `encode`,
`read_head` and `decode` do the rest. Positions of selected entries have a code of their own (positions.py).
"""

from gradwire.compress.choice import choose
from gradwire.compress.coders import CODERS, CONSTANT, HUFFMAN, RANS, RAW
from gradwire.compress.coding import Coder, Coding
from gradwire.compress.constant import read_constant
from gradwire.compress.precision import COARSE, LARGE, SMALL_ALPHABET, TOLERANCE, finest_precision
from gradwire.compress.raw import raw_width
from gradwire.compress.symbols import decode, encode, encode_parts, read_head
from gradwire.models.symbol_statistics import Alphabet, AnyAlphabet, SymbolStatistics

__all__ = [
    "COARSE",
    "CODERS",
    "CONSTANT",
    "HUFFMAN",
    "LARGE",
    "RANS",
    "RAW",
    "SMALL_ALPHABET",
    "TOLERANCE",
    "Alphabet",
    "AnyAlphabet",
    "Coder",
    "Coding",
    "SymbolStatistics",
    "choose",
    "decode",
    "encode",
    "encode_parts",
    "finest_precision",
    "raw_width",
    "read_constant",
    "read_head",
]
