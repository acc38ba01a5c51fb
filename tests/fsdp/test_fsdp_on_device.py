"""FSDP2 with frames that kernels for GPUs make and decode, run on the CPU: the same bits as on the host."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import gradwire
from gradwire.aggregate.messages.device_messages import DeviceMessages
from support.cuda_on_cpu import cuda_on_cpu
from support.rank_pool import RankPool, Scenario, named
from support.ranks import Tensors, be_quiet, cpu_mesh, digest, gathered
from support.torch_versions import HAS_FSDP2

pytestmark = pytest.mark.skipif(not HAS_FSDP2, reason="gradwire.fsdp needs a newer torch")

WORLD = 3  # with one rank whose own part is added between those of others, and a mean that is no power of two


class Counted:
    """How often kernels encoded messages and added them up, and how often they left that to the host."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done, self.left = {"encode": 0, "add_up": 0}, {"encode": 0, "add_up": 0}
        for name in self.done:
            monkeypatch.setattr(DeviceMessages, name, self._counting(name, getattr(DeviceMessages, name)))

    def _counting(self, name: str, method: object) -> object:
        def counting(messages: DeviceMessages, *args: object) -> object:
            found = method(messages, *args)
            (self.done if found else self.left)[name] += 1
            return found

        return counting


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(70, 181), nn.Tanh(), nn.LayerNorm(181), nn.Linear(181, 5))


def sharded(mesh: DeviceMesh, **options: object) -> nn.Module:
    """Parts that travel alone, small ones that share a frame, and rows that are not as long as the others."""
    torch.manual_seed(0)
    model = network()
    if not options:  # one module is enough where others are options of it
        fully_shard(model[0], mesh=mesh)
    return fully_shard(model, mesh=mesh, **options)


def backward(model: nn.Module, rank: int, step: int, factor: float = 1.0) -> Tensors:
    model.zero_grad(set_to_none=True)
    x = torch.randn(8, 70, generator=torch.Generator().manual_seed(100 * step + rank))
    (model(x).float().square().mean() * factor).backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in gradients.items()}


def trained(spec: str, rank: int, mesh: DeviceMesh, memory: str = "fp32", **options: object) -> list[Tensors]:
    """The gradients of every step and the memory at the end, with a step in between that is not finite."""
    model = sharded(mesh, **options)
    handle = gradwire.fsdp.attach(model, spec, memory=memory)
    found = []
    for step in range(3):
        broken = step == 1 and rank == 1
        found.append(backward(model, rank, step, float("inf") if broken else 1.0))
        if step == 0:
            before = handle.state_dict()["memory"]
        if step == 1:
            assert digest(handle.state_dict()["memory"]) == digest(before), "a step that is not finite counts nothing"
    assert any(e.any() for e in before.values()) and digest(handle.state_dict()["memory"]) != digest(before)
    return [*found, handle.state_dict()["memory"]]


def on_both(rank: int, spec: str, mesh: DeviceMesh, **options: object) -> tuple[list[Tensors], list[Tensors]]:
    host = trained(spec, rank, mesh, **options)
    with cuda_on_cpu(), pytest.MonkeyPatch.context() as patch:
        counted = Counted(patch)
        device = trained(spec, rank, mesh, **options)
    assert counted.done["encode"] and counted.done["add_up"] and sum(counted.left.values())
    return host, device


def same_bits_as_on_the_host(rank: int) -> None:
    """CO3 has the same steps on both, so all gradients and memories are alike, those that are not finite as well."""
    half = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
    for options in ({}, {"memory": "bf16", "mp_policy": half}):
        host, device = on_both(rank, "co3", cpu_mesh(), **options)
        assert [digest(found) for found in host] == [digest(found) for found in device], options


def same_bits_between_replicas(rank: int) -> None:
    mesh = init_device_mesh("cpu", (WORLD, 1), mesh_dim_names=("replicate", "shard"))
    host, device = on_both(rank, "co3", mesh)
    assert [digest(found) for found in host] == [digest(found) for found in device]


def other_families(rank: int) -> None:
    """Their choices may differ from the host's, but nothing is lost, and all is done by kernels."""
    for spec, steps in (("ecq:decay=1", 1), ("sbc:decay=1,mask=off,small=same", 2)):
        model, alone = sharded(cpu_mesh()), network()
        alone.load_state_dict({name: p.full_tensor() for name, p in model.state_dict().items()})
        true = [backward(alone, rank, step) for step in range(steps)]
        with cuda_on_cpu(), pytest.MonkeyPatch.context() as patch:
            counted = Counted(patch)
            handle = gradwire.fsdp.attach(model, spec)
            means = [backward(model, rank, step) for step in range(steps)]
        everyone = gathered((true, handle.state_dict()["memory"]))
        for name in means[0]:
            given = sum(t[name].double() for gradients, _ in everyone for t in gradients)
            left = sum(memory[name].double() for _, memory in everyone)
            error = WORLD * sum(mean[name].double() for mean in means) + left - given
            assert float(error.norm() / given.norm()) < 1e-6, (spec, name)
        assert counted.done["encode"] == 2 * steps * (WORLD - 1) and not sum(counted.left.values()), spec


def checkpoints_on_a_device(rank: int) -> None:
    with cuda_on_cpu():
        model, other = sharded(cpu_mesh()), sharded(cpu_mesh())
        first, second = gradwire.fsdp.attach(model, "co3"), gradwire.fsdp.attach(other, "co3")
        backward(model, rank, 0)
        second.load_state_dict(gathered(first.all_ranks.state_dict())[0])
        assert digest(first.state_dict()["memory"]) == digest(second.state_dict()["memory"])
        assert digest(backward(model, rank, 1)) == digest(backward(other, rank, 1))


SCENARIOS = [same_bits_as_on_the_host, same_bits_between_replicas, other_families, checkpoints_on_a_device]


@pytest.mark.parametrize("scenario", named(SCENARIOS))
def test_fsdp_frames_on_a_device(ranks: RankPool, scenario: Scenario) -> None:
    ranks.check(scenario, WORLD, setup=be_quiet)
