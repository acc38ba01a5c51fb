"""Units of Adam's steps: powers of two by its second moments, which conserve what they scale."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire import SpecError
from gradwire.correct.adam_units import (
    RANGE,
    check_adam,
    checksum,
    exponents_of,
    measure_units,
    power_of_two,
    units_of,
)


@given(st.integers(0, 2**32), st.integers(1, 500), st.floats(0.1, 6), st.sampled_from([1e-8, 1e-4]))
@settings(max_examples=50, deadline=None)
def test_units_are_the_powers_of_two_next_to_the_step(seed: int, count: int, spread: float, epsilon: float) -> None:
    torch.manual_seed(seed % 2**31)
    moment = torch.exp(spread * torch.randn(count)) * 1e-6
    units = units_of(moment, 1.0, epsilon)
    steps = (moment.double().sqrt() + epsilon) * power_of_two(units).double()
    inside = units.abs() < RANGE
    assert units.dtype == torch.int8 and int(units.abs().max()) <= RANGE
    assert int(units.median()) == 0
    if bool(inside.any()):  # all steps are alike but for a factor of two
        assert float(steps[inside].max() / steps[inside].min()) < 2.001
    assert torch.equal(exponents_of(power_of_two(units)), units)


def test_dead_entries_get_the_largest_unit() -> None:
    moment = torch.ones(9)
    moment[3] = 0
    units = units_of(moment, 1.0, 1e-8)
    assert units.tolist() == [0, 0, 0, RANGE, 0, 0, 0, 0, 0]
    assert not units_of(torch.zeros(5), 1.0, 1e-8).any()


def test_scaling_conserves_every_bit() -> None:
    torch.manual_seed(0)
    gradient = torch.randn(1000)
    factors = power_of_two(torch.randint(-RANGE, RANGE + 1, (1000,)).to(torch.int8))
    assert torch.equal(gradient.mul(factors).div(factors), gradient)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam])
def test_moments_of_every_adam_are_found(kind: type[torch.optim.Optimizer]) -> None:
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(4, 3)), torch.nn.Parameter(torch.randn(5))]
    named = [("a", parameters[0]), ("b", parameters[1]), ("other", torch.nn.Parameter(torch.randn(2)))]
    optimizer = kind([{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.1}])
    check_adam(optimizer, named)
    assert measure_units(optimizer, named) == {}
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter) * 10.0 ** torch.arange(parameter.shape[-1])
    optimizer.step()
    units = measure_units(optimizer, named)
    assert set(units) == {"a", "b"} and units["a"].shape == (4, 3)
    assert bool((units["b"][0] > units["b"][-1]).all())  # small gradients count for more
    assert checksum(units) != checksum({**units, "b": units["b"] + 1})
    assert checksum(units) == checksum({name: unit.clone() for name, unit in units.items()})


@pytest.mark.parametrize("shape", [(6, 4, 3, 3), (7, 5)])
def test_moments_may_lie_in_any_order(shape: tuple[int, ...]) -> None:
    """Parameters in channels_last, and transposed ones, have moments that lie as they do."""
    torch.manual_seed(0)
    moment = torch.exp(3 * torch.randn(shape))
    order = moment.to(memory_format=torch.channels_last) if len(shape) == 4 else moment.t().contiguous().t()
    assert not order.is_contiguous()
    units = units_of(order, 1.0, 1e-8)
    assert units.is_contiguous() and torch.equal(units, units_of(moment, 1.0, 1e-8))


def test_other_optimizers_are_refused() -> None:
    own = [("a", torch.nn.Parameter(torch.ones(2)))]
    with pytest.raises(SpecError, match="SGD keeps none that it knows: use structured or co3"):
        check_adam(torch.optim.SGD([own[0][1]], lr=0.1), own)
    with pytest.raises(SpecError, match=r"none of the parameters .*'a'.*pass the optimizer of this model"):
        check_adam(torch.optim.Adam([torch.nn.Parameter(torch.ones(2))]), own)
