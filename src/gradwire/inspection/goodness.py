"""How well the Normal, Laplace and GenNorm distributions describe a sample (arXiv 2111.07599).

All three are GenNorm(β, α) (models/gennorm_moments.py), with β = 2, β = 1 and the β of the sample. The sample is
standardised to mean 0 and deviation 1, each model is fitted to it by moments, and two distances are taken:

- Wasserstein-2, between the sorted sample and the model's quantiles at (i − ½)/n: √mean (z₍ᵢ₎ − Q((i−½)/n))²;
  heavy tails that a model misses show here;
- Kolmogorov–Smirnov, the largest gap between the two distribution functions: it sees the body, not the tail.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from gradwire.models import gennorm_moments

SAMPLE = 100_000
SEED = 0


@dataclass(frozen=True)
class CentredGenNorm:
    """A GenNorm distribution around 0."""

    beta: float
    alpha: float

    def cdf(self, x: np.ndarray) -> np.ndarray:
        """Return the distribution function at each x."""
        below: np.ndarray = 0.5 + 0.5 * np.sign(x) * _gamma_cdf(1 / self.beta, self._power(x))
        return below

    def survival(self, magnitude: np.ndarray) -> np.ndarray:
        """P(|X| > magnitude), exact far out in the tail."""
        y = torch.from_numpy(self._power(magnitude))
        above: np.ndarray = torch.special.gammaincc(torch.full_like(y, 1 / self.beta), y).numpy()
        return above

    def density(self, x: np.ndarray) -> np.ndarray:
        """Return the density at each x."""
        height = self.beta / (2 * self.alpha) * math.exp(-math.lgamma(1 / self.beta))
        density: np.ndarray = height * np.exp(-self._power(x))
        return density

    def quantile(self, probability: np.ndarray) -> np.ndarray:
        """The inverse of `cdf`, for probabilities inside (0, 1)."""
        centred = 2 * np.asarray(probability, dtype=np.float64) - 1
        magnitude = np.zeros_like(centred)
        away = centred != 0
        magnitude[away] = _gamma_quantile(1 / self.beta, np.abs(centred[away])) ** (1 / self.beta)
        return np.sign(centred) * magnitude * self.alpha

    def _power(self, x: np.ndarray) -> np.ndarray:
        """(|x|/α)^β, which has a Gamma(1/β) distribution."""
        return (np.abs(np.asarray(x, dtype=np.float64)) / self.alpha) ** self.beta


def fit(mean_abs: float, mean_square: float) -> dict[str, CentredGenNorm]:
    """The three models with these moments: Normal by E x², Laplace by E|x|, GenNorm by both."""
    return {
        "normal": CentredGenNorm(2.0, math.sqrt(mean_square / gennorm_moments.mean_square(2))),
        "laplace": CentredGenNorm(1.0, mean_abs / gennorm_moments.mean_abs(1)),
        "gennorm": CentredGenNorm(*gennorm_moments.fit(mean_abs, mean_square)),
    }


def moments(x: np.ndarray) -> tuple[float, float]:
    """(E|x|, E x²) in fp64."""
    x = np.asarray(x, dtype=np.float64)
    return float(np.abs(x).mean()), float(np.square(x).mean())


def even_sample(x: np.ndarray, limit: int = SAMPLE) -> np.ndarray:
    """At most `limit` entries: one at a random place in each of `limit` equal strata, the same every time."""
    if len(x) <= limit:
        return x
    edges = np.linspace(0, len(x), limit + 1)
    place = np.random.default_rng(SEED).random(limit)
    return x[(edges[:-1] + place * np.diff(edges)).astype(np.int64)]


def standardise(x: np.ndarray) -> np.ndarray | None:
    """Mean 0, deviation 1, sorted; None where all entries are equal."""
    x = np.sort(np.asarray(x, dtype=np.float64))
    if len(x) < 2 or x[0] == x[-1]:
        return None
    x = x / max(abs(x[0]), abs(x[-1]))  # so that no square under- or overflows
    standard: np.ndarray = (x - x.mean()) / x.std()
    return standard


def wasserstein2(ordered: np.ndarray, model: CentredGenNorm) -> float:
    """Return the Wasserstein-2 distance between a sorted sample and the model."""
    n = len(ordered)
    quantiles = model.quantile((np.arange(n) + 0.5) / n)
    return float(np.sqrt(np.mean((ordered - quantiles) ** 2)))


def kolmogorov_smirnov(ordered: np.ndarray, model: CentredGenNorm) -> float:
    """Return the largest gap between the distribution functions of a sorted sample and the model."""
    n, below = len(ordered), model.cdf(ordered)
    steps = np.arange(n + 1) / n
    return float(max((steps[1:] - below).max(), (below - steps[:-1]).max()))


def _gamma_cdf(shape: float, y: np.ndarray) -> np.ndarray:
    at = torch.from_numpy(np.asarray(y, dtype=np.float64))
    below: np.ndarray = torch.special.gammainc(torch.full_like(at, shape), at).numpy()
    return below


def _gamma_quantile(shape: float, probability: np.ndarray) -> np.ndarray:
    """Invert the Gamma distribution function: look up a table of log y, then two Newton steps in log y.

    In log y both ends are tame: near 0 the function is y^shape / Γ(shape + 1), a straight line in the
    logarithms, and where Newton runs the slope y^shape e^−y / Γ(shape) never vanishes.
    """
    lowest = (math.log(probability.min()) + math.lgamma(shape + 1)) / shape - 1
    table = np.linspace(lowest, math.log(shape + 60), 4096)
    log_y = np.interp(np.log(probability), np.log(_gamma_cdf(shape, np.exp(table))), table)
    for _ in range(2):
        y = np.exp(log_y)
        slope = np.exp(shape * log_y - y - math.lgamma(shape))
        log_y -= (_gamma_cdf(shape, y) - probability) / slope
    quantiles: np.ndarray = np.exp(log_y)
    return quantiles
