"""Momentum correction in the DDP hook (DGC), with real processes. Every scenario checks itself on every rank."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire import GradwireError, SpecError
from gradwire.aggregate.messages.tensor_parts import TensorPart
from support.rank_pool import WORLD, RankPool, Scenario, named
from support.ranks import Net, Tensors, add_toy_recipe, attach, check_alike, check_raises, digest, loss_of

SPEC = "toy:p=0.1,mask=on"


def make() -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(Net(), bucket_cap_mb=0.001)


def sgd(model: nn.Module, **options: object) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.05, "momentum": 0.9, **options})


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, number: int) -> None:
    optimizer.zero_grad()
    loss_of(model, rank, number).backward()
    optimizer.step()


def velocity_of(handle: gradwire.ddp.Handle) -> Tensors:
    return handle.state_dict()["velocity"]


def close(model: DistributedDataParallel, expected: nn.Module) -> None:
    for (name, a), b in zip(model.module.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6, msg=name)


def largest(u: torch.Tensor, p: float) -> torch.Tensor:
    flat = u.reshape(-1)
    kept = flat.abs().topk(-(-len(flat) // round(1 / p))).indices
    return torch.zeros_like(flat).index_copy_(0, kept, flat[kept]).view_as(u)


def equations_of_dgc(rank: int) -> None:
    """All ranks by hand: u ← m·u + g, v ← v + u, send the largest of v, clear both there; biases are sent whole.

    The momentum changes midway, as schedulers do it; weight decay comes before momentum, as in SGD.
    """
    for nesterov, decay in ((False, 0.0), (True, 0.0), (False, 0.01)):
        model = make()
        optimizer = sgd(model, nesterov=nesterov, weight_decay=decay)
        handle = attach(model, {"*.bias": "none", "norm*": "none", "*": SPEC}, optimizer=optimizer)
        expected = copy.deepcopy(model.module)
        plain = [n for n, _ in expected.named_parameters() if n.endswith("bias") or n.startswith("norm")]
        u = {n: [torch.zeros_like(p) for _ in range(WORLD)] for n, p in expected.named_parameters()}
        v = copy.deepcopy(u)
        for i in range(5):
            momentum = optimizer.param_groups[0]["momentum"] = 0.9 if i < 3 else 0.5
            step(model, optimizer, rank, i)
            sums: Tensors = {}
            for r in range(WORLD):
                expected.zero_grad()
                loss_of(expected, r, i).backward()
                for name, p in expected.named_parameters():
                    g = p.grad + decay * p.detach()
                    u[name][r] = momentum * u[name][r] + g
                    passed_on = g + momentum * u[name][r] if nesterov else u[name][r]
                    if name in plain:
                        sent = passed_on
                    else:
                        v[name][r] = v[name][r] + passed_on
                        sent = largest(v[name][r], 0.1)
                        v[name][r] = v[name][r].masked_fill(sent != 0, 0)
                        u[name][r] = u[name][r].masked_fill(sent != 0, 0)
                    sums[name] = sums.get(name, 0) + sent.detach()
            with torch.no_grad():
                for name, p in expected.named_parameters():
                    p.sub_(0.05 * sums[name] / WORLD)
            close(model, expected)
        for name, velocity in velocity_of(handle).items():
            own = sum(u[name]) / WORLD if name in plain else u[name][rank]
            torch.testing.assert_close(velocity, own.detach(), rtol=1e-3, atol=1e-5)
            assert bool((velocity == 0).any()) == (name not in plain)
        check_alike(model.module)


def what_is_not_masked_is_plain_sgd(rank: int) -> None:
    """Taken over, but no parameter masked: the same as an optimizer that nobody has touched."""
    for options in ({}, {"nesterov": True, "weight_decay": 0.01}, {"weight_decay": 0.01, "maximize": True}):
        model, expected = make(), make()
        optimizer, untouched = sgd(model, lr=0.01, **options), sgd(expected, lr=0.01, **options)
        handle = attach(model, {"nobody": SPEC, "*": "none"}, optimizer=optimizer)
        for i in range(5):
            step(model, optimizer, rank, i)
            step(expected, untouched, rank, i)
        close(model, expected.module)
        assert len(velocity_of(handle)) == 8 and not optimizer.state


def only_one_pattern_masks(rank: int) -> None:
    model = make()
    optimizer = sgd(model)
    handle = attach(model, {"big.weight": SPEC, "*": "co3"}, optimizer=optimizer)
    for i in range(3):
        step(model, optimizer, rank, i)
    zeros = {name: int((v == 0).sum()) for name, v in velocity_of(handle).items()}
    assert zeros["big.weight"] >= 448
    assert zeros["last.weight"] == 0
    check_alike(model.module)


def rolled_back(rank: int) -> None:
    """A NaN on one rank: velocity and memory of all stay as they were, bit for bit."""
    model = make()
    optimizer = sgd(model)
    handle = attach(model, {"*.bias": "none", "*": SPEC}, optimizer=optimizer)
    for i in range(2):
        step(model, optimizer, rank, i)
    before = [digest(handle.state_dict()[key]) for key in ("velocity", "memory")]
    optimizer.zero_grad()
    (loss_of(model, rank, 2) * (torch.nan if rank == 1 else 1)).backward()
    assert not bool(model.module.big.weight.grad.isfinite().all())
    assert [digest(handle.state_dict()[key]) for key in ("velocity", "memory")] == before
    step(model, optimizer, rank, 3)
    assert [digest(handle.state_dict()[key]) for key in ("velocity", "memory")] != before
    check_alike(model.module)
    assert bool(model.module.big.weight.isfinite().all())


def saved_and_loaded(rank: int) -> None:
    """Velocity is part of the state; the optimizer's groups always show the momentum that the user gave."""

    def fresh() -> tuple[DistributedDataParallel, torch.optim.Optimizer, gradwire.ddp.Handle]:
        model = make()
        optimizer = sgd(model)
        return model, optimizer, attach(model, SPEC, optimizer=optimizer)

    model, optimizer, handle = fresh()
    for i in range(5):
        if i == 2:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), handle.state_dict()))
        step(model, optimizer, rank, i)
    for forget in (False, True):
        other, other_optimizer, other_handle = fresh()
        other.load_state_dict(saved[0])
        other_optimizer.load_state_dict(saved[1])
        other_handle.load_state_dict({**saved[2], "velocity": {}} if forget else saved[2])
        assert other_optimizer.param_groups[0]["momentum"] == 0.9
        for i in range(2, 5):
            step(other, other_optimizer, rank, i)
        assert (check_alike(other.module) == check_alike(model.module)) == (not forget)


