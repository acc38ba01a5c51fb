"""The shipped tables of GenNorm: for each preset format and each β of the grid, the best step and integer masses.

scripts/make_gennorm_tables.py computed them. They are shipped because a decoder that recomputes an incomplete gamma
function with another libm gets another table, and garbage. At the best step the masses depend on β alone, so one
index into the grid of β fixes both the step (in units of E|x|) and the table.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import resources

import numpy as np

from gradwire.models.gennorm_cells import MASS_BITS, best_step
from gradwire.models.gennorm_moments import BETAS, mean_abs
from gradwire.small_float_formats import PRESETS, Format

ZERO_STEPS = 256  # the zero mass travels as one byte, z/256


@lru_cache
def _shipped() -> dict[str, np.ndarray]:
    with resources.files(__package__).joinpath("gennorm_tables.npz").open("rb") as file, np.load(file) as tables:
        return {name: tables[name] for name in tables.files}


def has_table(fmt: Format) -> bool:
    """Tell whether tables of this format are shipped, which is so for every preset."""
    return fmt in PRESETS.values()


@lru_cache(maxsize=1024)
def step_over_mean(fmt: Format, index: int) -> float:
    """Return the best step, in units of E|x|, for the β of this index; formats without a table take longer."""
    beta = float(BETAS[index])
    if has_table(fmt):
        return float(_shipped()[f"{fmt}_step"][index])
    return best_step(fmt, beta) / mean_abs(beta)


def masses(fmt: Format) -> np.ndarray:
    """Return the shipped masses of a preset: for each β of the grid those of zero and of the magnitudes above it."""
    return _shipped()[f"{fmt}_masses"]


@lru_cache(maxsize=1024)
def counts(fmt: Format, index: int, zero_mass: int) -> np.ndarray:
    """Return integer counts of all symbols for the β of this index and a share of exact zeros of `zero_mass`/256."""
    w = _shipped()[f"{fmt}_masses"][index].astype(np.int64) * (ZERO_STEPS - zero_mass)
    both = np.concatenate([w[:0:-1], w])
    both[fmt.zero_symbol] += zero_mass << MASS_BITS
    both.setflags(write=False)
    return both
