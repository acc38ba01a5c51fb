"""The generalized normal distribution GenNorm(β, α): p(x) = β / (2αΓ(1/β)) · exp(−(|x|/α)^β).

β = 2 is the Normal, β = 1 the Laplace distribution; gradients have β between 0.15 and 2
(arXiv 2111.07599 and CO3, arXiv 2203.09044). This file has its moments, in fp64, and fits by moments.
"""

from __future__ import annotations

import math

import numpy as np
import torch

GRID = 128
BETAS = 0.1 * 40.0 ** (np.arange(GRID) / (GRID - 1))  # 0.1 … 4: the values of β that have a number on the wire


def mean_abs(beta: float) -> float:
    """Return E|x| at α = 1."""
    return math.exp(math.lgamma(2 / beta) - math.lgamma(1 / beta))


def mean_square(beta: float) -> float:
    """Return E x² at α = 1."""
    return math.exp(math.lgamma(3 / beta) - math.lgamma(1 / beta))


def moment_ratio(beta: float) -> float:
    """Return (E|x|)² / E x², which grows with β and does not depend on α."""
    return mean_abs(beta) ** 2 / mean_square(beta)


RATIOS = np.array([moment_ratio(b) for b in BETAS])
_INDEXES = np.arange(GRID, dtype=np.float64)


def fit(mean_abs_x: float, mean_square_x: float) -> tuple[float, float]:
    """Return (β, α) of the GenNorm with these moments, with β limited to the range of the grid."""
    ratio = mean_abs_x / mean_square_x * mean_abs_x  # in this order, tiny squares do not underflow
    beta = float(np.exp(np.interp(ratio, RATIOS, np.log(BETAS))))
    return beta, mean_abs_x / mean_abs(beta)


def nearest_index(mean_abs_x: float, mean_square_x: float) -> int:
    """Return the index into BETAS of the β that has these moments most nearly."""
    ratio = mean_abs_x / mean_square_x * mean_abs_x
    position = float(np.interp(ratio, RATIOS, _INDEXES))
    return round(position)


def partial_moments(beta: float, edges: np.ndarray, order: int) -> np.ndarray:
    """Return ∫ |x|^order p(x) dx over each cell between ascending edges ≥ 0, both signs together, at α = 1."""
    shape = (order + 1) / beta
    scale = math.exp(math.lgamma(shape) - math.lgamma(1 / beta))
    x = torch.from_numpy(np.asarray(edges, dtype=np.float64)).pow(beta)
    below = torch.special.gammainc(torch.full_like(x, shape), x).numpy() * scale
    return np.diff(below)
