"""The generalized normal distribution GenNorm(β, α): p(x) = β / (2αΓ(1/β)) · exp(−(|x|/α)^β).

β = 2 is the Normal, β = 1 the Laplace distribution; gradients have β between 0.15 and 2
(arXiv 2111.07599 and CO3, arXiv 2203.09044).

Two halves. The first is mathematics in fp64: moments, fits, the cells of a format and the step that
minimises the squared error. The second is what coders use: **integer tables** made from the first by
scripts/make_gennorm_tables.py and shipped, because a decoder that recomputes an incomplete gamma function
with another libm gets another table, and garbage. At the best step the cells depend on β alone, so one
index into the grid of β fixes both the step (in units of E|x|) and the table.
"""

from __future__ import annotations

import math
from functools import lru_cache
from importlib import resources

import numpy as np
import torch

from gradwire.float_formats import PRESETS, Format

GRID = 128
BETAS = 0.1 * 40.0 ** (np.arange(GRID) / (GRID - 1))  # 0.1 … 4
MASS_BITS = 16  # shipped masses add up to 2^16
ZERO_STEPS = 256  # the zero mass travels as one byte, z/256


def mean_abs(beta: float) -> float:
    """E|x| at α = 1."""
    return math.exp(math.lgamma(2 / beta) - math.lgamma(1 / beta))


def mean_square(beta: float) -> float:
    """E x² at α = 1."""
    return math.exp(math.lgamma(3 / beta) - math.lgamma(1 / beta))


def moment_ratio(beta: float) -> float:
    """(E|x|)² / E x², which grows with β and does not depend on α."""
    return mean_abs(beta) ** 2 / mean_square(beta)


_RATIOS = np.array([moment_ratio(b) for b in BETAS])


def fit(mean_abs_x: float, mean_square_x: float) -> tuple[float, float]:
    """(β, α) of the GenNorm with these moments, β limited to the grid's range."""
    ratio = mean_abs_x / mean_square_x * mean_abs_x  # in this order, tiny squares do not underflow
    beta = float(np.exp(np.interp(ratio, _RATIOS, np.log(BETAS))))
    return beta, mean_abs_x / mean_abs(beta)


def nearest_index(mean_abs_x: float, mean_square_x: float) -> int:
    """The grid's β with these moments."""
    ratio = mean_abs_x / mean_square_x * mean_abs_x
    position = float(np.interp(ratio, _RATIOS, np.arange(GRID)))
    return round(position)


def partial_moments(beta: float, edges: np.ndarray, order: int) -> np.ndarray:
    """∫ |x|^order p(x) dx over each cell between ascending edges ≥ 0, both signs together, at α = 1."""
    shape = (order + 1) / beta
    scale = math.exp(math.lgamma(shape) - math.lgamma(1 / beta))
    x = torch.from_numpy(np.asarray(edges, dtype=np.float64)).pow(beta)
    below = torch.special.gammainc(torch.full_like(x, shape), x).numpy() * scale
    return np.diff(below)


def cell_edges(fmt: Format) -> np.ndarray:
    """Edges of the cells of the magnitudes at step 1: 0, the midpoints, infinity."""
    m = fmt.magnitudes
    return np.concatenate([[0.0], (m[1:] + m[:-1]) / 2, [np.inf]])


def cell_masses(fmt: Format, beta: float, step: float) -> np.ndarray:
    """Probability of each magnitude (both signs together) at α = 1."""
    return partial_moments(beta, cell_edges(fmt) * step, 0)


def nmse(fmt: Format, beta: float, step: float) -> float:
    """Expected squared error of the format over E x², at α = 1."""
    edges, values = cell_edges(fmt) * step, fmt.magnitudes * step
    p, first = partial_moments(beta, edges, 0), partial_moments(beta, edges, 1)
    return float(1 + (values**2 @ p - 2 * values @ first) / mean_square(beta))


@lru_cache(maxsize=4096)
def best_step(fmt: Format, beta: float) -> float:
    """The step (1/s of the paper) with the least squared error, at α = 1: scan, then golden section."""
    rms = math.sqrt(mean_square(beta))
    scan = np.log(rms / fmt.largest) + np.linspace(-3, 9, 121)
    errors = np.array([nmse(fmt, beta, math.exp(x)) for x in scan])
    plateau = np.flatnonzero(errors <= np.min(errors) * 1.001)
    if len(plateau) > 3:  # an 8-bit format is as good at any step that neither under- nor overflows:
        return math.exp(scan[plateau].mean())  # keep away from both
    best = int(np.argmin(errors))
    low, high = scan[max(best - 1, 0)], scan[min(best + 1, len(scan) - 1)]
    golden = (math.sqrt(5) - 1) / 2
    while high - low > 1e-7:
        a, b = high - golden * (high - low), low + golden * (high - low)
        if nmse(fmt, beta, math.exp(a)) < nmse(fmt, beta, math.exp(b)):
            high = b
        else:
            low = a
    return math.exp((low + high) / 2)


def integer_masses(fmt: Format, beta: float, step: float) -> np.ndarray:
    """The cells as integers ≥ 1 with w₀ + 2·Σw = 2^16: what the tables hold."""
    total = 1 << MASS_BITS
    room = total - fmt.symbols  # so that the middle keeps at least 1 however the sides round
    side = np.maximum(1, np.rint(cell_masses(fmt, beta, step)[1:] / 2 * room)).astype(np.int64)
    middle = total - 2 * side.sum()
    return np.concatenate([[middle], side]).astype(np.uint16)


@lru_cache
def _shipped() -> dict[str, np.ndarray]:
    with resources.files(__package__).joinpath("gennorm_tables.npz").open("rb") as file, np.load(file) as tables:
        return {name: tables[name] for name in tables.files}


def has_table(fmt: Format) -> bool:
    return fmt in PRESETS.values()


def step_over_mean(fmt: Format, index: int) -> float:
    """The best step in units of E|x| for the grid's β."""
    beta = float(BETAS[index])
    if has_table(fmt):
        return float(_shipped()[f"{fmt}_step"][index])
    return best_step(fmt, beta) / mean_abs(beta)


@lru_cache(maxsize=1024)
def counts(fmt: Format, index: int, zero_mass: int) -> np.ndarray:
    """Integer counts of all symbols for β of this index and a zero mass of `zero_mass`/256."""
    w = _shipped()[f"{fmt}_masses"][index].astype(np.int64) * (ZERO_STEPS - zero_mass)
    both = np.concatenate([w[:0:-1], w])
    both[fmt.zero_symbol] += zero_mass << MASS_BITS
    both.setflags(write=False)
    return both
