"""Many streams of symbols coded at once, each with frequencies of its own (docs/wire-format.md, codec 8).

There is no reference here: None says that this machine has no such kernel, and the caller then codes one stream after
the other, by `compress`, which is the definition.
"""

from __future__ import annotations

import numpy as np

__all__ = ["class_bits", "code_classes", "code_symbols", "read_classes", "read_symbols"]


def class_bits(counts: np.ndarray) -> float | None:
    """Return about the bits of the classes of a grid, of which each has a row of counts, one for each symbol."""
    return None


def code_classes(streams: np.ndarray, counts: np.ndarray) -> bytes | None:
    """Return the classes as they stand in a frame. `streams` has class after class, and may be changed."""
    return None


def code_symbols(symbols: np.ndarray, alphabet: int, zero_symbol: int) -> bytes | None:
    """Return symbols with the cheapest coding by a histogram, as `compress.encode` does."""
    return None


def read_classes(
    data: memoryview, counts: np.ndarray, largest: int, streams: np.ndarray, zeros: np.ndarray
) -> int | None:
    """Decode classes of so many entries at the front of `data` to `streams`; return how many bytes they took.

    What is added to the symbols of a class to make them those of the grid goes to `zeros`. None also if they are
    damaged, or coded in a way that the kernel does not know: the caller, class after class, finds out what is wrong.
    """
    return None


def read_symbols(data: memoryview, alphabet: int, zero_symbol: int, symbols: np.ndarray) -> bool | None:
    """Decode what `code_symbols` has made, all of `data`; None as in `read_classes`."""
    return None
