"""FSDP2 beside Gloo where torch sees a GPU: fully_shard makes other meshes there than without one."""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import gradwire
from support.ranks import Net, cpu_mesh, loss_of

WORLD = 2


def sharded(mesh: DeviceMesh | None) -> nn.Module:
    torch.manual_seed(0)
    model = Net()
    for module in (model.first, model.big, model):
        fully_shard(module, mesh=mesh)
    return model


def test_meshes_that_fully_shard_makes_itself_count_as_one() -> None:
    """It makes one for each module, on the GPU, and each has a process group of its own."""
    torch.cuda.set_device(0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = sharded(mesh=None)
        assert all(p.is_cuda for p in model.parameters())
        handle = gradwire.fsdp.attach(model, "co3")
        assert handle.stats()["steps"] == 0
        handle.detach()
    finally:
        gc.collect()
        dist.destroy_process_group()


def test_a_mesh_on_the_cpu_keeps_gradients_there() -> None:
    """Two ranks train on the CPU although there is a GPU, and their means are FSDP2's own."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(train_on_the_cpu, (folder,), WORLD)


def train_on_the_cpu(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", f"file://{Path(folder) / 'store'}", rank=rank, world_size=WORLD)
    plain, ours, compressed = (sharded(cpu_mesh()) for _ in range(3))
    gradwire.fsdp.attach(ours, "none")
    handle = gradwire.fsdp.attach(compressed, "co3")
    for step in range(2):
        for model in (plain, ours, compressed):
            model.zero_grad()
            loss_of(model, rank, step).backward()
        for exact, same, near in zip(plain.parameters(), ours.parameters(), compressed.parameters(), strict=True):
            assert not exact.is_cuda and torch.equal(same.grad.full_tensor(), exact.grad.full_tensor())
            error = near.grad.full_tensor() - exact.grad.full_tensor()
            assert 0 < float(error.norm()) < float(exact.grad.full_tensor().norm())
    assert handle.stats()["steps"] == 2 and handle.stats()["ratio"] > 2
    dist.barrier()
    del plain, ours, compressed, handle
    gc.collect()
    dist.destroy_process_group()
