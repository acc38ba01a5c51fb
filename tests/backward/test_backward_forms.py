"""The two forms: gradients for any optimizer, and the paper's, where rows are remembered times √η."""

from __future__ import annotations

import copy
import io
import math
import re

import pytest
import torch
from torch import nn

import gradwire
from gradwire.backward import convert
from gradwire.errors import GradwireError, SpecError
from support.helpers import bits
from support.plain_rows import PlainRows, close


def batch(step: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    sizes = torch.rand(12, 1, generator=generator)
    return (torch.randn(12, 6, generator=generator) * sizes).to(dtype), torch.randn(12, 5, generator=generator).to(
        dtype
    )


def pair(rate: float, dtype: torch.dtype = torch.float32, **options: object) -> tuple[nn.Linear, torch.optim.SGD]:
    torch.manual_seed(0)
    layer = nn.Linear(6, 5, dtype=dtype)
    optimizer = torch.optim.SGD(layer.parameters(), lr=rate)
    return convert(layer, 3, optimizer=optimizer, **options), optimizer


def gradient(layer: nn.Module, step: int) -> torch.Tensor:
    layer.zero_grad()
    x, d = batch(step, layer.weight.dtype)
    layer(x).backward(d)
    return layer.weight.grad


def test_they_are_the_same_training_while_the_rate_does_not_change():
    paper, _ = pair(0.05)
    layer = gradwire.backward.Linear(6, 5, k=3)
    for step in range(10):
        close(gradient(paper, step), gradient(layer, step).double().numpy())
        close(paper.memory.inputs, layer.memory.inputs.double().numpy() * math.sqrt(0.05))


@pytest.mark.parametrize("decay", [1.0, 0.6])
def test_what_is_remembered_counts_with_the_rate_of_its_own_time(decay):
    """Checked against the paper's algorithm, which folds √η into the factors, and whose product is the step."""
    layer, optimizer = pair(0.05, decay=decay)
    other, constant = PlainRows(6, 5, decay), PlainRows(6, 5, decay)
    differ = 0
    for step in range(12):
        rate = optimizer.param_groups[0]["lr"] = 0.05 / (1 + step)
        x, d = batch(step)
        expected, before = other.gradient(x, d, 3, rate), layer.weight.detach().clone()
        close(gradient(layer, step), expected)
        differ += abs(expected - constant.gradient(x, d, 3)).max() > 0.1
        optimizer.step()
        close(layer.weight - before, -rate * expected, 2e-4)  # of parameters of 0.4, steps of 0.005 are left
        close(layer.memory.outputs, other.left()[1])
    assert differ > 6, "with a rate that changes, the forms are not the same"


@pytest.mark.parametrize("rate", [0.0, 1e-320, 1e-80])
def test_a_rate_of_zero_waits(rate):
    """A warm-up starts there, and an exponential decay passes by what fp32 cannot hold: nothing can be applied, so
    nothing is taken from the memory or put into it."""
    layer, optimizer = pair(0.1)
    gradient(layer, 0)
    before = bits(layer.memory.inputs), bits(layer.memory.outputs)
    optimizer.param_groups[0]["lr"] = rate
    assert not gradient(layer, 1).any() and layer.bias.grad.any()
    assert (bits(layer.memory.inputs), bits(layer.memory.outputs)) == before
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    assert gradient(layer, 2).any()
    assert bits(layer.memory.inputs) != before[0]


def test_groups_have_rates_of_their_own():
    model = nn.ModuleList([nn.Linear(6, 5), nn.Linear(6, 5)])
    groups = [{"params": model[0].parameters(), "lr": 0.25}, {"params": model[1].parameters(), "lr": 0.01}]
    convert(model, 3, optimizer=torch.optim.SGD(groups))
    for layer, rate in zip(model, (0.25, 0.01), strict=True):
        gradient(layer, 0)
        left = PlainRows(6, 5)
        left.gradient(*batch(0), 3, rate)
        close(layer.memory.inputs, left.left()[0])


@pytest.mark.parametrize("rate", [1e-6, 1e-3])
def test_half_precision_and_small_rates(rate):
    """√η is a matter of the memory: rows that are multiplied are as large as they came, whatever the rate."""
    layer, _ = pair(rate, torch.float16)
    plain = PlainRows(6, 5)
    for step in range(6):
        x, d = (t * 1e-3 for t in batch(step, torch.float16))
        layer.zero_grad()
        layer(x).backward(d * 1e6)
        close(layer.weight.grad, plain.gradient(x, d * 1e6, 3), 4e-3)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), torch.optim.Adam, torch.optim.AdamW,
    ],
)  # fmt: skip
def test_other_optimizers_are_refused_and_work_without(make):
    layer = nn.Linear(6, 5)
    optimizer = make(layer.parameters())
    way_out = "leave optimizer= out (if it was given before, call gradwire.backward.revert(model) first)"
    with pytest.raises(SpecError, match=re.escape(f"{way_out}: the other form works with every optimizer")):
        convert(layer, 3, optimizer=optimizer)
    assert type(layer) is nn.Linear
    convert(layer, 3)
    before = layer.weight.detach().clone()
    gradient(layer, 0)
    optimizer.step()
    assert bool((layer.weight != before).any())


def test_momentum_that_comes_later_is_refused():
    """A state that is loaded brings its own."""
    layer, optimizer = pair(0.1)
    gradient(layer, 0)
    optimizer.load_state_dict(torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9).state_dict())
    with pytest.raises(SpecError, match="without momentum"):
        gradient(layer, 1)


def test_a_weight_that_the_optimizer_does_not_have():
    layer, other = nn.Linear(6, 5), nn.Linear(6, 5)
    convert(layer, 3, optimizer=torch.optim.SGD(other.parameters(), lr=0.1))
    with pytest.raises(GradwireError, match=r"is not in the optimizer .* leave optimizer= out"):
        gradient(layer, 0)


def test_a_copy_does_not_take_the_optimizer_with_it():
    """A copied optimizer would keep the learning rate of the moment: the copy says that it has none of its own."""
    layer, optimizer = pair(0.1)
    gradient(layer, 0)
    other = copy.deepcopy(layer)
    assert other.scales.optimizer is optimizer
    with pytest.raises(GradwireError, match="is not in the optimizer"):
        gradient(other, 1)
    new = torch.optim.SGD(other.parameters(), lr=0.1)
    convert(other, 3, optimizer=new)
    assert bits(gradient(other, 1)) == bits(gradient(layer, 1))


def test_a_whole_model_can_be_saved():
    layer, _ = pair(0.1)
    gradient(layer, 0)
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    other = torch.load(buffer, weights_only=False)
    assert bits(gradient(other, 1)) == bits(gradient(layer, 1))