def taken_and_given_back(rank: int) -> None:
    """In the midst of training: the optimizer's velocity goes along; later it starts again from zero."""
    model, expected = make(), make()
    optimizer, untouched = sgd(model), sgd(expected)
    for i in range(2):
        step(model, optimizer, rank, i)
        step(expected, untouched, rank, i)
    handle = attach(model, {"nobody": SPEC, "*": "none"}, optimizer=optimizer)
    for i in range(2, 4):
        step(model, optimizer, rank, i)
        step(expected, untouched, rank, i)
    close(model, expected.module)
    check_raises(SpecError, "unknown recipe", lambda: attach(model, "nothing", optimizer=optimizer))
    check_raises(
        GradwireError, "another model has taken over", lambda: gradwire.ddp.State(SPEC, model.module, None, optimizer)
    )
    step(model, optimizer, rank, 4)  # what was attached before is still at work
    step(expected, untouched, rank, 4)
    close(model, expected.module)
    assert not any(optimizer.state.values())
    handle.detach()
    for p in expected.parameters():
        untouched.state[p]["momentum_buffer"].zero_()
    for i in range(5, 7):
        step(model, optimizer, rank, i)
        step(expected, untouched, rank, i)
    close(model, expected.module)
    again = attach(model, SPEC, optimizer=optimizer)
    again = attach(model, SPEC, optimizer=optimizer)  # straight after another one
    step(model, optimizer, rank, 7)
    assert len(velocity_of(again)) == 8
    check_alike(model.module)


