"""The recipe `adam` on real ranks: gradients in units of the optimizer's steps. Scenarios check themselves."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire import AggregateError, CheckpointError, SpecError
from support.rank_pool import RankPool, Scenario, named
from support.ranks import Net, attach, check_alike, check_raises, loss_of

SPEC = "adam:nmse=0.3,start=0.01,warmup=4"


def make() -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(Net(), bucket_cap_mb=0.001)


def adamw(model: nn.Module, **options: object) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), **{"lr": 1e-3, **options})


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    for number in steps:
        optimizer.zero_grad()
        loss_of(model, rank, number).backward()
        optimizer.step()


def values(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def nothing_is_lost(rank: int) -> None:
    """What has arrived and what is left add up to what was computed, also when units change."""
    for aggregate in ("all_gather", "scatter_reduce"):
        model = make()
        optimizer = adamw(model, betas=(0.9, 0.9))
        handle = gradwire.ddp.attach(model, f"{SPEC},decay=1", optimizer=optimizer, aggregate=aggregate)
        exact = copy.deepcopy(model.module)
        sums = {name: torch.zeros_like(p) for name, p in exact.named_parameters()}
        for number in range(12):
            optimizer.zero_grad()
            loss_of(model, rank, number).backward()
            for own, shared in zip(exact.parameters(), model.module.parameters(), strict=True):
                own.data.copy_(shared.data)
                own.grad = None
            for other in range(3):
                (loss_of(exact, other, number) / 3).backward()
            for (name, p), q in zip(model.module.named_parameters(), exact.parameters(), strict=True):
                sums[name] += q.grad - p.grad
            optimizer.step()
        check_alike(model)
        memory = handle.state_dict()["memory"]
        for name, expected in sums.items():
            own = memory.get(name, torch.zeros_like(expected)).clone()
            shards = handle.state_dict().get("shards", {}).get(name)
            if shards is not None:
                own += 3 * shards
            torch.distributed.all_reduce(own)
            torch.testing.assert_close(own / 3, expected, rtol=1e-3, atol=2e-5)
        handle.detach()


def means_are_gradients_again(rank: int) -> None:
    """The mean is that of DDP, but for the codec's error, which is small in the units of the step."""
    model, plain = make(), make()
    optimizer, other = adamw(model), adamw(plain)
    handle = attach(model, "adam:nmse=1e-4,warmup=0,decay=0", optimizer=optimizer)
    for number in range(6):
        for m, o in ((model, optimizer), (plain, other)):
            o.zero_grad()
            loss_of(m, rank, number).backward()
        units = handle.state_dict()["units"]
        assert len(units) == (8 if number else 0)
        for (name, p), q in zip(model.module.named_parameters(), plain.parameters(), strict=True):
            factor = units.get(name, torch.ones(()))
            error, size = float(((p.grad - q.grad) * factor).norm()), float((q.grad * factor).norm())
            assert error <= 0.05 * size, (number, name, error, size)
        optimizer.step()
        other.step()
        with torch.no_grad():
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                q.copy_(p)
        check_alike(model)


def saved_and_loaded(rank: int) -> None:
    """A run that is saved and resumed goes on bit for bit; a damaged state changes nothing."""
    model = make()
    optimizer = adamw(model)
    handle = attach(model, SPEC, optimizer=optimizer)
    train(model, optimizer, rank, range(7))
    saved = copy.deepcopy((model.module.state_dict(), optimizer.state_dict(), handle.state_dict()))
    train(model, optimizer, rank, range(7, 12))

    again = make()
    other = adamw(again)
    resumed = attach(again, SPEC, optimizer=other)
    train(again, other, rank, range(2))  # then DDP has the buckets of later steps, which share their budgets
    again.module.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    broken = copy.deepcopy(saved[2])
    next(iter(broken["units"].values())).neg_()
    check_raises(CheckpointError, "not powers of two", lambda: resumed.load_state_dict(broken))
    resumed.load_state_dict(saved[2])
    train(again, other, rank, range(7, 12))
    assert torch.equal(values(again), values(model))
    assert torch.equal(resumed.state_dict()["memory"]["big.weight"], handle.state_dict()["memory"]["big.weight"])


def optimizers_that_differ(rank: int) -> None:
    """Ranks whose second moments differ are told so, once, and go on without units."""
    model = make()
    optimizer = adamw(model)
    attach(model, "adam:nmse=0.1,warmup=0", optimizer=optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(5):
            train(model, optimizer, rank, range(number, number + 1))
            for state in optimizer.state.values():
                state["exp_avg_sq"].mul_(4.0**rank)
                state["exp_avg_sq"][..., :1].mul_(2.0 ** (9 * rank))
    assert sum("differ between ranks" in str(w.message) for w in caught) == 1


def without_the_optimizer(rank: int) -> None:
    """It does what `structured` does, and says so; other optimizers are refused."""
    model, other = make(), make()
    with pytest.warns(UserWarning, match="pass optimizer="):
        handle = attach(model, "adam:nmse=0.05,warmup=0")
    attach(other, "structured:nmse=0.05")
    for number in range(2):
        for m in (model, other):
            m.zero_grad()
            loss_of(m, rank, number).backward()
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)
    assert "units" not in handle.state_dict()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    check_raises(SpecError, "SGD keeps none", lambda: attach(make(), "adam", optimizer=sgd))


def the_optimizer_on_some_ranks(rank: int) -> None:
    """A rank that was not given its optimizer is named before others wait for its units."""
    model = make()
    optimizer = None if rank == 1 else adamw(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        message = "rank 1 has optimizer= not given, rank 0 given"
        check_raises(AggregateError, message, lambda: attach(model, SPEC, optimizer=optimizer))


def a_step_that_is_skipped(rank: int) -> None:
    """A gradient that is not finite on one rank leaves memories as they were, in their units."""
    model = make()
    optimizer = adamw(model)
    handle = attach(model, SPEC, optimizer=optimizer)
    train(model, optimizer, rank, range(5))
    before = handle.state_dict()["memory"]
    model.zero_grad()
    (loss_of(model, rank, 5) * (float("nan") if rank == 1 else 1.0)).backward()
    after = handle.state_dict()["memory"]
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert any(bool(p.grad.isnan().any()) for p in model.parameters())
    train(model, optimizer, rank, range(6, 9))
    check_alike(model)


def sparse_recipes_warn(rank: int) -> None:
    """The first step of an Adam under a sparse recipe says what that costs, and no other step does."""
    for kind, spec, expected in ((adamw, "topk", 1), (adamw, "co3", 0), (torch.optim.SGD, "topk", 0)):
        model = make()
        optimizer = kind(model.parameters(), lr=0.1) if kind is torch.optim.SGD else kind(model)
        handle = attach(model, spec)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train(model, optimizer, rank, range(3))
        assert sum("costs loss" in str(w.message) for w in caught) == expected, spec
        handle.detach()


SCENARIOS = [
    nothing_is_lost, means_are_gradients_again, saved_and_loaded, optimizers_that_differ, without_the_optimizer,
    the_optimizer_on_some_ranks, a_step_that_is_skipped, sparse_recipes_warn,
]  # fmt: skip


@pytest.mark.parametrize("scenario", named(SCENARIOS))
def test_on_three_ranks(ranks: RankPool, scenario: Scenario) -> None:
    ranks.check(scenario, seconds=60)
