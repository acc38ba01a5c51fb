"""Means of gradients do not depend on torch's default dtype, default device and modes, wherever gradients meet."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import gradwire
from support.counted_launches import on_device
from support.rank_pool import RankPool, Scenario, named
from support.ranks import Tensors, be_quiet, cpu_mesh, digest
from support.torch_settings import SETTINGS, forget
from support.torch_versions import HAS_FSDP2

WORLD = 2
NOT_IN_TRAINING = {"inference", "autocast"}  # no backward pass is possible; the model itself is another
TRAINING = [name for name in SETTINGS if name not in NOT_IN_TRAINING]
QUICK = {"ddp: co3", "ddp: qsgd"}


class Wide(nn.Module):
    """Tensors of all sizes; of one with 70,000 entries, kernels look at some alone before they choose a step."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.big, self.last = nn.Linear(20, 70), nn.Linear(70, width), nn.Linear(width, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.big(torch.tanh(self.first(x)))))


def state_of(model: nn.Module) -> Tensors:
    """Parameters and gradients."""
    found = {name: p.detach() for name, p in model.named_parameters()}
    found |= {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in found.items()}


def trained(model: nn.Module, x: torch.Tensor, y: torch.Tensor, steps: int = 3) -> str:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return digest(state_of(model))


# ── where gradients meet: each takes a model, and its batch, and trains it ────────────────────────


def by_ddp(spec: str, aggregate: str, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> str:
    model = DistributedDataParallel(model)
    handle = gradwire.ddp.attach(model, spec, aggregate=aggregate)
    trained(model, x, y)
    state = handle.state_dict()
    handle.load_state_dict(state)
    return digest(state["memory"]) + trained(model, x, y)


def by_ddp_on_device(spec: str, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> str:
    """With the GPU's kernels, on the CPU."""
    with on_device() as launches:
        found = by_ddp(spec, "all_gather", model, x, y)
    assert launches or x.dtype == torch.float64, "the host makes all messages"
    return found


def by_data_parallel(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> str:
    return trained(gradwire.DataParallel(model, "dgc:mask=off", aggregate="all_gather"), x, y)


def by_fsdp(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> str:
    be_quiet()
    for module in (model.big, model):
        fully_shard(module, mesh=cpu_mesh())
    gradwire.fsdp.attach(model, "co3")
    return trained(model, x, y)


def by_local_sgd(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> str:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradwire.LocalSGD(model, optimizer, "co3", sync_every=2):
        for _ in range(4):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return digest(state_of(model))


WAYS: dict[str, Callable[[nn.Module, torch.Tensor, torch.Tensor], str]] = {
    **{f"ddp: {spec}": functools.partial(by_ddp, spec, "all_gather") for spec in ("co3", "qsgd", "ecq", "terngrad")},
    **{f"device: {spec}": functools.partial(by_ddp_on_device, spec) for spec in ("co3", "qsgd")},
    "scatter_reduce": functools.partial(by_ddp, "co3", "scatter_reduce"),
    "hierarchical": functools.partial(by_ddp, "co3", "hierarchical"),
    "sums": functools.partial(by_ddp, "homomorphic:p=0.05", "all_gather"),
    "data_parallel": by_data_parallel,
    "local_sgd": by_local_sgd,
    **({"fsdp": by_fsdp} if HAS_FSDP2 else {}),
}


def alike(way: str, rank: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    x, y = torch.randn(16, 20, generator=generator), torch.randint(5, (16,), generator=generator)

    def fresh(dtype: torch.dtype) -> nn.Module:
        torch.manual_seed(0)
        return Wide(60 if way.startswith("device") else 1000).to(dtype)  # the GPU's kernels are slow here

    for dtype in (torch.float32, torch.float64):
        expected = WAYS[way](fresh(dtype), x.to(dtype), y)
        for name in TRAINING:
            model = fresh(dtype)
            forget()
            dist.barrier()
            with SETTINGS[name]():
                assert WAYS[way](model, x.to(dtype), y) == expected, (dtype, name)


@pytest.mark.parametrize("scenario", named({way: functools.partial(alike, way) for way in WAYS}, QUICK))
def test_training(ranks: RankPool, scenario: Scenario) -> None:
    ranks.check(scenario, WORLD, environment={"LOCAL_WORLD_SIZE": "1"})
