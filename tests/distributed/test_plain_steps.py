"""Steps that `auto` or `none` leaves uncompressed: they are plain DDP's, bit for bit, whatever wraps the model."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.engine.auto import EXACT, HALF, Trial
from gradwire.engine.handle import Handle
from gradwire.engine.tuner import Tuner
from support.rank_pool import RankPool, Scenario, named
from support.ranks import SMALL_BUCKETS, Net, Tensors, check_raises, digest, gathered, loss_of

WORLD = 2
Make = Callable[..., tuple[nn.Module, Handle]]


def with_ddp(module: nn.Module, spec: object = "auto", **options: object) -> tuple[nn.Module, Handle]:
    model = DistributedDataParallel(module, bucket_cap_mb=SMALL_BUCKETS)
    return model, gradwire.ddp.attach(model, spec, **options)


def with_data_parallel(module: nn.Module, spec: object = "auto", **options: object) -> tuple[nn.Module, Handle]:
    model = gradwire.DataParallel(module, spec, **options)
    return model, model.gradwire


WAYS: dict[str, Make] = {"ddp": with_ddp, "data_parallel": with_data_parallel}


def fresh() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def trained(model: nn.Module, rank: int, steps: range) -> Tensors:
    """The parameters after some steps of SGD."""
    inner = model.module
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
    return {name: p.detach().clone() for name, p in inner.named_parameters()}


def plainly_trained(rank: int, steps: range) -> Tensors:
    return trained(DistributedDataParallel(fresh(), bucket_cap_mb=SMALL_BUCKETS), rank, steps)


def settle(handle: Handle, spec: str) -> Tuner:
    """As if this had been the fastest."""
    tuner = handle.gradients.tuner
    tuner.auto.settled, tuner.auto.trials = True, [Trial(spec, 0.0, 1.0)]
    tuner.use(spec)
    return tuner


def check_figures(handle: Handle, model: nn.Module, steps: int, before: dict[str, float]) -> None:
    """Every gradient goes once in each step, as fp32, and half of it to each of two ranks, twice."""
    found = {key: value - before.get(key, 0) for key, value in handle.stats().items()}
    size = 4 * sum(p.numel() for p in model.parameters())
    assert found["steps"] == steps
    assert found["frame_bytes"] == found["dense_bytes"] == steps * size
    peers = dist.get_world_size() - 1
    # Beside them go the order of parameters, once, and eight bytes whenever `auto` looks at the clock.
    for key in ("wire_bytes_sent", "wire_bytes_received"):
        assert 0 <= found[key] - steps * size * peers <= 256 * peers, key


# ── one rank ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.usefixtures("alone")
def test_one_rank_tries_nothing(way: str, caplog: pytest.LogCaptureFixture) -> None:
    steps = range(40)  # more than all trials take
    expected = plainly_trained(0, steps)
    with caplog.at_level(logging.INFO, "gradwire"):
        model, handle = WAYS[way](fresh())
    assert [record.getMessage() for record in caplog.records] == [
        "auto: plain all-reduce, without a trial, since there is only one rank"
    ]
    before = handle.stats()
    assert handle.recipe == EXACT
    assert digest(trained(model, 0, steps)) == digest(expected)
    assert handle.gradients.tuner.auto.trials == [] and handle.recipe == EXACT
    check_figures(handle, model, len(steps), before)
    assert handle.gradients.exchange.messages == 0, "nothing went through the exchange thread"
    state = handle.state_dict()
    assert (state["steps"], state["memory"]) == (len(steps), {})


@pytest.mark.usefixtures("alone")
def test_a_recipe_is_followed_on_one_rank_too() -> None:
    """What the user asks for by name happens, even where nobody receives it."""
    model = DistributedDataParallel(fresh(), bucket_cap_mb=SMALL_BUCKETS)
    handle = gradwire.ddp.attach(model, "co3")
    assert digest(trained(model, 0, range(2))) != digest(plainly_trained(0, range(2)))
    assert handle.stats()["ratio"] > 4 and handle.state_dict()["memory"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.usefixtures("alone")
def test_memories_of_a_checkpoint_go_with_the_first_step(way: str) -> None:
    """The only step that is not plain, and not one whose gradients are not finite."""
    model, handle = WAYS[way](fresh())
    memory = {name: torch.randn_like(p) for name, p in model.module.named_parameters()}
    handle.load_state_dict({"steps": 3, "memory": memory})
    (loss_of(model, 0, 0) * float("inf")).backward()
    assert digest(handle.state_dict()["memory"]) == digest(memory)
    model.zero_grad()
    loss_of(model, 0, 0).backward()
    alone = fresh()
    loss_of(alone, 0, 0).backward()
    for (name, parameter), other in zip(model.module.named_parameters(), alone.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad + memory[name]), name
    state = handle.state_dict()
    assert (state["steps"], state["memory"]) == (5, {})


# ── two ranks ─────────────────────────────────────────────────────────────────────────────────────


def none_is_all_reduced(rank: int) -> None:
    """Unless an aggregation of frames was asked for, or a tensor has another recipe."""
    steps = range(5)
    expected = digest(plainly_trained(rank, steps))
    for make in WAYS.values():
        for spec in ("none", {"*.bias": "none", "*": "none"}):
            model, handle = make(fresh(), spec)
            before = handle.stats()
            assert digest(trained(model, rank, steps)) == expected
            assert handle.aggregate == "all_reduce" and "none" in handle.recipe
            check_figures(handle, model, len(steps), before)
            assert handle.gradients.exchange.messages == 0, "nothing went through the exchange thread"
        model, handle = make(fresh(), "none", aggregate="all_gather")
        assert digest(trained(model, rank, steps)) == expected
        assert handle.aggregate == "all_gather" and handle.gradients.exchange.messages > 0
        model, handle = make(fresh(), {"*.bias": "none", "*": "co3"})
        assert digest(trained(model, rank, steps)) != expected
        assert handle.aggregate == "all_gather"


def settled_on_plain(rank: int) -> None:
    """Bit for bit, as two addends have one sum; and `auto` still looks at the clock."""
    steps = range(70)
    expected = digest(plainly_trained(rank, steps))
    for make in WAYS.values():
        model, handle = make(fresh())
        auto = settle(handle, EXACT).auto
        before = handle.stats()
        assert digest(trained(model, rank, steps)) == expected
        assert auto._baseline is not None, "of 32 steps"
        if handle.recipe == EXACT:  # unless the clock had it try again, on a busy machine
            check_figures(handle, model, len(steps), before)
            assert handle.gradients.exchange.messages == 0


def settled_on_bf16(rank: int) -> None:
    """Half of the bytes; the mean is that of gradients in bf16."""
    for make in WAYS.values():
        model, handle = make(fresh())
        settle(handle, HALF)
        before, alone = handle.stats(), fresh()
        for step in range(3):
            model.zero_grad(), alone.zero_grad()
            loss_of(model, rank, step).backward(), loss_of(alone, rank, step).backward()
            true = gathered({name: p.grad.bfloat16() / WORLD for name, p in alone.named_parameters()})
            for name, parameter in model.module.named_parameters():
                assert torch.equal(parameter.grad, (true[0][name] + true[1][name]).float()), (name, step)
        assert handle.recipe == HALF
        found = {key: value - before[key] for key, value in handle.stats().items()}
        assert 2 * found["frame_bytes"] == found["dense_bytes"] > 0
        assert found["wire_bytes_sent"] < 0.6 * found["dense_bytes"]


def there_and_back(rank: int) -> None:
    """From a recipe to plain steps, of which the first sends what was left, and back to the recipe."""
    for make in WAYS.values():
        model, handle = make(fresh())
        settle(handle, "co3:decay=1")
        loss_of(model, rank, 0).backward()
        left = gathered(handle.state_dict()["memory"])
        assert any(bool(memory.any()) for memory in left[rank].values())
        settle(handle, EXACT)
        alone = fresh()
        for step in (1, 2):
            model.zero_grad(), alone.zero_grad()
            loss_of(model, rank, step).backward(), loss_of(alone, rank, step).backward()
            true = gathered({name: p.grad for name, p in alone.named_parameters()})
            for name, parameter in model.module.named_parameters():
                wanted = sum(true[r][name] + (left[r].get(name, 0) if step == 1 else 0) for r in range(WORLD)) / WORLD
                assert torch.allclose(parameter.grad, wanted, rtol=1e-5, atol=1e-7), (name, step)
            assert not handle.state_dict()["memory"]
        settle(handle, "co3")
        loss_of(model, rank, 3).backward()
        assert handle.state_dict()["memory"] and handle.gradients.exchange.messages


def odd_gradients(rank: int) -> None:
    """Of other types and orders of entries, and missing on one rank or on both."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.image = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
            self.short = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
            self.sometimes, self.never = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            total = self.image(x).square().sum() + (self.short.float() * x.sum()).sum()
            return total + self.sometimes.sum() if rank == 0 else total

    torch.manual_seed(0)
    module = Odd()
    model, handle = with_data_parallel(module)
    settle(handle, EXACT)
    x = torch.randn(2, 2, 5, 5, generator=torch.Generator().manual_seed(rank)).to(memory_format=torch.channels_last)
    model(x).backward()
    alone = Odd()
    alone.load_state_dict(module.state_dict())
    alone(x).backward()
    true = gathered({n: p.grad for n, p in alone.named_parameters() if p.grad is not None})
    for name in ("image.weight", "image.bias", "short"):
        wanted = true[0][name] / 2 + true[1][name] / 2
        assert torch.equal(dict(module.named_parameters())[name].grad, wanted), name
    assert module.sometimes.grad.tolist() == [0.5] * 4
    assert module.never.grad is None


def a_peer_that_leaves(rank: int) -> None:
    """The error names it, and later steps are refused."""
    model, handle = with_data_parallel(fresh())
    settle(handle, EXACT)
    loss_of(model, rank, 0).backward()
    if rank == 1:
        handle.gradients.link.give_up(RuntimeError("no more"))
        return
    check_raises(gradwire.AggregateError, "rank 1 failed", lambda: loss_of(model, rank, 1).backward())
    check_raises(gradwire.AggregateError, "has failed before", lambda: loss_of(model, rank, 2).backward())


SCENARIOS = [none_is_all_reduced, settled_on_plain, settled_on_bf16, there_and_back, odd_gradients, a_peer_that_leaves]
QUICK = {"none_is_all_reduced", "settled_on_plain", "settled_on_bf16", "there_and_back"}


@pytest.mark.parametrize("scenario", named(SCENARIOS, QUICK))
def test_plain_steps_on_two_ranks(ranks: RankPool, scenario: Scenario) -> None:
    ranks.check(scenario, WORLD, seconds=20)
