"""The mathematics of BinGrad, ORQ, QSGD, TernGrad, signSGD, linear and TinyScript: their own conditions, brute force,
and unbiasedness with a stated error probability."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

import gradwire
from gradwire.convert.tinyscript import SHAPES, unit_levels
from support.cases import for_each
from support.helpers import bits, gradient
from support.plain_decoder import plain_decode

RNG = np.random.default_rng(7)
START = RNG.bit_generator.state
SOURCES = {
    "normal": RNG.standard_normal,
    "laplace": lambda n: RNG.laplace(size=n),
    "heavy": lambda n: gradient(n, int(RNG.integers(1000)), beta=0.4).numpy(),
    "t3": lambda n: RNG.standard_t(3, size=n),
    "skewed": lambda n: RNG.exponential(size=n) - 0.3,
}


@pytest.fixture(autouse=True)
def same_numbers_in_any_order() -> None:
    RNG.bit_generator.state = START


def bucket(name: str, n: int = 2048) -> np.ndarray:
    return np.sort(SOURCES[name](n).astype(np.float32)).astype(np.float64)


def search(x: np.ndarray, levels: int, method: str) -> np.ndarray:
    u = torch.from_numpy(x.astype(np.float32))
    return gradwire.kernels.search_levels(u, None, 0.0, np.array([0, len(x)]), None, levels, method)[0].astype(float)


def expected_error(x: np.ndarray, levels: np.ndarray) -> float:
    """Σ(hi − v)(v − lo): the variance of stochastic rounding."""
    k = np.clip(np.searchsorted(levels, x, side="right") - 1, 0, len(levels) - 2)
    return float(((levels[k + 1] - x) * (x - levels[k])).sum())


# ── ORQ ───────────────────────────────────────────────────────────────────────────────────────────


def check_condition(x: np.ndarray, low: float, level: float, high: float) -> None:
    """#{v < b} = n − Σ(v − lo)/(hi − lo), as nearly as a level that is an entry can have it."""
    v = x[(x >= low) & (x < high)]
    if high > low and len(v):
        right = len(v) - ((v - low) / (high - low)).sum()
        assert (v < level).sum() - 1e-6 <= right <= (v <= level).sum() + 1e-6


