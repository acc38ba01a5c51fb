"""Clipping after the backward pass: right with most recipes, and noticed where a recipe has taken over the momentum."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from support.rank_pool import RankPool, Scenario, named
from support.ranks import Layers

WORLD = 2
DGC = "dgc:warmup=0,p=0.05,small=same"
Wrap = Callable[[nn.Module, torch.optim.Optimizer, str], nn.Module]
Change = Callable[[nn.Module, int], None]


def attached(inner: nn.Module, optimizer: torch.optim.Optimizer, spec: str, **options: object) -> nn.Module:
    model = DistributedDataParallel(inner, gradient_as_bucket_view=spec.startswith("stc"))
    gradwire.ddp.attach(model, spec, optimizer=optimizer, **options)
    return model


def data_parallel(inner: nn.Module, optimizer: torch.optim.Optimizer, spec: str, **options: object) -> nn.Module:
    return gradwire.DataParallel(inner, spec, optimizer=optimizer, **options)


def clip_the_norm(model: nn.Module, step: int) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def clip_values(model: nn.Module, step: int) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 1e-4)


def clip_nothing(model: nn.Module, step: int) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e9)


def divide_by_three(model: nn.Module, step: int) -> None:
    for parameter in model.parameters():
        parameter.grad /= 3


def warnings_of(wrap: Wrap, spec: str, change: Change, rank: int, scaler: torch.amp.GradScaler | None = None) -> list:
    torch.manual_seed(0)
    inner = Layers(3)
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.05, momentum=0.9)
    model = wrap(inner, optimizer, spec) if scaler is None else wrap(inner, optimizer, spec, grad_scaler=scaler)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(4):
            optimizer.zero_grad()
            loss = model(torch.randn(8, 12, generator=torch.Generator().manual_seed(10 * step + rank))).pow(2).mean()
            if scaler is None:
                loss.backward()
                change(model, step)
                optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                change(model, step)
                scaler.step(optimizer)
                scaler.update()
    return [str(w.message) for w in caught if "clip_norm" in str(w.message)]


def clipping_is_noticed_once(rank: int) -> None:
    for wrap in (attached, data_parallel):
        for spec in (DGC, "stc:p=0.05"):
            for change in (clip_the_norm, clip_values):
                said = warnings_of(wrap, spec, change, rank)
                assert len(said) == 1 and f"'{spec.split(':')[0]}:clip_norm=1'" in said[0], (spec, said)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        assert len(warnings_of(wrap, DGC, clip_the_norm, rank, scaler)) == 1


def what_does_no_harm_is_not(rank: int) -> None:
    """A limit that is never reached, a factor that stays the same, a loss scale that grows; and other recipes."""
    for wrap in (attached, data_parallel):
        for change in (clip_nothing, divide_by_three, lambda model, step: None):
            assert not warnings_of(wrap, DGC, change, rank)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        assert not warnings_of(wrap, DGC, clip_nothing, rank, scaler)
        for spec in ("co3", "dgc:warmup=0,mask=off"):
            assert not warnings_of(wrap, spec, clip_the_norm, rank)
        assert not warnings_of(wrap, f"{DGC},clip_norm=0.1", lambda model, step: None, rank)


@pytest.mark.parametrize("scenario", named([clipping_is_noticed_once, what_does_no_harm_is_not]))
def test_on_two_ranks(ranks: RankPool, scenario: Scenario) -> None:
    ranks.check(scenario, WORLD)
