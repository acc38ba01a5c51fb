"""Training whose messages are made on the GPU: two real ranks, with the GPU's kernels on the CPU.

Parameters and memories have to be those of the host's codecs, bit for bit, whichever rank has a GPU and when.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.frame import headers
from support.counted_launches import on_device
from support.frames_seen import frames_seen
from support.rank_pool import RankPool, Scenario, named
from support.ranks import Layers, Net, Tensors, digest, gathered, loss_of

WORLD = 2
AGGREGATIONS = ("all_gather", "scatter_reduce")
Trained = tuple[Tensors, Tensors]  # parameters and memories


def fresh(dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def parameters(model: nn.Module) -> Tensors:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def wrapped(way: str, model: nn.Module, aggregate: str, **options: bool) -> tuple[nn.Module, gradwire.Handle]:
    if way == "ddp":
        ddp = DistributedDataParallel(model, **options)
        return ddp, gradwire.ddp.attach(ddp, "co3", aggregate=aggregate)
    data_parallel = gradwire.DataParallel(model, "co3", aggregate=aggregate)
    return data_parallel, data_parallel.gradwire


def memories(handle: gradwire.Handle) -> Tensors:
    """This rank's, and those of the shards that it owns."""
    state = handle.state_dict()
    return {**state["memory"], **{f"shard of {name}": memory for name, memory in state.get("shards", {}).items()}}


def train(model: nn.Module, rank: int, steps: range) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()


def by_gradients(rank: int, way: str, aggregate: str, dtype: torch.dtype) -> Trained:
    model, handle = wrapped(way, fresh(dtype), aggregate)
    train(model, rank, range(4))
    return parameters(model.module), memories(handle)


def by_local_sgd(rank: int) -> Trained:
    model = fresh()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradwire.LocalSGD(model, optimizer, "co3", sync_every=2) as handle:
        for step in range(6):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
        memory = handle.state_dict()["memory"]
    assert memory
    return parameters(model), memory


def by_masks(rank: int, nesterov: bool) -> Trained:
    """Momentum before the exchange, masked where it was sent; of small tensors behind it."""
    model = DistributedDataParallel(fresh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=nesterov, weight_decay=0.01)
    recipe = "dgc:p=0.1,warmup=2,small=co3"
    handle = gradwire.ddp.attach(model, recipe, optimizer=optimizer, aggregate="all_gather")
    for step in range(5):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
    velocities = {f"velocity of {name}": v for name, v in handle.state_dict()["velocity"].items()}
    assert len(velocities) == len(parameters(model.module))
    assert any(bool((v == 0).any()) for v in velocities.values())
    return parameters(model.module), {**memories(handle), **velocities}