@for_each("name", SOURCES)
@for_each("levels", [3, 5, 9, 17])
def test_greedy_levels_meet_the_condition_between_their_parents(name: str, levels: int, backend: str) -> None:
    x = bucket(name)
    found = search(x, levels, "greedy")
    assert found[0] == x[0] and found[-1] == x[-1]
    span = levels - 1
    while span > 1:
        for left in range(0, levels - 1, span):
            check_condition(x, found[left], found[left + span // 2], found[left + span])
        span //= 2


@for_each("name", SOURCES)
@for_each("levels", [3, 5, 9])
def test_exact_levels_meet_the_condition_between_their_neighbours(name: str, levels: int) -> None:
    x = bucket(name)
    found = search(x, levels, "exact")
    for low, level, high in zip(found, found[1:], found[2:], strict=False):
        check_condition(x, low, level, high)


@for_each("levels", [3, 5, 9])
@for_each("name, margin", [("normal", 0.02), ("laplace", 0.02), ("heavy", 0.02), ("t3", 0.05), ("skewed", 0.05)])
def test_greedy_is_close_to_the_optimum(name: str, margin: float, levels: int) -> None:
    """Over a hundred buckets; a few may be further off, and so are cubic tails and lopsided buckets."""
    total_greedy = total_polished = total_exact = 0.0
    for _ in range(100):
        x = bucket(name)
        greedy, exact = (expected_error(x, search(x, levels, method)) for method in ("greedy", "exact"))
        assert exact <= greedy * (1 + 1e-9)
        if levels == 3:
            assert greedy == pytest.approx(exact, rel=1e-9)
        scale = (x * x).sum()
        total_greedy, total_exact = total_greedy + greedy / scale, total_exact + exact / scale
        polished = expected_error(x, search(x, levels, "polished"))
        assert exact * (1 - 1e-9) <= polished <= greedy * (1 + 1e-9)
        total_polished += polished / scale
    assert total_greedy <= (1 + margin) * total_exact
    assert total_polished <= (1 + margin / 2) * total_exact


@pytest.mark.parametrize("levels", [3, 5])
def test_exact_search_equals_brute_force(levels: int, backend: str) -> None:
    for trial in range(12):
        n = levels + 1 + trial % 5
        x = np.sort(RNG.standard_normal(n).astype(np.float32)).astype(np.float64)
        if trial % 3 == 0:
            x = np.sort(np.round(x * 2))  # with ties
        inner = itertools.combinations_with_replacement(x, levels - 2)
        best = min(expected_error(x, np.array([x[0], *choice, x[-1]])) for choice in inner)
        assert expected_error(x, search(x, levels, "exact")) == pytest.approx(best, rel=1e-6, abs=1e-12)
        between = np.sort(RNG.uniform(x[0], x[-1], (200, levels - 2)), axis=1)  # levels need not be entries
        others = min(expected_error(x, np.array([x[0], *choice, x[-1]])) for choice in between)
        assert best <= others + 1e-9


def test_few_entries_are_their_own_levels() -> None:
    x = np.array([3.0, -1.0, 2.0], dtype=np.float32)
    for method in ("greedy", "exact"):
        assert search(x, 5, method).tolist() == [-1, 2, 3, 3, 3]
    frame = gradwire.codec("orq:levels=9,precision=fp32").encode(gradient(9))
    assert bits(gradwire.decode(frame)) == bits(gradient(9))


@for_each("levels", [3, 5, 9])
@for_each("name", SOURCES)
def test_orq_has_the_least_variance_at_its_number_of_levels(name: str, levels: int) -> None:
    x = bucket(name)
    largest = np.abs(x).max()
    orq = expected_error(x, search(x, levels, "greedy"))
    assert orq < expected_error(x, np.linspace(x[0], x[-1], levels))
    assert orq < expected_error(x, np.linspace(-largest, largest, levels))


# ── BinGrad ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", SOURCES)
def test_bingrad_b_levels_are_means_around_their_midpoint(name: str, backend: str) -> None:
    x = bucket(name)
    low, high = search(x, 2, "two")
    middle = (low + high) / 2
    assert low == pytest.approx(x[x < middle].mean(), rel=1e-6)
    assert high == pytest.approx(x[x >= middle].mean(), rel=1e-6)


def two_level_error(x: np.ndarray, low: float, high: float) -> float:
    return float(np.minimum((x - low) ** 2, (x - high) ** 2).sum())


def test_bingrad_b_equals_brute_force(backend: str) -> None:
    for n in (3, 4, 7, 12):
        x = np.sort(RNG.standard_normal(n).astype(np.float32)).astype(np.float64)
        best = min(two_level_error(x, x[:c].mean(), x[c:].mean()) for c in range(1, n))
        assert two_level_error(x, *search(x, 2, "two")) == pytest.approx(best, rel=1e-6)


def test_bingrad_b_helps_skewed_data_beyond_one_step_from_the_mean() -> None:
    """On a shifted exponential."""
    x = np.sort(np.random.default_rng(1).exponential(size=200_000) - 0.3)
    one_step = two_level_error(x, x[x < x.mean()].mean(), x[x >= x.mean()].mean()) / (x**2).sum()
    best = two_level_error(x, *search(x, 2, "two")) / (x**2).sum()
    assert best < 0.9 * one_step


def pair_error(x: np.ndarray, b: float) -> float:
    """Levels ±b: biased beyond them, variance b² − v² between."""
    a = np.abs(x)
    return float(np.where(a >= b, (a - b) ** 2, b * b - a * a).sum())


@for_each("name", SOURCES)
@for_each("n", [1, 2, 5, 40, 2048])
def test_bingrad_pb_is_the_fixed_point_and_the_least_error(name: str, n: int, backend: str) -> None:
    x = bucket(name, n)
    (b,) = search(x, 2, "pair")
    a = np.abs(x)
    # b = (1/n)·Σ_{|v| ≥ b}|v|; where the sum jumps over b, b is the entry at which it does.
    assert a[a > b * (1 + 1e-6)].sum() / n <= b * (1 + 1e-6)
    assert a[a >= b * (1 - 1e-6)].sum() / n >= b * (1 - 1e-6)
    grid = np.linspace(0, a.max(), 4001)
    assert pair_error(x, b) <= min(pair_error(x, g) for g in grid) * (1 + 1e-6)


# ── unbiasedness ──────────────────────────────────────────────────────────────────────────────────

RUNS = 300
ERROR_PROBABILITY = 1e-6  # that a test below fails although the method is unbiased, for all of its entries together
UNBIASED = (
    "orq:levels=3", "orq", "orq:levels=9,search=exact", "orq:precision=fp16", "qsgd", "qsgd:norm=l2,levels=5",
    "terngrad", "linear", "linear:levels=2,precision=fp32", "linear:levels=40",
)  # fmt: skip


def means(spec: str, tensor: torch.Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of every entry: the mean of RUNS decoded values, and the two values it may have."""
    codec, total = gradwire.codec(spec), np.zeros(tensor.numel())
    for seed in range(RUNS):
        total += gradwire.decode(codec.encode(tensor, seed=seed << 32)).double().numpy()
    low, high = [], []
    entries = iter(tensor.double().tolist())
    for size, levels in plain_decode(codec.encode(tensor)).buckets:
        for v in itertools.islice(entries, size):
            k = min(max(np.searchsorted(levels, v, side="right") - 1, 0), len(levels) - 2)
            low.append(levels[k])
            high.append(levels[k + 1])
    return total / RUNS, np.array(low), np.array(high)


def bernstein(variance: np.ndarray, width: np.ndarray, runs: float, probability: float) -> np.ndarray:
    """t with P(|mean of `runs` − expectation| > t) ≤ probability, for any distribution: no normal approximation."""
    log = math.log(2 / probability)
    linear = width * log / (3 * runs)
    return linear + np.sqrt(linear**2 + 2 * variance * log / runs)


@for_each("dtype", [torch.float32, torch.bfloat16])
@for_each("spec", UNBIASED)
def test_unbiased(spec: str, dtype: torch.dtype) -> None:
    tensor = gradient(560, 5, beta=0.6).to(dtype)
    x = tensor.double().numpy()
    mean, low, high = means(spec, tensor)
    assert ((low <= x) & (x <= high)).all()
    variance = (high - x) * (x - low)
    # Half of the error probability for the entries, each its share of it, and half for their sum.
    allowed = bernstein(variance, high - low, RUNS, ERROR_PROBABILITY / 2 / len(x))
    assert (np.abs(mean - x) <= allowed + 1e-7 * (high - low)).all()
    for sign in (np.ones(len(x)), np.sign(x)):  # drift, and shrinking or growing
        total = np.abs((sign * (mean - x)).sum())
        bound = bernstein(variance.sum() / len(x), (high - low).max(), RUNS * len(x), ERROR_PROBABILITY / 4)
        assert total / len(x) <= bound + 1e-7 * (high - low).max()


@pytest.mark.parametrize("spec", ["orq:clip=2", "terngrad:clip=2.5", "bingrad:form=pb"])
def test_the_test_of_unbiasedness_sees_bias(spec: str) -> None:
    tensor = gradient(560, 5, beta=0.6)
    x = tensor.double().numpy()
    mean, low, high = means(spec, tensor)
    variance = np.maximum((high - x) * (x - low), 0)
    assert (np.abs(mean - x) > bernstein(variance, high - low, RUNS, ERROR_PROBABILITY / 2 / len(x))).any()


# ── the others ────────────────────────────────────────────────────────────────────────────────────


def test_qsgd_levels_are_multiples_of_norm_over_s() -> None:
    x = gradient(600, 1)
    for norm, largest in (("l2", x.norm()), ("max", x.abs().max())):
        spec = f"qsgd:levels=9,norm={norm},bucket=0,precision=fp32"
        steps = gradwire.decode(gradwire.codec(spec).encode(x)) / largest * 4
        assert torch.allclose(steps, steps.round(), atol=1e-5)
        assert ((steps * largest / 4 - x).abs() <= largest / 4 * 1.00001).all()


def test_terngrad_has_three_values_and_clips_at_sigma() -> None:
    x = gradient(600, 1)
    plain = gradwire.decode(gradwire.codec("terngrad:bucket=0,precision=fp32").encode(x))
    assert set(plain.unique().tolist()) <= {-float(x.abs().max()), 0.0, float(x.abs().max())}
    clipped = gradwire.decode(gradwire.codec("terngrad:bucket=0,precision=fp32,clip=2.5").encode(x))
    assert float(clipped.max()) == pytest.approx(2.5 * float(x.std(unbiased=False)), rel=1e-5)


def test_signsgd_sends_the_mean_magnitude() -> None:
    x = gradient(600, 1)
    sent = gradwire.decode(gradwire.codec("signsgd:bucket=0,precision=fp32").encode(x))
    assert torch.allclose(sent, x.sign() * x.abs().mean())
    assert gradwire.recipe("signsgd").decay == 1
    assert not gradwire.codec("signsgd").stochastic and gradwire.codec("orq").stochastic


def test_linear_levels_are_evenly_spaced() -> None:
    x = gradient(600, 1)
    for size, levels in plain_decode(gradwire.codec("linear:levels=7,bucket=0,precision=fp32").encode(x)).buckets:
        assert size == 600 and np.allclose(levels, np.linspace(float(x.min()), float(x.max()), 7))


def test_tinyscript_levels_of_a_laplace_distribution() -> None:
    """A double Weibull of shape 1 is Laplace's: its four Lloyd levels at unit variance are ±.4198 and ±1.834."""
    (one,) = np.flatnonzero(np.isclose(SHAPES, 1))
    levels = unit_levels(int(one), 4) / math.sqrt(2)
    assert levels == pytest.approx([-1.834, -0.4198, 0.4198, 1.834], rel=2e-3)
    odd = unit_levels(int(one), 3)
    assert odd[1] == 0 and odd[0] == -odd[2]


def test_tinyscript_fits_a_double_weibull() -> None:
    rng = np.random.default_rng(2)
    x = (rng.weibull(0.7, 100_000) * rng.choice([-1, 1], 100_000)).astype(np.float32)
    frame = gradwire.codec("tinyscript:levels=8").encode(torch.from_numpy(x))
    ((_, levels),) = plain_decode(gradwire.codec("tinyscript:levels=8,coder=raw").encode(torch.from_numpy(x))).buckets
    error = float(((gradwire.decode(frame).numpy() - x) ** 2).sum())
    found = np.array(levels)
    for _ in range(60):  # Lloyd's iteration on the entries themselves
        cells = np.searchsorted((found[1:] + found[:-1]) / 2, x)
        found = np.array([x[cells == k].mean() if (cells == k).any() else found[k] for k in range(8)])
    best = float(((found[np.searchsorted((found[1:] + found[:-1]) / 2, x)] - x) ** 2).sum())
    assert best <= error <= 1.05 * best


@for_each("spec", ["orq", "bingrad", "qsgd:levels=33", "terngrad", "linear:levels=16", "signsgd"])
def test_symbols_take_their_true_width_or_less(spec: str) -> None:
    tensor = gradient(40_000, 4)
    join = "," if ":" in spec else ":"
    sizes = {
        c: len(gradwire.codec(f"{spec}{join}coder={c}").encode(tensor)) for c in ("raw", "huffman", "rans", "auto")
    }
    levels = len(plain_decode(gradwire.codec(spec).encode(tensor[:500])).buckets[0][1])
    side = sizes["raw"] - math.ceil(len(tensor) * math.ceil(math.log2(levels)) / 8)
    assert 0 < side < 0.05 * len(tensor) + 40
    assert sizes["auto"] <= min(sizes.values()) + 8