def a_step_that_fails(rank: int) -> None:
    """Raises in the middle: the groups have their momentum again when it counts."""
    model = make()
    optimizer = sgd(model)
    attach(model, SPEC, optimizer=optimizer)
    step(model, optimizer, rank, 0)

    def closure() -> None:
        raise KeyError("mine")

    check_raises(KeyError, "mine", lambda: optimizer.step(closure))
    step(model, optimizer, rank, 1)
    assert optimizer.param_groups[0]["momentum"] == 0.9
    check_alike(model.module)


def recording(source: Callable[..., torch.Tensor], found: Tensors) -> Callable[..., torch.Tensor]:
    def record(part: TensorPart) -> torch.Tensor:
        found[part.name] = source(part)
        return found[part.name]

    return record


def clipping(rank: int) -> None:
    """A tensor's share of the norm, and this rank's of the mean: clip·√(n / total / ranks)."""
    for clip, clipped in ((0.003, True), (1000, False)):
        model = make()
        handle = attach(model, f"toy:p=1,clip_norm={clip}")
        pushed: Tensors = {}
        coder = handle.state.exchange.coder
        coder.corrected = recording(coder.corrected, pushed)
        loss_of(model, rank, 0).backward()
        total = sum(p.numel() for p in model.parameters())
        for tensor in pushed.values():
            limit = clip * (tensor.numel() / total / WORLD) ** 0.5
            assert float(tensor.norm()) <= limit * 1.0001
            assert (float(tensor.norm()) > limit * 0.999) == clipped


def refusals(rank: int) -> None:
    model = make()
    optimizer = sgd(model)
    check_raises(SpecError, "pass optimizer=", lambda: attach(model, SPEC))
    check_raises(SpecError, "pass optimizer=", lambda: attach(model, {"big*": SPEC, "*": "co3"}))
    check_raises(SpecError, "pass optimizer=", lambda: gradwire.ddp.State(SPEC, model))
    check_raises(SpecError, "needs the model too", lambda: gradwire.ddp.State(SPEC, optimizer=optimizer))
    adam = torch.optim.Adam(model.parameters())
    check_raises(SpecError, "not Adam: use gradwire.LocalSGD", lambda: attach(model, SPEC, optimizer=adam))
    dampened = sgd(model, dampening=0.1)
    check_raises(SpecError, "dampening=0", lambda: attach(model, SPEC, optimizer=dampened))
    foreign = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)
    check_raises(SpecError, "parameters of another model", lambda: attach(model, SPEC, optimizer=foreign))
    check_raises(SpecError, "scope=tensor", lambda: attach(model, "toy:scope=model"))
    check_raises(SpecError, "only every 10 steps", lambda: attach(model, "toy:sync_every=10"))
    check_raises(SpecError, "needs the model", lambda: gradwire.ddp.State("toy:clip_norm=1"))
    attach(model, "toy:mask=off", optimizer=adam)  # not needed, and not looked at
    attach(model, SPEC, optimizer=optimizer)


SCENARIOS = [
    equations_of_dgc, what_is_not_masked_is_plain_sgd, only_one_pattern_masks, rolled_back, saved_and_loaded,
    taken_and_given_back, a_step_that_fails, clipping, refusals,
]  # fmt: skip
QUICK = {
    "equations_of_dgc",
    "only_one_pattern_masks",
    "rolled_back",
    "saved_and_loaded",
    "a_step_that_fails",
    "refusals",
}


@pytest.mark.parametrize("scenario", named(SCENARIOS, QUICK))
def test_momentum_on_three_ranks(ranks: RankPool, scenario: Scenario) -> None:
    ranks.check(scenario, seconds=20, setup=add_toy_recipe)
