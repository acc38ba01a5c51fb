"""Models that are changed after they were wrapped: no parameter is trained without being averaged, silently."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire import GradwireError
from support.rank_pool import RankPool, Scenario, named
from support.ranks import Layers, check_raises, digest, gathered

WORLD = 2


def batch(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(8, 12, generator=torch.Generator().manual_seed(100 * step + rank))


def train(model: nn.Module, rank: int, steps: int = 2) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(rank, step)).pow(2).mean().backward()
        optimizer.step()


def check_alike(model: nn.Module) -> None:
    assert len(set(gathered(digest({name: p.detach() for name, p in model.named_parameters()})))) == 1


def replace_a_layer(inner: Layers) -> str:
    inner.layers[2] = nn.Linear(12, 12)
    return "'layers.2.weight' came into the model after it was wrapped"


def add_a_layer(inner: Layers) -> str:
    inner.layers.append(nn.Linear(12, 12))
    return "'layers.4.weight' came into the model after it was wrapped"


def replace_a_parameter(inner: Layers) -> str:
    inner.layers[0].bias = nn.Parameter(torch.zeros(12))
    return "'layers.0.bias' came into the model after it was wrapped"


def parametrize_a_layer(inner: Layers) -> str:
    nn.utils.parametrizations.weight_norm(inner.layers[1])
    return "'layers.1.parametrizations.weight.original0' came into"


CHANGES = (replace_a_layer, add_a_layer, replace_a_parameter, parametrize_a_layer)


def new_parameters_are_an_error_of_data_parallel(rank: int) -> None:
    """At the next forward pass; where that is compiled, or goes past the wrapper, at the next backward pass."""
    for change in CHANGES:
        for way in ("forward", "backward"):
            torch.manual_seed(0)
            inner = Layers()
            model = gradwire.DataParallel(inner, "co3")
            train(model, rank)
            message = change(inner)
            called = model if way == "forward" else inner
            with torch.no_grad():
                called(batch(rank))  # nothing is trained here
            check_raises(GradwireError, message, lambda called=called: train(called, rank))
            model.gradwire.detach()
            model = gradwire.DataParallel(inner, "co3")
            train(model, rank)
            check_alike(inner)


def frozen_ones_count_when_they_are_thawed(rank: int) -> None:
    inner = Layers()
    model = gradwire.DataParallel(inner, "co3")
    inner.layers.append(nn.Linear(12, 12).requires_grad_(False))
    train(model, rank)
    inner.layers[4].requires_grad_(True)
    check_raises(GradwireError, "'layers.4.weight' came into the model", lambda: train(model, rank))
    inner.layers[4].requires_grad_(False)
    train(model, rank)


def changes_that_leave_all_averaged(rank: int) -> None:
    """Layers that are removed, tied or frozen, and another dtype: the training goes on, alike on all ranks."""
    for wrap in (lambda m: gradwire.DataParallel(m, "co3"), attached):
        torch.manual_seed(0)
        inner = Layers()
        model = wrap(inner)
        train(model, rank)
        inner.layers[1].requires_grad_(False)
        train(model, rank)
        inner.layers[1].requires_grad_(True)
        train(model, rank)
        inner.layers[3].weight = inner.layers[0].weight
        train(model, rank)
        del inner.layers[2]
        train(model, rank)
        check_alike(inner)


def attached(inner: nn.Module) -> nn.Module:
    model = DistributedDataParallel(inner, find_unused_parameters=True)
    gradwire.ddp.attach(model, "co3")
    return model


def another_dtype_after_wrapping(rank: int) -> None:
    torch.manual_seed(0)
    inner = Layers()
    model = gradwire.DataParallel(inner, "co3")
    train(model, rank)
    inner.double()
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.05)
    model(batch(rank).double()).pow(2).mean().backward()
    optimizer.step()
    assert inner.layers[0].weight.grad.dtype == torch.float64
    check_alike(inner)


def new_parameters_are_a_warning_of_ddp(rank: int) -> None:
    for change in CHANGES:
        torch.manual_seed(0)
        inner = Layers()
        model = attached(inner)
        train(model, rank)
        message = change(inner)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train(model, rank)
        said = [str(w.message) for w in caught if "drifts apart" in str(w.message)]
        assert len(said) == 1 and message in said[0], said


def new_parameters_are_an_error_of_local_sgd(rank: int) -> None:
    for change in CHANGES:
        torch.manual_seed(0)
        inner = Layers()
        optimizer = torch.optim.SGD(inner.parameters(), lr=0.05)

        def steps(inner: Layers = inner, optimizer: torch.optim.Optimizer = optimizer) -> None:
            inner(batch(rank)).pow(2).mean().backward()
            optimizer.step()

        local = gradwire.LocalSGD(inner, optimizer, "none", sync_every=1)
        local.__enter__()
        steps()
        name = change(inner).split("'")[1]
        check_raises(GradwireError, name, steps)
        local.__exit__(GradwireError, GradwireError(), None)


def accumulation_by_the_flag_of_ddp(rank: int) -> None:
    """As nanoGPT has it: the same gradients and bytes as with no_sync, and not those of a sum for every part."""
    results = []
    for way in ("flag", "no_sync"):
        torch.manual_seed(0)
        model = gradwire.DataParallel(Layers(), "none")
        for part in range(4):
            if way == "flag":
                model.require_backward_grad_sync = part == 3
                assert model.require_backward_grad_sync == (part == 3)
                model(batch(rank, part)).sum().backward()
            elif part < 3:
                with model.no_sync():
                    model(batch(rank, part)).sum().backward()
            else:
                model(batch(rank, part)).sum().backward()
        figures = model.gradwire.stats()
        assert figures["steps"] == 1, way
        results.append((figures["frame_bytes"], digest({n: p.grad for n, p in model.module.named_parameters()})))
    assert results[0] == results[1]


SCENARIOS = [
    new_parameters_are_an_error_of_data_parallel, frozen_ones_count_when_they_are_thawed,
    changes_that_leave_all_averaged, another_dtype_after_wrapping, new_parameters_are_a_warning_of_ddp,
    new_parameters_are_an_error_of_local_sgd, accumulation_by_the_flag_of_ddp,
]  # fmt: skip


@pytest.mark.parametrize("scenario", named(SCENARIOS))
def test_on_two_ranks(ranks: RankPool, scenario: Scenario) -> None:
    ranks.check(scenario, WORLD)
