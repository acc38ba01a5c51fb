"""CO3's figures for GenNorm sources (α = 1): best scale, NMSE, entropy, and Huffman codes from two models.

The expected numbers were worked out by numerical integration, outside gradwire; a second integration, with
scipy, is done here.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import integrate, optimize

from gradwire.compress import huffman
from gradwire.inspection.code_lengths import symbol_masses
from gradwire.inspection.goodness import CentredGenNorm
from gradwire.models import gennorm_cells, gennorm_moments
from gradwire.small_float_formats import PRESETS, Format
from support.cases import for_each

FP4, FP8 = PRESETS["fp4"], PRESETS["fp8"]
FP4_TABLE = [  # β, s*, NMSE, entropy, Huffman from GenNorm, Huffman from a Normal model
    (0.3, 0.0009, 0.1436, 0.818, 1.280, 1.286),
    (0.4, 0.0123, 0.1055, 1.363, 1.575, 1.589),
    (0.5, 0.0529, 0.0816, 1.799, 1.884, 2.312),
    (0.7, 0.2396, 0.0547, 2.359, 2.392, 2.574),
    (1.0, 0.6486, 0.0364, 2.781, 2.840, 2.882),
    (1.5, 1.2925, 0.0246, 3.102, 3.138, 3.138),
    (2.0, 1.7560, 0.0199, 3.245, 3.280, 3.280),
]
FP8_TABLE = [  # β, entropy, Huffman from GenNorm, Huffman from a Normal model
    (0.5, 6.18, 6.22, 6.73),
    (1.0, 5.79, 5.82, 5.87),
    (2.0, 5.48, 5.51, 5.51),
]


def masses(fmt: Format, beta: float) -> np.ndarray:
    return symbol_masses(fmt, CentredGenNorm(beta, 1.0), gennorm_cells.best_step(fmt, beta))


def entropy(p: np.ndarray) -> float:
    return float(-(p[p > 0] @ np.log2(p[p > 0])))


def huffman_bits(fmt: Format, beta: float, model: CentredGenNorm) -> float:
    """Bits per entry of a GenNorm(β) source in the Huffman code of a model."""
    frequencies = np.maximum(1, np.rint(symbol_masses(fmt, model, gennorm_cells.best_step(fmt, beta)) * 2**40))
    return float(masses(fmt, beta) @ huffman.code_lengths(frequencies.astype(np.int64)))


def normal_model(beta: float) -> CentredGenNorm:
    """The Normal distribution with the variance of GenNorm(β, 1)."""
    return CentredGenNorm(2.0, math.sqrt(gennorm_moments.mean_square(beta) / gennorm_moments.mean_square(2)))


def close(expected: float) -> object:
    return pytest.approx(expected, rel=0.01)


@for_each("row", FP4_TABLE, ids=lambda row: str(row[0]))
def test_fp4(row: tuple[float, ...]) -> None:
    beta, scale, error, bits, from_gennorm, from_normal = row
    step = gennorm_cells.best_step(FP4, beta)
    if beta == 0.3:  # one digit is all that is printed
        assert round(1 / step, 4) == scale
    else:
        assert 1 / step == close(scale)
    assert gennorm_cells.nmse(FP4, beta, step) == close(error)
    assert entropy(masses(FP4, beta)) == close(bits)
    assert huffman_bits(FP4, beta, CentredGenNorm(beta, 1.0)) == close(from_gennorm)
    assert huffman_bits(FP4, beta, normal_model(beta)) == close(from_normal)


@pytest.mark.parametrize(("beta", "bits", "from_gennorm", "from_normal"), FP8_TABLE)
def test_fp8(beta: float, bits: float, from_gennorm: float, from_normal: float) -> None:
    assert round(gennorm_cells.nmse(FP8, beta, gennorm_cells.best_step(FP8, beta)), 4) == 0.0028
    assert entropy(masses(FP8, beta)) == close(bits)
    assert huffman_bits(FP8, beta, CentredGenNorm(beta, 1.0)) == close(from_gennorm)
    assert huffman_bits(FP8, beta, normal_model(beta)) == close(from_normal)


@for_each("beta", [row[0] for row in FP4_TABLE])
def test_best_step_against_numerical_integration(beta: float) -> None:
    """x = t^(1/β) turns GenNorm into a Gamma density, which quadrature handles however small β is."""
    shape = 1 / beta

    def moment(low: float, high: float, center: float) -> float:
        def integrand(t: float) -> float:
            return (t**shape - center) ** 2 * math.exp(-t + (shape - 1) * math.log(t) - math.lgamma(shape))

        return integrate.quad(integrand, low, high, limit=200)[0]

    second = moment(0, 400, 0.0)

    def error(log_step: float) -> float:
        step = math.exp(log_step)
        edges = np.minimum((gennorm_cells.cell_edges(FP4) * step) ** beta, 400)  # e^−400 is nothing
        cells = zip(edges[:-1], edges[1:], FP4.magnitudes * step, strict=True)
        return sum(moment(low, high, center) for low, high, center in cells) / second

    ours = gennorm_cells.best_step(FP4, beta)
    near = (math.log(ours) - 0.4, math.log(ours) + 0.4)
    best = optimize.minimize_scalar(error, bounds=near, method="bounded", options={"xatol": 1e-4})
    assert ours == close(math.exp(best.x))
    assert gennorm_cells.nmse(FP4, beta, ours) == pytest.approx(error(math.log(ours)), rel=1e-5)
