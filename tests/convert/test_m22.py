"""M22: the levels of the paper's source, those of what top-k leaves, and what is sent and stays behind."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradwire
from gradwire.convert import m22
from gradwire.convert.sparse import sent_positions
from gradwire.errors import SpecError
from gradwire.flower.shared import update
from gradwire.models import gennorm_moments
from gradwire.models.weighted_lloyd import levels
from support.cases import for_each
from support.helpers import FLOATS, check_same, encode_into
from support.plain_decoder import plain_decode

integrate = pytest.importorskip("scipy.integrate")
stats = pytest.importorskip("scipy.stats")


# ── levels of the model ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("beta", "m", "bits", "expected"),
    [
        (1, 0, 2, [0.4198, 1.834]),
        (1, 2, 2, [1.4717, 3.6027]),
        (2, 0, 3, [0.2451, 0.756, 1.3439, 2.1519]),
    ],
)
def test_levels_of_unit_variance(beta: float, m: int, bits: int, expected: list[float]) -> None:
    found = levels(beta, 0.0, m, 2 ** (bits - 1)) / math.sqrt(gennorm_moments.mean_square(beta))
    assert found == pytest.approx(expected, abs=5e-5)


SOURCES = [(1.0, 0.0, 9, 4), (0.5, 1.5, 2, 2), (0.3, 40.0, 1, 4), (2.0, 0.2, 3, 8), (1.3, 0.0, 0, 16), (4.0, 9.0, 9, 2)]


@for_each(("beta", "t", "m", "count"), SOURCES)
def test_levels_are_the_weighted_means_between_midpoints(beta: float, t: float, m: int, count: int) -> None:
    found = levels(beta, t, m, count)
    edges = np.concatenate([[t], (found[1:] + found[:-1]) / 2, [t + 750 ** (1 / beta)]])  # beyond, the density is 0

    def integral(power: int, low: float, high: float) -> float:
        # In z = (x − t)^(1/4), which is smooth where densities of small β are not.
        ends = [(edge - t) ** 0.25 for edge in (low, high)]
        density = lambda z: (t + z**4) ** power * math.exp(-(z ** (4 * beta))) * 4 * z**3  # noqa: E731
        return integrate.quad(density, *ends, limit=500, epsabs=0, epsrel=1e-9)[0]

    cells = list(itertools.pairwise(edges))
    means = [integral(m + 1, *cell) / integral(m, *cell) for cell in cells]
    assert found == pytest.approx(means, rel=1e-6)


@pytest.mark.thorough
@for_each(("beta", "t", "m", "count"), SOURCES)
def test_no_other_levels_nearby_are_better(beta: float, t: float, m: int, count: int) -> None:
    """Neither a saddle, to which Newton's method might lead, nor a worse place."""
    z = (np.arange(20_000) + 0.5) / 20_000 * (750 ** (1 / beta)) ** 0.25  # dense where densities of small β are large
    x = t + z**4
    weight = (x / x[-1]) ** m * np.exp(-(z ** (4 * beta))) * z**3

    def distortion(c: np.ndarray) -> float:
        return float(weight @ np.square(x - c[np.searchsorted((c[1:] + c[:-1]) / 2, x)]))

    found = levels(beta, t, m, count)
    cells = np.searchsorted((found[1:] + found[:-1]) / 2, x)
    best = np.bincount(cells, weight * x) / np.bincount(cells, weight)  # of these points rather than of the density
    rng = np.random.default_rng(0)
    for scale in (1e-2, 0.1):
        for _ in range(30):
            moved = np.sort(t + (best - t) * np.exp(scale * rng.standard_normal(count)))
            assert distortion(moved) > distortion(best)


@pytest.mark.parametrize("beta", [0.1, 0.4, 1.0, 4.0])
def test_levels_at_the_ends_of_their_range(beta: float) -> None:
    for m in (0, 9):
        for count in (1, 2, 32):
            for t in (0.0, 2**-5 * gennorm_moments.mean_abs(beta), 2**6 * gennorm_moments.mean_abs(beta)):
                found = levels(beta, t, m, count)
                assert len(found) == count and (np.diff(found, prepend=t) > 0).all() and math.isfinite(found[-1])


# ── levels of what is sent ────────────────────────────────────────────────────────────────────────


def distortion(x: np.ndarray, c: np.ndarray, m: int) -> float:
    return float(x**m @ np.square(x - c[np.searchsorted((c[1:] + c[:-1]) / 2, x)]))


