"""Parameters that a rank, or no rank, uses in a step: what their error memories hold is kept until it is sent.

DDP leaves the gradient of a parameter alone that no rank used, so what was sent for it would be lost.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from support.rank_pool import WORLD, RankPool, Scenario, named
from support.ranks import Layers, Tensors, check_alike, digest, gathered

DECAY = float(torch.tensor(0.9))
LEFT_OUT = [(), (1,), (1,), (0, 3), (1, 2), (), (2,)]  # by all ranks, in each step; each rank leaves out more


def make_ddp(aggregate: str) -> tuple[nn.Module, gradwire.ddp.DDPHandle]:
    ddp = DistributedDataParallel(Layers(4, 20), bucket_cap_mb=0.001, find_unused_parameters=True)
    return ddp, gradwire.ddp.attach(ddp, "co3", aggregate=aggregate)


def make_data_parallel(aggregate: str) -> tuple[nn.Module, gradwire.Handle]:
    model = gradwire.DataParallel(Layers(4, 20), "co3", aggregate=aggregate)
    return model, model.gradwire


def memories(handle: gradwire.Handle, names: list[str]) -> dict[str, Tensors]:
    """Its own, and its part of the shards', which count for all ranks."""
    state = handle.state_dict()
    zeros = {name: torch.zeros(()) for name in names}
    return {"own": zeros | state["memory"], "shards": zeros | state.get("shards", {})}


def gradients(model: nn.Module, x: torch.Tensor, without: tuple[int, ...]) -> Tensors:
    """This rank's, as they would be on its own."""
    named = dict(model.module.named_parameters())
    found = torch.autograd.grad(model.module(x, without).pow(2).mean(), list(named.values()), allow_unused=True)
    return {name: g for name, g in zip(named, found, strict=True) if g is not None}


def nothing_is_lost(rank: int, make: Callable, aggregate: str) -> None:
    """W·ḡ + Σe′ + W·Σs′ = Σ(g + γe) + W·γΣs over the ranks that used it; others keep e. Nobody: all stays."""
    torch.manual_seed(0)
    model, handle = make(aggregate)
    names = [name for name, _ in model.module.named_parameters()]
    for step, by_all in enumerate(LEFT_OUT):
        without = (*by_all, rank) if step % 2 else by_all
        x = torch.randn(8, 20, generator=torch.Generator().manual_seed(10 * step + rank))
        true, before = gradients(model, x, without), memories(handle, names)
        model.zero_grad()
        model(x, without).pow(2).mean().backward()
        after = memories(handle, names)
        everyone = gathered((true, before, after))
        for name, parameter in model.module.named_parameters():
            users = [rank for rank, (true, _, _) in enumerate(everyone) if name in true]
            if name not in true:
                assert torch.equal(before["own"][name], after["own"][name]), f"{name}, step {step}: kept"
            if not users:
                assert parameter.grad is None
                assert torch.equal(before["shards"][name], after["shards"][name]), f"{name}, step {step}: shards kept"
                continue
            old = [everyone[r][1]["own"][name].double() * DECAY for r in users]
            new = [everyone[r][2]["own"][name].double() for r in users]
            sums = [everyone[r][0][name].double() for r in users]
            kept = [WORLD * (a["shards"][name].double() - DECAY * b["shards"][name].double()) for _, b, a in everyone]
            gap = WORLD * parameter.grad.double() + sum(new) + sum(kept) - sum(sums) - sum(old)
            size = sum(t.abs() for t in (*old, *new, *sums, *kept)) + WORLD * parameter.grad.double().abs()
            assert bool((gap.abs() <= 2.0**-21 * size + 1e-30).all()), f"{name}, step {step}"
        means = gathered(digest({n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
        assert len(set(means)) == 1, f"step {step}: ranks differ"
    assert all(bool(before["own"][name].any()) for name in names), "there was something to keep"


def momentum_is_kept(rank: int) -> None:
    """Where the recipe has taken it over: a step that no rank uses a parameter in is none for it."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Layers(4, 80), bucket_cap_mb=0.001, find_unused_parameters=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    handle = gradwire.ddp.attach(ddp, "dgc:warmup=0", optimizer=optimizer)
    for step, without in enumerate([(), (), (1,), (1,), ()]):
        before, old = handle.state_dict(), ddp.module.layers[1].weight.detach().clone()
        optimizer.zero_grad()
        ddp(torch.randn(8, 80, generator=torch.Generator().manual_seed(10 * step + rank)), without).sum().backward()
        optimizer.step()
        after = handle.state_dict()
        for kind in ("memory", "velocity") if step else ():
            same = torch.equal(before[kind]["layers.1.weight"], after[kind]["layers.1.weight"])
            assert same == (1 in without), f"{kind}, step {step}"
        assert torch.equal(old, ddp.module.layers[1].weight) == (1 in without), f"step {step}"
    check_alike(ddp.module)


def names_of_compiled_models(rank: int) -> None:
    """Are those without torch.compile."""
    compiled = DistributedDataParallel(torch.compile(Layers(), backend="eager"))
    handle = gradwire.ddp.attach(compiled, {"layers.1.*": "none", "layers.*": "co3"})
    compiled(torch.ones(2, 12)).sum().backward()
    assert set(handle.state_dict()["memory"]) == {
        f"layers.{i}.{kind}" for i in (0, 2, 3) for kind in ("weight", "bias")
    }
    around = torch.compile(DistributedDataParallel(Layers()), backend="eager")
    assert gradwire.ddp.attach(around, "bf16").recipe == "bf16"
    data_parallel = gradwire.DataParallel(torch.compile(Layers(), backend="eager"), {"layers.*": "co3"})
    data_parallel(torch.ones(2, 12)).sum().backward()
    assert "layers.0.weight" in data_parallel.gradwire.state_dict()["memory"]
    dist.barrier()


SCENARIOS: dict[str, Scenario] = {
    f"{name} {aggregate}": partial(nothing_is_lost, make=make, aggregate=aggregate)
    for name, make in (("ddp", make_ddp), ("data_parallel", make_data_parallel))
    for aggregate in ("all_gather", "scatter_reduce")
}
SCENARIOS |= {"momentum_is_kept": momentum_is_kept, "names_of_compiled_models": names_of_compiled_models}
QUICK = {"ddp all_gather", "data_parallel scatter_reduce", "momentum_is_kept"}


@pytest.mark.parametrize("scenario", named(SCENARIOS, QUICK))
def test_parts_left_out_on_three_ranks(ranks: RankPool, scenario: Scenario) -> None:
    ranks.check(scenario, seconds=30)
