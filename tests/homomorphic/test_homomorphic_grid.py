"""Words on a grid: what is sent and what stays add up to what was there, and sums never overflow."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

import gradwire
from gradwire import kernels
from gradwire.homomorphic import code
from gradwire.homomorphic.grid import BITS, by_largest, by_rms, most_of
from gradwire.homomorphic.plan import choose
from support.cases import for_each
from support.helpers import BACKENDS, bits, check_contract_3, check_same, encode_into, gradient, use_backend

FLOAT_MAX = torch.finfo(torch.float32).max


def exponent_of(x: torch.Tensor) -> int:
    return int(x.abs().max().view(torch.int32)) >> 23


# ── grids ─────────────────────────────────────────────────────────────────────────────────────────


@for_each("world", [1, 2, 3, 7, 16, 127, 1000])
@for_each("width", BITS)
def test_no_sum_overflows_and_nothing_is_clipped(width, world):
    if 2 ** (width - 1) - 1 < world:
        with pytest.raises(gradwire.SpecError, match=f"sum of {world} workers.*bits=(8|16)"):
            most_of(width, world)
        return
    for exponent in (0, 1, 20, 100, 127, 200, 253, 254):
        grid = by_largest(exponent, width, world)
        assert grid.most * world < 2 ** (width - 1) and grid.step >= 2.0**-126
        assert float(np.float32(grid.step)) == grid.step and math.isfinite(grid.most * grid.step)
        largest = torch.tensor([exponent << 23 | 0x7FFFFF], dtype=torch.int32).view(torch.float32)
        q, sent = kernels.quantize_values(largest, grid.step, grid.most)
        assert abs(int(q)) <= grid.most and bool(sent.isfinite())
        # Up to half a step: a clipped one would be farther away. (The largest numbers of all have no room above.)
        assert abs(float(sent) - float(largest)) <= grid.step * (0.5000001 if exponent < 254 else 1)


def test_a_grid_of_32_bits_is_exact():
    """24 bits of the largest entries, and the same step for all: a power of two."""
    for world in (1, 2, 4, 6, 16):
        grid = by_largest(127, 32, world)
        assert math.frexp(grid.step)[0] == 0.5
        x = torch.tensor([1.9999999, -1.5, 1.0000001])
        check_same(kernels.quantize_values(x, grid.step, grid.most)[1], x)


@for_each("width, world", [(4, 1), (4, 2), (4, 7), (8, 1), (8, 4), (8, 16)])
@for_each("beta", [0.67, 1.0])
def test_few_levels_are_well_spent(width, world, beta):
    """The rule has no more than half as much squared error again as the best step."""
    x = gradient(200_000, 3, beta)
    rms = float(x.double().square().mean().sqrt())
    grid = by_rms(rms, width, world)

    def error(step: float) -> float:
        return float((x - kernels.quantize_values(x, step, grid.most)[1]).double().square().sum())

    assert error(grid.step) <= 1.5 * min(error(grid.step * 2 ** (i / 4)) for i in range(-8, 9))


# ── entries to words and back ─────────────────────────────────────────────────────────────────────


@given(
    count=st.integers(1, 3000), width=st.sampled_from(BITS), seed=st.integers(0, 999), memory=st.booleans(),
    stochastic=st.booleans(), sparse=st.booleans(),
)  # fmt: skip
def test_words_carry_what_leaves_the_memory(count, width, seed, memory, stochastic, sparse):
    g, e = gradient(count, seed), gradient(count, seed + 1) if memory else None
    if sparse:
        g *= torch.from_numpy((np.random.default_rng(seed).random(count) < 0.1).astype(np.float32))
    grid = by_rms(float(g.double().square().mean().sqrt()), width, 1)
    found = []
    for backend in BACKENDS:
        with use_backend(backend):
            after = torch.full((count,), 7.0)
            positions, words, exponent, squares = kernels.quantize_all(
                g, e, after, 0.9, grid.step, grid.most, width, seed if stochastic else None
            )
            sent = torch.zeros(count)
            kernels.put_words(sent, positions, words, width, grid.step)
            found.append([bits(x) for x in (after, positions, words, sent)] + [exponent, squares])
    assert all(other == found[0] for other in found)
    check_contract_3(sent, after, g, torch.zeros(count) if e is None else e, 0.9)
    assert not sent[g == 0].any() and bool((words != 0).all())
    u = torch.where(g == 0, 0, kernels.compensate(g, e, 0.9))
    assert exponent == exponent_of(u) and squares == pytest.approx(float(u.double().square().sum()), rel=1e-12)


def test_codes_of_many_workers_add_up_in_their_fields(backend):
    """Words of sums are sums of words, at the very ends of the range too."""
    rng = np.random.default_rng(0)
    for width in BITS:
        world, count = 7 if width == 4 else 16, 1001
        most = most_of(width, world)
        total, codes = torch.zeros(-(-count * width // 32), dtype=torch.int32), torch.zeros(count, dtype=torch.int64)
        for _ in range(world):
            q = rng.integers(-most, most + 1, count)
            q[:100], q[100:200] = most, -most
            q = torch.from_numpy(q).float().clamp(-(2.0**31) / world + 128, 2.0**31 / world - 128)  # fp32 holds these
            positions, words, _, _ = kernels.quantize_all(q, None, None, 1.0, 1.0, most, width, None)
            total[positions] += words
            codes += q.long()
        out = torch.full((count,), 7.0)
        kernels.put_words(out, torch.arange(len(total)), total, width, 1.0)
        check_same(out, codes.double().float())


def test_a_factor_divides_by_the_number_of_workers(backend):
    out = torch.zeros(5)
    kernels.put_words(out, torch.tensor([1, 4]), torch.tensor([2**31 - 1, -3], dtype=torch.int32), 32, 0.1 / 3)
    assert out.tolist() == [0, np.float32((2**31 - 1) * (0.1 / 3)), 0, 0, np.float32(-3 * (0.1 / 3))]


def test_non_finite_entries_are_told(backend):
    for bad in (math.nan, math.inf, -math.inf):
        for place in (0, 17, 2999):
            g = gradient(3000)
            g[place] = bad
            positions, words, exponent, _ = kernels.quantize_all(g, None, None, 1.0, 1e-6, 100, 32, None)
            assert exponent == 255 and not len(positions) and not len(words)
            e = torch.zeros(3000)
            e[place] = math.nan
            assert kernels.quantize_all(gradient(3000), e, e.clone(), 1.0, 1e-6, 100, 32, None)[2] == 255
    # A memory whose sum with the gradient is beyond fp32 is limited, and stays finite.
    g, e = torch.full((50,), FLOAT_MAX), torch.full((50,), FLOAT_MAX)
    grid = by_largest(254, 8, 1)
    assert kernels.quantize_all(g, e, e, 1.0, grid.step, grid.most, 8, None)[2] == 254 and e.isfinite().all()
    assert kernels.quantize_all(torch.empty(0), None, None, 1.0, 1.0, 1, 32, None)[2:] == (0, 0.0)


def test_stochastic_rounding_is_unbiased(backend):
    x = gradient(2000, 1)
    grid = by_largest(exponent_of(x), 8, 1)
    trials = 300 if backend != "reference" else 100
    mean = sum(kernels.quantize_values(x, grid.step, grid.most, seed)[1].double() for seed in range(trials)) / trials
    # Each rounds to one of two neighbours: a deviation of half a step at most; five of them over all entries.
    assert float((mean - x.double()).abs().max()) < 5 * 0.5 * grid.step / trials**0.5
    assert abs(float((mean - x.double()).mean())) < 5 * 0.5 * grid.step / (trials * len(x)) ** 0.5


# ── from gradients to their sum ───────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("width", BITS)
def test_the_sum_of_gradients_is_within_the_grid(backend, width):
    world, count = 4, 30_000
    rng = np.random.default_rng(width)
    own = [gradient(count, w) * torch.from_numpy(rng.random(count) < 0.05) for w in range(world)]
    grid = by_largest(max(map(exponent_of, own)), width, world)
    words = -(-count * width // 32)
    messages = [kernels.quantize_all(g, None, None, 1.0, grid.step, grid.most, width, None)[:2] for g in own]
    plan = choose(words, code.blocks(torch.unique(torch.cat([p for p, _ in messages])), words), 1)
    index, sketch = torch.zeros(plan.index_words, dtype=torch.int32), torch.zeros(plan.sketch_words, dtype=torch.int32)
    for positions, words_of in messages:
        a, b = code.encode(plan, positions, words_of)
        index, sketch = index | a, sketch + b
    found = code.decode(plan, index, sketch)
    out = torch.zeros(count)
    kernels.put_words(out, found.positions, found.values, width, grid.step)
    exact = sum(g.double() for g in own)
    assert not len(found.left)
    bound = world * grid.step / 2 + 2.0**-24 * exact.abs()  # of the grid, and of fp32
    assert bool(((out.double() - exact).abs() <= bound * 1.000001).all())


@pytest.mark.parametrize("spec", ["homomorphic:p=0.02", "homomorphic:p=all", "homomorphic:p=all,bits=4"])
def test_frames_lose_nothing_over_a_hundred_steps(spec):
    codec, memory = gradwire.codec(spec), torch.zeros(5000)
    sent, given_ = torch.zeros(5000, dtype=torch.float64), torch.zeros(5000, dtype=torch.float64)
    for step in range(100):
        g, before = gradient(5000, step), memory.clone()
        decoded = gradwire.decode(encode_into(codec, g, residual=memory))
        check_contract_3(decoded, memory, g, before, 1.0)
        sent, given_ = sent + decoded.double(), given_ + g.double()
    assert float((sent + memory.double() - given_).abs().max()) <= 100 * 2.0**-22 * float(given_.abs().max())


@pytest.mark.parametrize(
    "spec, says",
    [
        ("bits=5", "bits"),
        ("decay=0", "rounding=stochastic and p=all"),
        ("p=0", "above 0"),
        ("p=2", "; or all"),
        ("k=1", "k"),
    ],
)
def test_bad_parameters_say_what_is_allowed(spec, says):
    with pytest.raises(gradwire.SpecError, match=says):
        gradwire.codec(f"homomorphic:{spec}")