def lloyd(x: np.ndarray, c: np.ndarray, m: int) -> np.ndarray:
    """On the entries themselves, until it stands."""
    for _ in range(500):
        cells = np.searchsorted((c[1:] + c[:-1]) / 2, x)
        c = np.bincount(cells, x ** (m + 1)) / np.bincount(cells, x**m)
    return c


@for_each("beta", [0.6, 1.0, 2.0])
@for_each(("m", "count"), [(0, 2), (2, 2), (2, 4)])
def test_the_fit_is_nearly_the_best_for_what_top_k_leaves(beta: float, m: int, count: int) -> None:
    x = np.abs(stats.gennorm.rvs(beta, size=100_000, random_state=1))
    for p in (0.1, 0.01):
        sent = np.sort(x)[-int(p * len(x)) :]
        found = m22.fit(torch.from_numpy(sent).float(), m, count)
        assert len(found) == count and found[0] > sent[0]
        assert distortion(sent, found, m) <= 1.1 * distortion(sent, lloyd(sent, found, m), m)
        # The paper's fit, to the entries themselves, has levels where none are.
        beta_sent, alpha = gennorm_moments.fit(sent.mean(), np.square(sent).mean())
        assert distortion(sent, found, m) < 0.8 * distortion(sent, alpha * levels(beta_sent, 0.0, m, count), m)


def test_what_is_sent_is_nearer_than_nothing_however_heavy_the_tail() -> None:
    x = torch.from_numpy(stats.t.rvs(1.1, size=50_000, random_state=0)).float()
    lost = {}
    for m in (0, 1, 2, 5, 9):
        frame = gradwire.codec(f"m22:m={m},p=0.1").encode(x)
        sent = x[sent_positions(frame)]
        left = sent - gradwire.decode(frame)[sent_positions(frame)]
        lost[m] = float(left.square().sum() / sent.square().sum())
    assert lost[0] < 0.5 and max(lost.values()) <= max(m22.MOST_LOST, lost[0]) + 1e-3
    # Without lowering M, the nine of ten below a level would be rounded up to it.
    sent = sent.abs().double().numpy()
    above = sent - sent.min()
    bold = m22.model_levels(sent.min(), above.mean(), np.square(above).mean(), 9, 2)
    assert m22.weighted_means(sent, bold, 9)[1] > 2


magnitudes = st.floats(min_value=2.0**-149, max_value=2.0**127, width=32)


@given(st.lists(magnitudes, min_size=1, max_size=60), st.integers(0, 9), st.integers(1, 4))
def test_a_fit_of_anything(values: list[float], m: int, bits: int) -> None:
    x = np.array(values)
    found = m22.fit(torch.tensor(values), m, 2 ** (bits - 1))
    assert 1 <= len(found) <= 2 ** (bits - 1) and (np.diff(found) >= 0).all()
    assert x.min() * (1 - 1e-9) <= found[0] and found[-1] <= x.max() * (1 + 1e-9)
    assert distortion(x / x.max(), found / x.max(), 0) < float(np.square(x / x.max()).sum())


# ── frames ────────────────────────────────────────────────────────────────────────────────────────

entries = st.one_of(st.sampled_from([0.0, -0.0, 1.0, -1.0, 3e38, -1e-44]), st.floats(-1e3, 1e3, width=32))


@given(
    st.lists(entries, min_size=9, max_size=120), st.integers(1, 60), st.integers(1, 5), st.integers(0, 9),
    st.sampled_from(FLOATS),
)  # fmt: skip
def test_what_is_not_sent_is_remembered_exactly(
    values: list[float], k: int, bits: int, m: int, dtype: torch.dtype
) -> None:
    x = torch.tensor(values).clamp(-6e4, 6e4).to(dtype)
    memory = x.float().flip(0) / 3
    u = x.float() + memory
    if dtype == torch.float16:
        u = u.clamp(-65504, 65504)
    frame = encode_into(gradwire.codec(f"m22:k={k},bits={bits},m={m}"), x, residual=memory)
    plain, decoded = plain_decode(frame), gradwire.decode(frame)
    check_same(decoded, plain.tensor)
    assert len(plain.magnitudes) <= 2 ** (bits - 1)
    if plain.codec == 5:
        order = sorted((i for i in range(len(u)) if u[i]), key=lambda i: (-abs(float(u[i])), i))
        assert plain.positions == sorted(order[:k])
        check_same(memory, u - decoded.float())


