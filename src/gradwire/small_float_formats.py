"""Small float formats: [sign, exponent, mantissa, bias], one class for all of them.

A format is the list of its magnitudes; everything else (symbols, thresholds, names) follows from it.
CO3 (arXiv 2203.09044) leaves the all-ones exponent unused, OCP's e2m1 uses every code, and OCP's e4m3
gives up only its topmost code, to NaN: that is the `special` field.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from gradwire.errors import SpecError, unknown_name

# Which of the highest codes stand for no number: none, all that have the top exponent, or the topmost code alone. The
# order is that of the numbers on the wire.
SPECIALS = ("none", "exponent", "code")


@dataclass(frozen=True)
class Format:
    """A float format of at most 8 bits. Symbols are numbered by value, lowest first."""

    sign: int
    exponent: int
    mantissa: int
    bias: int
    special: str = "exponent"

    def __post_init__(self) -> None:
        used = 2**self.exponent - (self.special == "exponent")
        ok = (
            self.sign in (0, 1)
            and 1 <= self.exponent <= 6
            and 0 <= self.mantissa <= 6
            and self.sign + self.exponent + self.mantissa <= 8
            and self.special in SPECIALS
            and -32 <= self.bias <= 64  # lower, and the largest magnitudes come too close to the end of fp32
            and 2 <= used * 2**self.mantissa - (self.special == "code") <= 255
        )
        if not ok:
            raise SpecError(
                f"no such float format: {self}; needs sign 0 or 1, exponent 1…6 bits, mantissa 0…6 bits, "
                f"8 bits and 255 values at most, bias −32…64 (for larger formats use the codecs fp16 and bf16)"
            )

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal number; below it the spacing stays the same (subnormals)."""
        return 1 - self.bias

    @cached_property
    def magnitudes(self) -> np.ndarray:
        """The P magnitudes in the order of their codes, 0 first (fp64, exact)."""
        fractions = 2**self.mantissa
        exponents = 2**self.exponent - (self.special == "exponent")
        codes = np.arange(exponents * fractions - (self.special == "code"))
        e, m = codes // fractions, codes % fractions
        normal = (1 + m / fractions) * 2.0 ** (e - self.bias)
        subnormal = m / fractions * 2.0**self.min_exponent
        magnitudes: np.ndarray = np.where(e > 0, normal, subnormal)
        return magnitudes

    @property
    def largest(self) -> float:
        """The largest magnitude."""
        return float(self.magnitudes[-1])

    @property
    def zero_symbol(self) -> int:
        """The symbol of the value 0: the middle of a signed format."""
        return len(self.magnitudes) - 1 if self.sign else 0

    @property
    def symbols(self) -> int:
        """K: how many symbols there are; +0 and −0 are one."""
        return self.zero_symbol + len(self.magnitudes)

    @cached_property
    def levels(self) -> np.ndarray:
        """The value of every symbol at step 1, ascending (fp64)."""
        negative = -self.magnitudes[:0:-1] if self.sign else self.magnitudes[:0]
        return np.concatenate([negative, self.magnitudes])

    def __str__(self) -> str:
        for name, preset in PRESETS.items():
            if preset == self:
                return name
        unsigned, suffix = ("" if self.sign else "u"), {"exponent": "", "none": "f", "code": "n"}[self.special]
        return f"{unsigned}e{self.exponent}m{self.mantissa}b{self.bias}{suffix}"


# The order is the number on the wire; e5m2 has the values of fp8 under OCP's name.
# A format that is added here also needs tables of the GenNorm model: scripts/make_gennorm_tables.py makes them again.
# Without them `models/gennorm_tables.py`, which expects a table of every preset, fails with a KeyError.
PRESETS: dict[str, Format] = {}
PRESETS |= {
    "fp4": Format(1, 2, 1, 1),
    "fp8": Format(1, 5, 2, 15),
    "e2m1": Format(1, 2, 1, 1, "none"),
    "e4m3": Format(1, 4, 3, 7, "code"),
    "e5m2": Format(1, 5, 2, 15),
    "e4m3b10": Format(1, 4, 3, 10),
}
_CUSTOM = re.compile(r"(u?)e(\d)m(\d)b(-?\d{1,2})([fn]?)")


@lru_cache
def parse_format(text: str) -> Format:
    """Return the format of a name: a preset such as `fp4`, or any other as `[u]e<exponent>m<mantissa>b<bias>[f|n]`.

    `u` means that there is no sign bit, `f` that every code is finite, and `n` that the top code is NaN. With neither
    `f` nor `n` the top exponent is unused.
    """
    if text in PRESETS:
        return PRESETS[text]
    match = _CUSTOM.fullmatch(text)
    if not match:
        raise unknown_name("format", text, [*PRESETS, "[u]e<exponent>m<mantissa>b<bias>[f|n]"])
    unsigned, exponent, mantissa, bias, suffix = match.groups()
    special = {"": "exponent", "f": "none", "n": "code"}[suffix]
    return Format(0 if unsigned else 1, int(exponent), int(mantissa), int(bias), special)
