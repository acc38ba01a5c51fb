"""What a probability model is: a rule that turns a few bytes into integer frequencies of all symbols."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from gradwire.frame.byte_fields import Reader
from gradwire.models.symbol_statistics import AnyAlphabet, SymbolStatistics


class ProbabilityModel(ABC):
    """One way to say how likely each symbol is. Any coder takes any model.

    The encoder calls `fit` at each precision that it considers, and compares what the symbols would cost with these
    frequencies; `pack` then writes the parameters of the model that won. The decoder calls `read`, which must return
    exactly the frequencies that `fit` returned: integers only, since floating point differs between machines.

    A model has no state and may be used by any thread. To add one, write a file in this folder and add its object to
    the list in `models/__init__.py`.
    """

    name: str  # what users write in specs
    wire_number: int  # two bits of the coding byte (docs/wire-format.md); 0 means that there is no model

    @abstractmethod
    def supports(self, alphabet: AnyAlphabet) -> bool:
        """Tell whether this model can be used for symbols of this alphabet; if not, a frame that uses it is invalid."""

    @abstractmethod
    def fit(self, statistics: SymbolStatistics, precision: int) -> np.ndarray | None:
        """Return one frequency for each symbol; they add up to 2^precision.

        Symbols that occur have a frequency of at least 1. The result is None if the statistics lack what this model
        needs. The alphabet is one that the model supports.
        """

    @abstractmethod
    def packed_length(self, frequencies: np.ndarray, statistics: SymbolStatistics) -> int:
        """Return the length of what `pack` will return in bytes, without packing it, which would take longer."""

    @abstractmethod
    def pack(self, frequencies: np.ndarray, statistics: SymbolStatistics) -> bytes:
        """Return the parameters from which `read` makes the same frequencies, which `fit` has returned before."""

    @abstractmethod
    def read(self, reader: Reader, alphabet: AnyAlphabet, precision: int) -> np.ndarray:
        """Take the parameters off the reader and return the frequencies, or raise FrameError if they are invalid.

        Callers must not write to the result, which other calls may return too.
        """