@pytest.mark.parametrize("spec", ["m22", "m22:bits=4,m=0", "m22:p=0.01"])
def test_every_value_is_the_nearest_of_the_table(backend: str, spec: str) -> None:
    x = torch.from_numpy(stats.laplace.rvs(size=5000, random_state=2)).float()
    plain = plain_decode(gradwire.codec(spec).encode(x))
    table = torch.tensor(plain.magnitudes)
    for i in plain.positions:
        nearest = table[(table - x[i].abs()).abs().argmin()]
        assert float(plain.tensor[i]) == math.copysign(float(nearest), float(x[i]))


def test_bytes_and_error_beside_other_sparse_recipes() -> None:
    """One magnitude is stc's; each bit more costs less than it does with small floats, and has less error than stc."""
    x = torch.from_numpy(stats.gennorm.rvs(0.8, size=200_000, random_state=3)).float()

    def cost(spec: str) -> tuple[int, float]:
        frame = gradwire.codec(spec).encode(x)
        return len(frame), float((x - gradwire.decode(frame)).square().sum())

    stc, one, two, three, fp4 = map(
        cost, ("stc:p=0.1", "m22:bits=1,m=0", "m22:bits=2", "m22:bits=3", "topk:p=0.1,values=fp4")
    )
    assert abs(one[0] - stc[0]) < 8 and one[1] == pytest.approx(stc[1], rel=1e-4)
    assert stc[0] < two[0] < 1.12 * stc[0] < three[0] < fp4[0]
    assert stc[1] > 1.05 * two[1] > 1.05 * three[1]


def test_small_and_even_tensors(backend: str) -> None:
    """Where there are no more entries than levels, these are the levels; equal magnitudes are one."""
    x = torch.tensor([1.0, -2.0, 0.0, 4.0] + [0.0] * 40)
    check_same(gradwire.decode(gradwire.codec("m22:k=9,bits=4").encode(x)), x)
    even = torch.where(torch.arange(500) % 3 == 0, -0.25, 0.25)
    frame = gradwire.codec("m22:p=0.999").encode(even)
    check_same(gradwire.decode(frame), even)
    assert plain_decode(frame).magnitudes == [0.25]


@for_each(
    ("spec", "match"),
    [
        ("m22:bits=0", "from 1 to 6"), ("m22:bits=7", "from 1 to 6"), ("m22:m=10", "from 0 to 9"),
        ("m22:m=1.5", "not a whole number"), ("m22:values=fp4", "unknown parameter of m22"),
        ("stc:bits=2", "unknown parameter of stc"), ("topk:m=2", "unknown parameter of topk"),
    ],
)  # fmt: skip
def test_bad_parameters(spec: str, match: str) -> None:
    with pytest.raises(SpecError, match=match):
        gradwire.codec(spec)


def test_bad_arguments() -> None:
    for bad in ({"bits": 0}, {"bits": 7}, {"m": -1}, {"m": 10}):
        with pytest.raises(SpecError):
            m22.M22(**bad)


# ── federated ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.thorough
def test_updates_of_a_federated_client() -> None:
    """Round after round, what the server has and what the client remembers add up to all that was trained."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"first.weight": (200, 64), "first.bias": (200,), "norm.running_mean": (200,), "steps": ()}
    model = {n: torch.randn(s, generator=generator) for n, s in shapes.items() if n != "steps"}
    model["steps"] = torch.tensor(0)
    trained = {n: t.clone() for n, t in model.items()}
    memory: dict[str, torch.Tensor] = {}
    for step in range(4):
        differences = {n: torch.randn(t.shape, generator=generator) ** 3 for n, t in model.items() if n != "steps"}
        encoded = update.encode(differences, {"steps": torch.tensor(step)}, list(model), "m22", memory, step)
        assert len(encoded.data) < 4000  # of 53 kB: 1280 positions and levels, a small bias, running means as bf16
        model, memory = update.decode(encoded.data, model), encoded.memory
        for name, difference in differences.items():
            trained[name] = trained[name] + difference
        assert int(model["steps"]) == step
        left = memory["first.weight"]  # the bias is small, and has a recipe that forgets
        torch.testing.assert_close(model["first.weight"] + left, trained["first.weight"], rtol=1e-5, atol=1e-4)
    assert float((trained["first.weight"] - model["first.weight"]).abs().max()) > 0.1  # something was left behind
