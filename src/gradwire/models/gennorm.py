"""The GenNorm model: two bytes say which generalized normal distribution the values have, and how many are zero."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from gradwire.errors import FrameError
from gradwire.frame.byte_fields import Reader
from gradwire.models.gennorm_moments import GRID
from gradwire.models.gennorm_tables import counts, has_table
from gradwire.models.integer_frequencies import normalize
from gradwire.models.probability_model import ProbabilityModel
from gradwire.models.symbol_statistics import AnyAlphabet, SymbolStatistics
from gradwire.small_float_formats import Format


class GenNorm(ProbabilityModel):
    """Models the symbols of a signed preset format, at the step that is best for β, by the shipped tables."""

    name = "gennorm"
    wire_number = 1

    def supports(self, alphabet: AnyAlphabet) -> bool:
        """Tell whether the alphabet is a signed float format with a shipped table."""
        return isinstance(alphabet, Format) and has_table(alphabet) and bool(alphabet.sign)

    def fit(self, statistics: SymbolStatistics, precision: int) -> np.ndarray | None:
        """Return the shipped masses for the fitted distribution, or None if the values were not fitted."""
        fitted = statistics.gennorm
        if fitted is None:
            return None
        assert isinstance(statistics.alphabet, Format)
        return _frequencies(statistics.alphabet, fitted.beta_index, fitted.zero_mass, precision)

    def packed_length(self, frequencies: np.ndarray, statistics: SymbolStatistics) -> int:
        """Return 2: the index of β and the zero mass are a byte each."""
        return 2

    def pack(self, frequencies: np.ndarray, statistics: SymbolStatistics) -> bytes:
        """Return the index of β and the zero mass."""
        fitted = statistics.gennorm
        assert fitted is not None, "`fit` has given frequencies"
        return bytes([fitted.beta_index, fitted.zero_mass])

    def read(self, reader: Reader, alphabet: AnyAlphabet, precision: int) -> np.ndarray:
        """Take the index of β and the zero mass off the reader, and look up the masses."""
        index, zero_mass = reader.byte(), reader.byte()
        if index >= GRID:
            raise FrameError("invalid β index")
        assert isinstance(alphabet, Format)
        return _frequencies(alphabet, index, zero_mass, precision)


@lru_cache(maxsize=1024)
def _frequencies(fmt: Format, index: int, zero_mass: int, precision: int) -> np.ndarray:
    frequencies = normalize(counts(fmt, index, zero_mass), precision)
    frequencies.setflags(write=False)
    return frequencies
