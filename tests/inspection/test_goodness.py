"""The three models and their distances to a sample, against scipy; code lengths against arithmetic."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from gradwire import compress
from gradwire.inspection import code_lengths, goodness
from gradwire.inspection.goodness import CentredGenNorm
from gradwire.small_float_formats import PRESETS
from support.cases import for_each

BETAS = [0.1, 0.15, 0.3, 0.7, 1.0, 1.5, 2.0, 4.0]
FP4 = PRESETS["fp4"]


def sample(beta: float, count: int, scale: float = 1.0, seed: int = 0) -> np.ndarray:
    return stats.gennorm.rvs(beta, scale=scale, size=count, random_state=seed)


@for_each("beta", BETAS)
def test_model_is_scipys(beta: float) -> None:
    model, oracle = CentredGenNorm(beta, 0.7), stats.gennorm(beta, scale=0.7)
    u = (np.arange(20_000) + 0.5) / 20_000
    quantiles = model.quantile(u)
    np.testing.assert_allclose(quantiles, oracle.ppf(u), rtol=1e-9)
    x = np.concatenate([quantiles[::50], [0.0, 1e-12, -3.0]])
    np.testing.assert_allclose(model.cdf(x), oracle.cdf(x), rtol=1e-9, atol=1e-15)
    np.testing.assert_allclose(model.density(x), oracle.pdf(x), rtol=1e-9)
    far = np.abs(x) * 3
    np.testing.assert_allclose(model.survival(far), 2 * oracle.sf(far), rtol=1e-8)


@pytest.mark.parametrize("beta", [0.1, 1.0, 4.0])
def test_quantiles_far_out(beta: float) -> None:
    model = CentredGenNorm(beta, 1.0)
    u = np.array([1e-9, 0.5 - 1e-9, 0.5, 0.5 + 1e-9, 1 - 1e-9])
    np.testing.assert_allclose(model.cdf(model.quantile(u)), u, rtol=0, atol=1e-14)
    assert model.quantile(u)[2] == 0


@for_each("count", [2, 7, 1000, 30_000])
@for_each("family", ["normal", "laplace", "gennorm"])
def test_distances_are_scipys(count: int, family: str) -> None:
    z = goodness.standardise(sample(0.6, count, seed=count) + 0.1)
    assert z is not None
    model = goodness.fit(*goodness.moments(z))[family]
    oracle = stats.gennorm(model.beta, scale=model.alpha)
    ks = stats.kstest(z, oracle.cdf).statistic
    assert goodness.kolmogorov_smirnov(z, model) == pytest.approx(ks, abs=1e-12)
    expected = math.sqrt(np.mean((z - oracle.ppf((np.arange(count) + 0.5) / count)) ** 2))
    assert goodness.wasserstein2(z, model) == pytest.approx(expected, rel=1e-9)


def test_w2_between_normals_is_the_difference_of_deviations() -> None:
    u = (np.arange(100_000) + 0.5) / 100_000
    narrow, wide = CentredGenNorm(2.0, math.sqrt(2)), CentredGenNorm(2.0, 3 * math.sqrt(2))
    assert goodness.wasserstein2(narrow.quantile(u), wide) == pytest.approx(2, rel=1e-3)
    assert goodness.wasserstein2(narrow.quantile(u) + 0.3, narrow) == pytest.approx(0.3, rel=1e-9)


def test_fits_are_those_of_the_moments() -> None:
    x = sample(0.8, 50_000, scale=3e-5)
    fitted = goodness.fit(*goodness.moments(x))
    assert fitted["normal"].alpha / math.sqrt(2) == pytest.approx(stats.norm.fit(x, floc=0)[1], rel=1e-9)
    assert fitted["laplace"].alpha == pytest.approx(stats.laplace.fit(x, floc=0)[1], rel=1e-9)
    assert fitted["gennorm"].beta == pytest.approx(0.8, rel=0.03)
    assert fitted["gennorm"].alpha == pytest.approx(3e-5, rel=0.06)


@pytest.mark.parametrize(("beta", "best"), [(2.0, "normal"), (1.0, "laplace"), (0.5, "gennorm")])
def test_the_family_of_the_sample_is_near_and_others_are_far(beta: float, best: str) -> None:
    z = goodness.standardise(sample(beta, 100_000))
    assert z is not None
    fitted = goodness.fit(*goodness.moments(z))
    ks = {name: goodness.kolmogorov_smirnov(z, model) for name, model in fitted.items()}
    w2 = {name: goodness.wasserstein2(z, model) for name, model in fitted.items()}
    for distances in (ks, w2):
        assert max(distances[best], distances["gennorm"]) < 0.3 * min(
            distance for name, distance in distances.items() if name not in (best, "gennorm")
        )


def test_even_sample() -> None:
    x = np.arange(1_000_000)
    few = goodness.even_sample(x, 1000)
    assert len(few) == 1000
    assert (few // 1000 == np.arange(1000)).all(), "one in each stratum"
    assert len(set((few % 1000).tolist())) > 500, "at random places in them"
    assert (goodness.even_sample(x, 1000) == few).all()
    assert (goodness.even_sample(x[:1000], 1000) == x[:1000]).all()


def test_standardise() -> None:
    z = goodness.standardise(np.array([3e-30, 1e-30, 2e-30, 6e-30], dtype=np.float32))
    assert z is not None
    assert z.mean() == pytest.approx(0, abs=1e-12) and z.std() == pytest.approx(1)
    assert (np.diff(z) > 0).all()
    assert goodness.standardise(np.full(5, 2.0)) is None
    assert goodness.standardise(np.array([1.0])) is None


@for_each("beta", [0.3, 1.0, 2.0])
@for_each("name", ["fp4", "fp8"])
def test_symbol_masses_are_differences_of_the_cdf(beta: float, name: str) -> None:
    fmt, model, step = PRESETS[name], CentredGenNorm(beta, 0.2), 0.3
    levels = fmt.levels * step
    edges = np.concatenate([[-np.inf], (levels[1:] + levels[:-1]) / 2, [np.inf]])
    expected = np.diff(stats.gennorm.cdf(edges, beta, scale=0.2))
    np.testing.assert_allclose(code_lengths.symbol_masses(fmt, model, step), expected, atol=1e-14)


def test_sign_bits_are_counted() -> None:
    counts = np.zeros(11, dtype=np.int64)
    counts[[0, 10]] = 500  # ±3, nothing else: the sign is all there is to say
    assert code_lengths.entropy(counts) == 1
    frequencies = np.where(counts > 0, 2048, 0)
    assert code_lengths.bits_per_entry(counts, frequencies, 0) == {"huffman": 1.0, "ideal": 1.0}
    assert code_lengths.bits_per_entry(counts, frequencies, 25)["ideal"] == pytest.approx(1.2)


def test_one_symbol_needs_no_bits() -> None:
    counts = np.zeros(11, dtype=np.int64)
    counts[5] = 7
    assert code_lengths.entropy(counts) == 0
    assert code_lengths.bits_per_entry(counts, np.where(counts > 0, 4096, 0), 0) == {"huffman": 0, "ideal": 0}


def test_models_on_a_tensor_with_zeros() -> None:
    x = sample(1.3, 40_000)
    x[::2] = 0
    step = 0.7
    symbols = np.argmin(np.abs(x[:, None] - FP4.levels * step), axis=1)
    counts = np.bincount(symbols, minlength=FP4.symbols)
    entropy = code_lengths.entropy(counts)
    p = counts / counts.sum()
    assert entropy == pytest.approx(stats.entropy(p, base=2))
    found = code_lengths.models(FP4, x, step, counts)
    bits = {name: code_lengths.bits_per_entry(counts, *model) for name, model in found.items()}
    for name, (frequencies, _) in found.items():
        assert frequencies.sum() == 1 << compress.finest_precision(len(frequencies)) and (frequencies > 0).all(), name
        assert entropy <= bits[name]["ideal"], name
        assert bits[name]["ideal"] <= bits[name]["huffman"] + 1e-9 or name in ("normal", "laplace", "gennorm")
        p_model = frequencies / frequencies.sum()
        own = 8 * found[name][1] / len(x)
        assert bits[name]["ideal"] == pytest.approx(entropy + stats.entropy(p, p_model, base=2) + own), name
    assert bits["histogram"]["ideal"] < entropy + 0.01
    assert bits["gennorm+zeros"]["ideal"] < entropy + 0.01
    assert bits["gennorm"]["ideal"] > bits["gennorm+zeros"]["ideal"] + 0.03
    assert bits["normal"]["ideal"] > bits["gennorm"]["ideal"] + 0.03
