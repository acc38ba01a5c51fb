"""`auto` on one rank over NCCL: nobody to send to, so every step is plain DDP's, and nothing is tried."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.engine.handle import Handle
from support.ranks import Net

STEPS = 40  # more than all trials of `auto` take


@contextmanager
def one_rank() -> Iterator[None]:
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        gc.collect()  # DDP models keep the group
        dist.destroy_process_group()


def fresh() -> nn.Module:
    torch.manual_seed(0)
    return Net().cuda()


def trained(model: nn.Module) -> list[torch.Tensor]:
    """The parameters after some steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        x, y = torch.randn(16, 20, generator=generator), torch.randint(5, (16,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x.cuda()), y.cuda()).backward()
        optimizer.step()
    return [p.detach().cpu() for p in model.parameters()]


def check_plain(model: nn.Module, handle: Handle, expected: list[torch.Tensor]) -> None:
    assert handle.recipe == "exact"
    for parameter, wanted in zip(trained(model), expected, strict=True):
        assert torch.equal(parameter, wanted)
    gradients, stats = handle.gradients, handle.stats()
    assert gradients.tuner.auto is not None and gradients.tuner.auto.trials == [] and handle.recipe == "exact"
    assert gradients.exchange.messages == 0, "something went through the exchange thread"
    assert stats["steps"] == STEPS and stats["ratio"] == 1 and stats["encode_s"] == 0
    assert stats["frame_bytes"] == STEPS * 4 * sum(p.numel() for p in model.parameters())
    state = handle.state_dict()
    assert state["steps"] == STEPS and state["memory"] == {}


def test_ddp() -> None:
    with one_rank():
        expected = trained(DistributedDataParallel(fresh(), device_ids=[0]))
        model = DistributedDataParallel(fresh(), device_ids=[0])
        check_plain(model, gradwire.ddp.attach(model, "auto"), expected)


def test_ddp_with_a_scaler() -> None:
    """Whose scale, which is on the GPU, nobody asks for: there is no error memory to follow it."""

    class Scaler(torch.amp.GradScaler):
        def get_scale(self) -> float:
            raise AssertionError("this waits for the GPU")

    with one_rank():
        expected = trained(DistributedDataParallel(fresh(), device_ids=[0]))
        model = DistributedDataParallel(fresh(), device_ids=[0])
        check_plain(model, gradwire.ddp.attach(model, "auto", grad_scaler=Scaler("cuda")), expected)


def test_data_parallel() -> None:
    with one_rank():
        expected = trained(DistributedDataParallel(fresh(), device_ids=[0]))
        model = gradwire.DataParallel(fresh(), "auto")
        check_plain(model, model.gradwire, expected)


def test_a_recipe_that_is_named_is_followed() -> None:
    with one_rank():
        model = DistributedDataParallel(fresh(), device_ids=[0])
        handle = gradwire.ddp.attach(model, "co3")
        trained(model)
        assert handle.stats()["ratio"] > 4 and handle.state_dict()["memory"]
