"""Mixed precision: a GradScaler skips the same steps as without gradwire, and error memory follows its scale.

Scales are powers of two, so that multiplying by them is exact. A training whose scale grows and halves must therefore
end, bit for bit, where it ends without a scaler, if it leaves out the steps that overflowed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from support.rank_pool import WORLD, RankPool, Scenario, named
from support.ranks import Layers, Tensors, check_alike, digest, gathered

DECAY = float(torch.tensor(0.9))
STEPS = 12
OVERFLOWS = {2: math.inf, 6: math.nan, 7: -math.inf}  # of one entry of one parameter, on rank 1
Make = Callable[..., tuple[nn.Module, object]]


def plain(spec: str, **options: object) -> tuple[nn.Module, None]:
    return DistributedDataParallel(Layers(4, 20), bucket_cap_mb=0.001), None


def attached(spec: str, **options: object) -> tuple[nn.Module, gradwire.ddp.DDPHandle]:
    model, _ = plain(spec)
    return model, gradwire.ddp.attach(model, spec, **{"aggregate": "all_gather", **options})  # no choice by the clock


def scattered(spec: str, **options: object) -> tuple[nn.Module, gradwire.ddp.DDPHandle]:
    return attached(spec, aggregate="scatter_reduce", **options)


def data_parallel(spec: str, **options: object) -> tuple[nn.Module, gradwire.Handle]:
    model = gradwire.DataParallel(Layers(4, 20), spec, aggregate="all_gather", **options)
    return model, model.gradwire


WRAPPERS: dict[str, Make] = {"ddp.attach": attached, "scatter_reduce": scattered, "DataParallel": data_parallel}


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(8, 20, generator=torch.Generator().manual_seed(100 * step + rank))


def spoil_on(rank: int, model: nn.Module, now: list[int]) -> None:
    """Rank 1's gradient of one parameter overflows where it is to."""

    def hook(grad: torch.Tensor) -> torch.Tensor | None:
        if rank != 1 or now[0] not in OVERFLOWS:
            return None
        grad = grad.clone()
        grad.view(-1)[7] = OVERFLOWS[now[0]]
        return grad

    model.module.layers[2].weight.register_hook(hook)


def scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)


def memories(handle: gradwire.Handle) -> tuple[Tensors, Tensors]:
    """This rank's, and what it keeps of shards on behalf of all."""
    state = handle.state_dict()
    return state["memory"], state.get("shards", {})


def train(
    rank: int, make: Make, known: bool = True, clip: float = 0, autocast: torch.dtype | None = None
) -> Iterator[tuple[int, nn.Module, object, torch.amp.GradScaler]]:
    """Stops after each backward pass, with scaled gradients, and after each step, with −1."""
    torch.manual_seed(0)
    amp = scaler()
    model, handle = make("co3", **({"grad_scaler": amp} if known else {}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    now = [0]
    spoil_on(rank, model, now)
    for step in range(STEPS):
        now[0] = step
        optimizer.zero_grad()
        with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
            loss = model(batch(rank, step)).float().pow(2).mean()
        amp.scale(loss).backward()
        yield step, model, handle, amp
        if clip:
            amp.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        amp.step(optimizer)
        amp.update()
        yield -1, model, handle, amp


def path(rank: int, make: Make, **options: object) -> tuple[list[float], list[str]]:
    """The scale, and the parameters, after each step."""
    scales, digests = [], []
    for step, model, _, amp in train(rank, make, **options):
        if step < 0:
            scales.append(amp.get_scale())
            digests.append(digest({name: p.detach() for name, p in model.module.named_parameters()}))
    return scales, digests


# ── scenarios ─────────────────────────────────────────────────────────────────────────────────────


def same_steps_are_skipped(rank: int, make: Make) -> None:
    for options in ({}, {"clip": 0.01}, {"autocast": torch.bfloat16}, {"autocast": torch.float16}):
        expected, _ = path(rank, plain, known=False, **options)
        scales, digests = path(rank, make, **options)
        assert scales == expected, options
        assert max(scales) > scales[0] > min(scales), "it grows and halves"
        unchanged = {i for i in range(1, STEPS) if digests[i] == digests[i - 1]}
        assert unchanged == set(OVERFLOWS), options
        assert len(set(gathered(digests[-1]))) == 1, options


def nothing_is_lost(rank: int, make: Make) -> None:
    """W·ḡ/scale + Σe′ + W·Σs′ = Σ(g + γe) + W·γΣs, without the scale, whatever it is; skipped steps change nothing."""
    before: tuple[Tensors, Tensors] = ({}, {})
    for step, model, handle, amp in train(rank, make):
        if step < 0:
            continue
        named = dict(model.module.named_parameters())
        after = memories(handle)
        assert all(bool(m.isfinite().all()) for part in after for m in part.values())
        if step in OVERFLOWS:
            assert any(not p.grad.isfinite().all() for p in named.values()), "all ranks see it"
            assert [digest(part) for part in after] == [digest(part) for part in before], f"step {step}"
            continue
        true = torch.autograd.grad(model.module(batch(rank, step)).float().pow(2).mean(), list(named.values()))
        everyone = gathered((dict(zip(named, true, strict=True)), before, after))
        zero = torch.zeros(())
        for name, parameter in named.items():
            mean = WORLD * parameter.grad.double() / amp.get_scale()
            sums = [g[name].double() for g, _, _ in everyone]
            own = [a[0][name].double() - DECAY * b[0].get(name, zero).double() for _, b, a in everyone]
            kept = [WORLD * a[1].get(name, zero).double() for _, _, a in everyone]
            kept += [-WORLD * DECAY * b[1].get(name, zero).double() for _, b, _ in everyone]
            size = mean.abs() + sum(t.abs() for t in (*sums, *own, *kept))
            size = size + sum(b[0].get(name, zero).double().abs() for _, b, _ in everyone)
            gap = mean + sum(own) + sum(kept) - sum(sums)
            assert bool((gap.abs() <= 2.0**-21 * size + 1e-30).all()), f"{name}, step {step}"
        before = after


def as_without_a_scaler(rank: int, make: Make) -> None:
    torch.manual_seed(0)
    model, _ = make("co3")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        if step not in OVERFLOWS:
            optimizer.zero_grad()
            model(batch(rank, step)).float().pow(2).mean().backward()
            optimizer.step()
    expected = check_alike(model.module)
    *_, (_, scaled, _, _) = train(rank, make)
    assert check_alike(scaled.module) == expected
    *_, (_, unknown, _, _) = train(rank, make, known=False)
    assert check_alike(unknown.module) != expected, "memory in other units than the gradient: so the test can fail"


def run_with(scenario: Callable[..., None], wrapper: str, rank: int) -> None:
    scenario(rank, WRAPPERS[wrapper])


SCENARIOS: dict[str, Scenario] = {
    f"{wrapper} {scenario.__name__}": partial(run_with, scenario, wrapper)
    for wrapper in WRAPPERS
    for scenario in (same_steps_are_skipped, nothing_is_lost, as_without_a_scaler)
}
QUICK = {"ddp.attach nothing_is_lost", "scatter_reduce as_without_a_scaler", "DataParallel same_steps_are_skipped"}


@pytest.mark.parametrize("scenario", named(SCENARIOS, QUICK))
def test_mixed_precision_on_three_ranks(ranks: RankPool, scenario: Scenario) -> None:
    ranks.check(scenario, seconds=30)
