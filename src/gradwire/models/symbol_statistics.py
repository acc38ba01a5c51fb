"""What an encoder knows of the symbols that it is about to code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gradwire.small_float_formats import Format


@dataclass(frozen=True)
class Alphabet:
    """The symbols 0 … symbols−1 of a converter that has no float format."""

    symbols: int
    zero_symbol: int  # its frequency is not sent: it follows from the others


AnyAlphabet = Format | Alphabet  # a float format is an alphabet too: it has the same two fields


class GenNormFit(NamedTuple):
    """The generalized normal distribution that fits the values before they became symbols."""

    beta_index: int  # into the grid of β
    zero_mass: int  # the share of exact zeros, in units of 1/256


class SymbolStatistics(NamedTuple):
    """Everything that a probability model may look at; each model takes what it needs.

    If a model needs to know more about the values, add a field with the default None, and fill it in the converters
    that know it.
    """

    alphabet: AnyAlphabet
    counts: np.ndarray  # how often each symbol occurs among all symbols, or in a sample of them
    total: int  # how many symbols are to be coded
    gennorm: GenNormFit | None = None

    @property
    def sampled(self) -> bool:
        """Whether the counts are of a sample, so that a symbol with the count 0 may still occur."""
        return int(self.counts.sum()) < self.total

    def smoothed(self) -> SymbolStatistics:
        """Return statistics in which no symbol has the count 0 (each count c becomes c + ½, in integers)."""
        return self._replace(counts=2 * self.counts + 1)