def by_unused(rank: int, way: str, aggregate: str) -> Trained:
    """A parameter has no gradient on one rank, or on both."""
    torch.manual_seed(0)
    options = {"find_unused_parameters": True} if way == "ddp" else {}
    model, handle = wrapped(way, Layers(4, 20), aggregate, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, by_all in enumerate([(), (1,), (0, 3), ()]):
        without = (*by_all, rank) if step % 2 == 0 else by_all
        optimizer.zero_grad()
        x = torch.randn(8, 20, generator=torch.Generator().manual_seed(10 * step + rank))
        model(x, without).pow(2).mean().backward()
        optimizer.step()
    return parameters(model.module), memories(handle)


def by_structure(rank: int) -> Trained:
    """One tensor by a recipe that has no kernels there: its messages go the host's way, with its shape."""
    model = DistributedDataParallel(fresh(), bucket_cap_mb=1)
    handle = gradwire.ddp.attach(model, {"big.weight": "structured", "*": "co3"}, aggregate="all_gather")
    with frames_seen() as seen:
        train(model, rank, range(3))
    assert seen.count((headers.STRUCTURED, (64, 70))) == WORLD * 3
    return parameters(model.module), memories(handle)


# ── scenarios ─────────────────────────────────────────────────────────────────────────────────────


def same_as_the_host(rank: int, training: Callable[[int], Trained], unattended: bool = False) -> None:
    """With a GPU on both ranks, and on one of them alone. Messages go unattended between GPUs if `unattended`."""
    expected, memory = training(rank)
    for with_gpu in ((0, 1), (1,)):
        with on_device() if rank in with_gpu else nullcontext(Counter()) as launches:
            found, own = training(rank)
        if rank in with_gpu:
            assert launches["encode_chunks"] and launches["combine"], launches
            assert bool(launches["conclude"]) == (unattended and with_gpu == (0, 1)), launches
        assert digest(found) == digest(expected), with_gpu
        assert digest(own) == digest(memory), with_gpu
        assert len(set(gathered(digest(found)))) == 1


def a_nan_on_one_rank(rank: int, aggregate: str) -> None:
    """It reaches both, and the memories of both are as they were; the next step is as if it had not been."""

    def run() -> list[tuple[str, str, bool]]:
        model, handle = wrapped("ddp", fresh(), aggregate)
        found = []
        for step, bad in enumerate([None, "big.weight", None, None, "norm.bias", None, "big.weight", None, None, None]):
            before = digest(memories(handle))
            hook = None
            if bad and rank == 1:
                hook = model.module.get_parameter(bad).register_hook(
                    lambda g: g.index_fill(0, torch.tensor(1), torch.nan)
                )
            model.zero_grad()
            loss_of(model, rank, step).backward()
            if hook is not None:
                hook.remove()
            gradients = {name: p.grad for name, p in model.module.named_parameters()}
            finite = all(bool(g.isfinite().all()) for g in gradients.values())
            assert finite == (bad is None), step
            assert (digest(memories(handle)) == before) == (bad is not None), step
            means = digest(gradients) if finite else ""  # whether other tensors become NaN, too, is left open
            found.append((means, digest(memories(handle)), finite))
        return found

    expected = run()
    with on_device() as launches:
        found = run()
    assert launches["encode_chunks"]
    assert found == expected
    assert len({means for means, *_ in map(tuple, gathered(found[-1][0:1]))}) == 1  # type: ignore[arg-type]


def checkpoints_go_both_ways(rank: int, way: str, aggregate: str) -> None:
    """From the device's path to the host's, and from the host's to the device's."""

    def part(steps: range, state: dict[str, Any] | None) -> dict[str, Any]:
        model, handle = wrapped(way, fresh(), aggregate)
        if state is not None:
            model.module.load_state_dict(state["model"])
            handle.load_state_dict(state["gradwire"])
        train(model, rank, steps)
        return {"model": parameters(model.module), "gradwire": handle.state_dict(), "memories": memories(handle)}

    first, second = range(3), range(3, 6)
    expected = part(second, part(first, None))
    with on_device() as launches:
        state = part(first, None)
        assert launches["encode_chunks"]
    found = [part(second, state)]
    state = part(first, None)
    with on_device() as launches:
        found.append(part(second, state))
        assert launches["encode_chunks"]
    for end in found:
        assert digest(end["model"]) == digest(expected["model"])
        assert digest(end["memories"]) == digest(expected["memories"])


SCENARIOS: dict[str, Scenario] = {
    f"{way} {aggregate} {str(dtype).removeprefix('torch.')}": partial(
        same_as_the_host,
        training=partial(by_gradients, way=way, aggregate=aggregate, dtype=dtype),
        unattended=(way, aggregate) == ("ddp", "all_gather"),
    )
    for way in ("ddp", "data_parallel")
    for aggregate in AGGREGATIONS
    for dtype in (torch.float32, torch.bfloat16)
}
SCENARIOS |= {
    f"unused {way} {aggregate}": partial(same_as_the_host, training=partial(by_unused, way=way, aggregate=aggregate))
    for way in ("ddp", "data_parallel")
    for aggregate in AGGREGATIONS
}
SCENARIOS |= {f"nan {aggregate}": partial(a_nan_on_one_rank, aggregate=aggregate) for aggregate in AGGREGATIONS}
SCENARIOS |= {
    f"checkpoint {way} {aggregate}": partial(checkpoints_go_both_ways, way=way, aggregate=aggregate)
    for way, aggregate in zip(("ddp", "data_parallel"), AGGREGATIONS, strict=True)
}
SCENARIOS |= {
    f"masks nesterov={nesterov}": partial(
        same_as_the_host, training=partial(by_masks, nesterov=nesterov), unattended=True
    )
    for nesterov in (False, True)
}
SCENARIOS["structure by the host"] = partial(same_as_the_host, training=by_structure, unattended=True)
SCENARIOS["local_sgd"] = partial(same_as_the_host, training=by_local_sgd)
QUICK = {
    "ddp all_gather float32", "ddp scatter_reduce bfloat16", "data_parallel scatter_reduce float32",
    "data_parallel all_gather bfloat16", "unused ddp all_gather", "unused data_parallel scatter_reduce",
    "nan all_gather", "nan scatter_reduce", "checkpoint ddp all_gather", "local_sgd", "masks nesterov=False",
    "structure by the host",
}  # fmt: skip


@pytest.mark.parametrize("scenario", named(SCENARIOS, QUICK))
def test_messages_on_device(ranks: RankPool, scenario: Scenario) -> None:
    ranks.check(scenario, WORLD)
