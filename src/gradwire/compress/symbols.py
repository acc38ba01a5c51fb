"""Symbols to bytes and back, by the coding that `choose` has found."""

from __future__ import annotations

import numpy as np

from gradwire import models
from gradwire.compress import coders
from gradwire.compress.coding import Coding, EntropyCoder
from gradwire.compress.precision import COARSE, FINEST
from gradwire.errors import FrameError
from gradwire.frame.byte_fields import Reader
from gradwire.models.symbol_statistics import AnyAlphabet


def encode(symbols: np.ndarray, alphabet: AnyAlphabet, coding: Coding) -> bytes:
    """Return the bytes of all symbols, `coding.head` first."""
    return b"".join(encode_parts(symbols, alphabet, coding))


def encode_parts(symbols: np.ndarray, alphabet: AnyAlphabet, coding: Coding) -> tuple[bytes, bytes | memoryview]:
    """Return what `encode` does, head and data apart, for callers that have a place for the bytes."""
    return coding.head, coding.coder.encode(symbols, alphabet, coding)


def read_head(reader: Reader, alphabet: AnyAlphabet) -> Coding:
    """Read the coding at the front of coded symbols; the reader then stands at the data of the coder."""
    byte = reader.byte()
    coder, number, precision = coders.BY_NUMBER[byte & 3], byte >> 2 & 3, byte >> 4
    if not isinstance(coder, EntropyCoder):
        if number or precision:
            raise FrameError("invalid coding byte")
        return Coding(coder)
    if not COARSE <= precision <= FINEST or (1 << precision) < alphabet.symbols:
        raise FrameError(f"invalid precision {precision}")
    model = models.MODELS.get(number)
    if model is None or not model.supports(alphabet):
        raise FrameError("invalid model for this format")
    frequencies = model.read(reader, alphabet, precision)
    coder.check(frequencies)
    return Coding(coder, model, precision, frequencies=frequencies)


def decode(reader: Reader, alphabet: AnyAlphabet, count: int, coding: Coding) -> np.ndarray:
    """Return the symbols behind a head that `read_head` has read."""
    return coding.coder.decode(reader, alphabet, count, coding)
