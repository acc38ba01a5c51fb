"""ecq: rates and errors are met, it beats CO3's fp4 at equal bytes, and its dithered form is unbiased."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch

import gradwire
from gradwire import SpecError, kernels
from gradwire.convert import grid_fit
from gradwire.convert.grid_fit import LEAST_SHARE
from support.cases import for_each
from support.helpers import check_contract_3, check_same, encode_into, gradient, heavy


def nmse(frame: bytes, tensor: torch.Tensor) -> float:
    error = (gradwire.decode(frame).double() - tensor.double()).square().sum()
    return float(error / tensor.double().square().sum())


@for_each("count", [5_000, 60_000, 300_000, 1_200_000])
@for_each("beta", [0.25, 0.67, 2.0])
@for_each("rate", [0.3, 1.0, 2.0, 3.5, 6.0])
def test_the_rate_is_met(rate, beta, count):
    """All bytes of the payload counted: within 2%, and what a sample may be off by where one decides."""
    frame = gradwire.codec(f"ecq:rate={rate}").encode(heavy(count, 3, beta))
    bits = 8 * (len(frame) - 15)
    chance = 0 if count <= kernels.SAMPLE else 0.5 / math.sqrt(rate * 1000)
    assert bits == pytest.approx(rate * count, rel=0.02 + chance, abs=48)


@for_each("beta", [0.3, 0.67, 2.0])
@for_each("target", [0.3, 0.05, 0.002])
def test_the_error_is_met(target, beta):
    for count, tolerance in ((30_000, 0.02), (400_000, 0.1)):  # of a sample, heavy tails are not all there
        tensor = heavy(count, 5, beta)
        assert nmse(gradwire.codec(f"ecq:nmse={target}").encode(tensor), tensor) == pytest.approx(target, rel=tolerance)


@for_each("beta", [0.3, 0.4, 0.5, 0.67, 1.0, 1.5, 2.0])
def test_at_least_15_percent_less_error_than_fp4_at_the_same_bytes(beta):
    tensor = heavy(60_000, 11, beta)
    co3 = gradwire.codec("co3").encode(tensor)
    rate = 8 * (len(co3) - 15) / tensor.numel()
    ecq = gradwire.codec(f"ecq:rate={rate * 0.99}").encode(tensor)
    assert len(ecq) <= len(co3)
    assert nmse(ecq, tensor) < 0.85 * nmse(co3, tensor)


def test_no_other_grid_is_better():
    """At the rate that it takes, other steps and dead zones do not have a smaller error: the search finds the best."""
    from gradwire.convert.grid_search import SHIFTS, Curve

    for beta, rate in ((0.4, 1.0), (0.67, 2.0), (2.0, 3.0)):
        curve = Curve(heavy(16_000, 2, beta).numpy())
        found = curve.find(bits=rate * curve.count)
        for shift in SHIFTS:
            for quarter in range(-12, 13):
                other = curve.measure(found.step * 2 ** (quarter / 16), shift)
                if other is not None and other.bits <= found.bits:
                    assert other.error >= 0.99 * found.error


def test_dithered_rounding_is_unbiased(backend):
    """Every entry: the mean of hundreds of decoded frames within 6 standard errors; wrong by chance below 1e-6.

    With 2,000 entries and a tail of 2e-9 beyond six (normal approximation; the rounding is between two neighbours,
    so its variance is known exactly: f(1−f)·step²).
    """
    count, rounds = (2000, 400) if backend != "reference" else (200, 100)
    tensor = heavy(count, 4, 0.5)
    tensor[:5] = torch.tensor([0.0, 1e-6, -1e-6, 100.0, -1e4])
    codec = gradwire.codec("ecq:rate=2,rounding=stochastic")
    assert codec.stochastic
    total = torch.zeros(count, dtype=torch.float64)
    for seed in range(rounds):
        decoded = gradwire.decode(codec.encode(tensor, seed=seed)).double()
        total += decoded
    levels = decoded[decoded != 0].abs().min()  # the step: the smallest magnitude there is
    fraction = (tensor.double().abs() / levels) % 1
    deviation = levels * (fraction * (1 - fraction) / rounds).sqrt()
    gap = (total / rounds - tensor.double()).abs()
    assert bool((gap <= 6 * deviation + 1e-6 * tensor.double().abs() + 3 * levels / rounds).all())
    # And the test would see a bias: rounding to nearest has one.
    nearest = gradwire.decode(gradwire.codec("ecq:rate=2").encode(tensor)).double()
    assert not bool(((nearest - tensor.double()).abs() <= 6 * deviation + 3 * levels / rounds).all())


def test_nothing_saturates_in_the_dithered_form(backend):
    """Outliers that the sample does not show, thousands of steps away."""
    tensor = torch.randn(100_000 if backend != "reference" else 67_000)
    tensor[777], tensor[66_000] = 1e6, -3e7
    decoded = gradwire.decode(gradwire.codec("ecq:rounding=stochastic").encode(tensor))
    assert decoded[777] == pytest.approx(1e6, abs=10) and decoded[66_000] == pytest.approx(-3e7, abs=10)


@pytest.mark.parametrize("spec", ["ecq", "ecq:rate=0.05", "ecq:nmse=0.1", "ecq:rate=1,rounding=stochastic"])
def test_what_cannot_reach_the_target_still_travels(backend, spec):
    cases = {
        "constant": torch.full((5000,), -0.37),
        "two values": torch.tensor([1.0, -3.0] * 2500),
        "one of many": torch.nn.functional.one_hot(torch.tensor(4711), 5000).float(),
        "mostly zeros": torch.where(torch.arange(5000) % 5 == 0, heavy(5000), torch.zeros(5000)),
        "one-sided": heavy(5000).abs(),
        "nine entries": heavy(9),
        "subnormal": heavy(5000) * 1e-42,
        "huge": heavy(5000).clamp(-100, 100) * 1e36,
    }
    for name, tensor in cases.items():
        memory = torch.zeros_like(tensor)
        frame = encode_into(gradwire.codec(spec), tensor, residual=memory, decay=1.0)
        sent = gradwire.decode(frame)
        check_contract_3(sent, memory, tensor, torch.zeros_like(tensor), 1.0)
        assert len(frame) < 60 + tensor.numel() * (3 if tensor.numel() > 1000 else 5), name
        if spec == "ecq" and name in ("constant", "two values"):
            assert nmse(frame, tensor) < 1e-4


def test_a_rare_entry_of_a_large_tensor_is_seen():
    """The sample of 65,536 entries need not hold one of the few that are not zero."""
    tensor = torch.zeros(3_000_000)
    tensor[torch.arange(50) * 59_999 + 123] = torch.arange(50).float() + 1
    frame = gradwire.codec("ecq:nmse=0.01").encode(tensor)
    assert nmse(frame, tensor) <= 0.011 and len(frame) < 600


def test_segments_have_their_own_steps(backend):
    parts = [heavy(200, 1) * 1e-6, heavy(1, 2), torch.zeros(40), heavy(700, 3) * 1e3, heavy(30, 4)]
    memory = torch.zeros(sum(map(len, parts)))
    tensor = torch.cat(parts)
    frame = encode_into(
        gradwire.codec("ecq:rate=2.5"), tensor, residual=memory, decay=0.9, segments=[len(p) for p in parts]
    )
    sent = gradwire.decode(frame)
    check_contract_3(sent, memory, tensor, torch.zeros_like(tensor), 0.9)
    for part, back in zip(parts, sent.split([len(p) for p in parts]), strict=True):
        error = (part - back).double().square().sum()
        assert error <= 0.15 * part.double().square().sum()
    assert 8 * len(frame) < 3.2 * len(tensor) + 8 * 60


def test_error_feedback_sends_everything_in_the_end():
    """With γ = 1 the mean of what is sent goes to the gradient as 1/steps."""
    tensor, memory = heavy(4000, 6), torch.zeros(4000)
    codec, total = gradwire.codec("ecq:rate=0.7"), torch.zeros(4000, dtype=torch.float64)
    for _ in range(60):
        total += gradwire.decode(encode_into(codec, tensor, residual=memory, decay=1.0)).double()
    left = (total / 60 - tensor.double()).square().sum() / tensor.double().square().sum()
    assert float(left) < nmse(codec.encode(tensor), tensor) / 50


def test_specs():
    assert str(gradwire.recipe("ecq")) == "ecq:rate=auto,nmse=off,rounding=nearest,decay=0.9"
    assert gradwire.codec("ecq").encode(heavy(500)) == gradwire.codec("ecq:rate=2").encode(heavy(500))
    for bad, allowed in {
        "ecq:rate=0": "0.001 to 8", "ecq:rate=9": "0.001 to 8", "ecq:nmse=1": "1e-05 to 0.99", "ecq:nmse=x": "0.99",
        "ecq:rate=2,nmse=0.1": "either rate=", "ecq:rounding=up": "stochastic", "ecq:step=1": "rate",
    }.items():  # fmt: skip
        with pytest.raises(SpecError, match=allowed):
            gradwire.recipe(bad)


def test_frames_can_be_taken_apart():
    from gradwire.inspection.frames import describe

    for frame in (
        gradwire.codec("ecq:rate=2.4").encode(heavy(3000, 1, 0.3)),
        gradwire.codec("ecq").encode(torch.zeros(100)),
        encode_into(gradwire.codec("ecq"), heavy(300), segments=[100, 200]),
    ):
        report = describe(frame)
        assert report.codec == "grid" and report.frame_bytes == len(frame) and report.format.startswith("grid of ")
    assert len(report.steps) == 2


def test_side_information_leaves_small_tensors_their_symbols():
    """At any size at least three quarters of the rate go into symbols."""
    tensor = heavy(100, 8, 1.0)
    assert nmse(gradwire.codec("ecq:rate=3").encode(tensor), tensor) < 4 * 4 ** (-3 * LEAST_SHARE)
    assert math.isfinite(nmse(gradwire.codec("ecq:rate=0.01").encode(tensor), tensor))
    assert np.isfinite(gradwire.decode(gradwire.codec("ecq").encode(tensor.half())).float().numpy()).all()


def test_a_sample_that_misleads(backend):
    """Everything that the sample does not see is a million times as large: the frame has room, nothing is lost."""
    count = 100_000 if backend == "reference" else 200_000
    index = kernels.sample(torch.arange(count, dtype=torch.float32), None, 0.0).long()
    tensor = heavy(count, 9) * 1e6
    tensor[index] /= 1e6
    for spec in ("ecq", "ecq:nmse=0.05", "ecq:rounding=stochastic"):
        memory = torch.zeros(count)
        frame = encode_into(gradwire.codec(spec), tensor, residual=memory, decay=1.0)
        sent = gradwire.decode(frame)
        check_contract_3(sent, memory, tensor, torch.zeros(count), 1.0)
        assert len(frame) < count * 4


def test_infinities_of_both_signs_pass_without_a_warning() -> None:
    x = gradient(5000)
    x[7], x[8] = torch.inf, -torch.inf
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_same(gradwire.decode(gradwire.codec("ecq").encode(x)), x)


def test_noise_has_no_memory() -> None:
    """Stochastic rounding at low rates: an error memory grows without end. From 1.5 bits on it does not."""
    assert gradwire.recipe("ecq:rate=1,rounding=stochastic").decay == 0
    assert gradwire.recipe("ecq:rate=1.5,rounding=stochastic").decay == 0.9
    with pytest.raises(SpecError, match="use decay=0, or rounding=nearest"):
        gradwire.recipe("ecq:rate=1,rounding=stochastic,decay=0.5")
    codec, memory, norms = gradwire.codec("ecq:rate=1.5,rounding=stochastic"), torch.zeros(5000), []
    for seed in range(60):
        x = heavy(5000, seed, 2.0)
        encode_into(codec, x, residual=memory, decay=1.0, seed=seed)
        norms.append(float(memory.norm() / x.norm()))
    assert max(norms[30:]) < 2


def test_more_outliers_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fit goes by a sample: that none of its sizes would do is no reason to fail, since the encoder makes room."""
    sample = torch.randn(20000, generator=torch.Generator().manual_seed(0)).numpy()
    curve = grid_fit.Curve(sample)
    grid = curve.measure(0.5, 0.0)
    assert grid is not None
    monkeypatch.setattr(kernels, "grid_capacity", lambda count: -1)
    assert grid_fit._coded(curve, grid, len(sample)).grid.largest == grid.largest
