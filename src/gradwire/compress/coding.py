"""`Coder`, which turns symbols into bytes, and `Coding`, which says how: the coder, the model and its frequencies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from gradwire.frame.byte_fields import Reader
from gradwire.models.probability_model import ProbabilityModel
from gradwire.models.symbol_statistics import AnyAlphabet


class Coder(ABC):
    """Turns symbols into bytes and back. A coder has no state and may be used by any thread."""

    name: str
    wire_number: int  # two bits of the coding byte (docs/wire-format.md)
    fixed_bits = 0  # the least number of bits that the coder writes beside the codes of symbols

    @abstractmethod
    def encode(self, symbols: np.ndarray, alphabet: AnyAlphabet, coding: Coding) -> bytes | memoryview:
        """Return the bytes of the symbols, without the head of the coding."""

    @abstractmethod
    def decode(self, reader: Reader, alphabet: AnyAlphabet, count: int, coding: Coding) -> np.ndarray:
        """Take all that the reader has left and return `count` symbols, or raise FrameError if it is damaged."""


class EntropyCoder(Coder):
    """A coder that gives frequent symbols fewer bits, and so needs frequencies from a probability model."""

    @abstractmethod
    def precisions(self, symbols: int, total: int) -> tuple[int, ...]:
        """Return the precisions to try for `total` symbols of an alphabet of this size, the fastest first."""

    @abstractmethod
    def symbol_bits(self, frequencies: np.ndarray, precision: int) -> np.ndarray:
        """Return how many bits each symbol takes; it is infinite for symbols that have no code."""

    def check(self, frequencies: np.ndarray) -> None:
        """Raise FrameError if no encoder can have used these frequencies, which a frame states."""


@dataclass(frozen=True)
class Coding:
    """How symbols are coded, as their first bytes say it. `choose` makes a coding, `read_head` reads one."""

    coder: Coder
    model: ProbabilityModel | None = None
    precision: int = 0
    parameters: bytes = b""  # of the model, or the symbol of a constant; empty in a coding that was read
    frequencies: np.ndarray | None = None
    expected_bits: float = 0.0

    @property
    def table(self) -> np.ndarray:
        """The frequencies of an entropy coder."""
        assert self.frequencies is not None, "raw and constant codings have no table"
        return self.frequencies

    @property
    def head(self) -> bytes:
        """The coding byte and the parameters."""
        model = self.model.wire_number if self.model else 0
        return bytes([self.coder.wire_number | model << 2 | self.precision << 4]) + self.parameters
