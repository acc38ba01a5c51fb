"""Converted layers in real processes, three ranks over Gloo: every rank chooses among rows of its own."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import gradwire
from gradwire.backward import convert, converted, forget, revert
from gradwire.errors import GradwireError
from support.helpers import bits
from support.rank_pool import RankPool, Scenario, named
from support.ranks import Net, Tensors, attach, be_quiet, check_raises, cpu_mesh, digest, gathered, loss_of
from support.torch_versions import HAS_FSDP2

STEPS = 10
K = 0.25


def make(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return convert(Net(), K)


def ddp(model: nn.Module | None = None, **options: object) -> DistributedDataParallel:
    return DistributedDataParallel(model or make(), bucket_cap_mb=0.001, **options)


def memories(model: nn.Module) -> Tensors:
    return {name: layer.memory.inputs for name, layer in converted(model).items()}


def parameters(model: nn.Module) -> Tensors:
    whole = {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in model.named_parameters()}
    return {name.replace("module.", ""): p.detach().clone() for name, p in whole.items()}


def gradients(model: nn.Module) -> Tensors:
    return {name.replace("module.", ""): p.grad.clone() for name, p in model.named_parameters()}


def check_close(ours: Tensors, others: Tensors) -> None:
    """To fp32 rounding: sums over ranks depend on how gradients are cut into buckets."""
    for name, other in others.items():
        assert float((ours[name] - other).norm() / other.norm()) < 1e-6, name


def check_training(rank: int, model: nn.Module, kind: type[torch.optim.Optimizer] = torch.optim.SGD) -> None:
    """Replicas stay bit-identical, memories differ from rank to rank, and it learns."""
    optimizer = kind(model.parameters(), lr=0.05 if kind is torch.optim.SGD else 0.005)
    check_ranks(model, train(rank, model, optimizer))


def train(rank: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """The losses of all steps."""
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, rank, 0)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def check_ranks(model: nn.Module, losses: list[float]) -> None:
    everyone = gathered((digest(parameters(model)), losses, [bits(memory) for memory in memories(model).values()]))
    assert len({parameters for parameters, _, _ in everyone}) == 1
    for of_ranks in zip(*(rows for _, _, rows in everyone), strict=True):
        assert len(set(of_ranks)) == 3, "every rank has rows of its own"
    assert sum(losses[-1] for _, losses, _ in everyone) < 0.7 * sum(losses[0] for _, losses, _ in everyone)


# ── scenarios ─────────────────────────────────────────────────────────────────────────────────────


def ddp_with_a_codec(rank: int) -> None:
    model = ddp()
    handle = attach(model, "co3")
    check_training(rank, model)
    assert handle.stats()["ratio"] > 4
    assert set(handle.state_dict()["memory"]) == {name for name, _ in model.module.named_parameters()}


def gradients_are_averaged_as_they_are(rank: int) -> None:
    """Without a codec: the mean of what each rank chooses alone, whose memory is the same."""
    alone, model = make(), ddp()
    for step in range(3):
        alone.zero_grad(), model.zero_grad()
        loss_of(alone, rank, step).backward(), loss_of(model, rank, step).backward()
        everyone = gathered(gradients(alone))
        check_close(gradients(model), {name: sum(one[name].double() for one in everyone) / 3 for name in everyone[0]})
        assert digest(memories(alone)) == digest(memories(model.module))


def accumulation(rank: int) -> None:
    """no_sync: every backward pass is a batch, and the sum is averaged with the last of them."""
    alone, model = make(), ddp()
    attach(model, "none")
    for step in range(2):
        alone.zero_grad(), model.zero_grad()
        for micro in range(3):
            loss_of(alone, rank, 3 * step + micro).backward()
            if micro < 2:
                with model.no_sync():
                    loss_of(model, rank, 3 * step + micro).backward()
            else:
                loss_of(model, rank, 3 * step + micro).backward()
        everyone = gathered(gradients(alone))
        check_close(gradients(model), {name: sum(one[name].double() for one in everyone) / 3 for name in everyone[0]})
        assert digest(memories(alone)) == digest(memories(model.module))


def other_kinds_of_ddp(rank: int) -> None:
    """A static graph, views of buckets, buffers that are broadcast, recomputed activations: the same training."""
    found = []
    for options in ({}, {"static_graph": True}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True},
                    {"recompute": True}):  # fmt: skip
        module = make()
        if options.pop("recompute", False):
            inner = module.big.forward
            module.big.forward = lambda x, inner=inner: checkpoint(inner, x, use_reentrant=False)
        module.register_buffer("counter", torch.tensor(float(rank)))
        model = ddp(module, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
        assert len(set(gathered(bits(module.first.memory.inputs)))) == 3
        found.append(parameters(model) | memories(module))
    for other in found[1:]:
        check_close(other, found[0])


def data_parallel(rank: int) -> None:
    check_training(rank, gradwire.DataParallel(make(rank), "co3", aggregate="all_gather"))
    check_training(rank, gradwire.DataParallel(make(rank), "co3", aggregate="scatter_reduce"), torch.optim.Adam)


def local_sgd(rank: int) -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with gradwire.LocalSGD(model, optimizer, "co3", sync_every=5):
        losses = train(rank, model, optimizer)
    check_ranks(model, losses)


def sharded(**options: object) -> nn.Module:
    model, mesh = make(), cpu_mesh()
    for module in (model.big, model):
        fully_shard(module, mesh=mesh, **options)
    return model


def fsdp(rank: int) -> None:
    model = sharded()
    handle = gradwire.fsdp.attach(model, "co3")
    check_training(rank, model)
    assert handle.stats()["ratio"] > 3


def fsdp_is_ddp(rank: int) -> None:
    """The same means and memories as DDP; in bf16, with fp32 memories."""
    model, plain = sharded(), ddp()
    for step in range(3):
        model.zero_grad(), plain.zero_grad()
        loss_of(model, rank, step).backward(), loss_of(plain, rank, step).backward()
        check_close({name: g.full_tensor() for name, g in gradients(model).items()}, gradients(plain))
        assert digest(memories(model)) == digest(memories(plain.module))
    half = sharded(mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    loss_of(half, rank, 0).backward()
    assert {memory.dtype for memory in memories(half).values()} == {torch.float32}
    assert all(p.grad.dtype == torch.float32 for p in half.parameters())


def fsdp_changed_and_saved(rank: int) -> None:
    model, other = sharded(), sharded()
    loss_of(model, rank, 0).backward()
    before = digest(memories(model))
    convert(model, 3, "weightedk")
    assert {layer.choice.k for layer in converted(model).values()} == {3} and len(converted(model)) == 3
    assert digest(memories(model)) == before
    check_raises(GradwireError, "FSDPLinear was made of a converted layer", lambda: revert(model))
    assert len(converted(model)) == 3
    set_model_state_dict(other, get_model_state_dict(model))
    assert digest(memories(other)) == before
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    convert(model, 3, optimizer=optimizer)
    check_raises(GradwireError, "is not in the optimizer", lambda: loss_of(model, rank, 1).backward())


def checkpoints(rank: int) -> None:
    """The state of each rank goes on; that of rank 0 everywhere starts with its rows, unless forgotten."""
    model = ddp()
    loss_of(model, rank, 0).backward()
    own = copy.deepcopy(model.state_dict())
    assert "module.big.weight_memory_inputs" in own
    model.zero_grad()
    loss_of(model, rank, 1).backward()
    other = ddp(make(1))
    other.load_state_dict(own)
    loss_of(other, rank, 1).backward()
    check_close(gradients(other), gradients(model))
    assert digest(memories(other.module)) == digest(memories(model.module))
    other.load_state_dict(gathered(own)[0])
    assert len(set(gathered(digest(memories(other.module))))) == 1
    forget(other)
    assert all(layer.memory.bytes == 0 for layer in converted(other).values())


def batches_of_other_sizes(rank: int) -> None:
    """Ranks need not have as many rows as each other, and one may have none."""
    model = ddp()
    attach(model, "co3")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for sizes in ((16, 16, 16), (16, 7, 0), (1, 2, 3), (20, 16, 16)):
        x = torch.randn(sizes[rank], 20, generator=torch.Generator().manual_seed(rank))
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
        assert len(set(gathered(digest(parameters(model))))) == 1
    assert gathered(len(model.module.big.memory.inputs)) == [20, 16, 16]


SCENARIOS = [
    ddp_with_a_codec, gradients_are_averaged_as_they_are, accumulation, other_kinds_of_ddp, data_parallel, local_sgd,
    checkpoints, batches_of_other_sizes,
]  # fmt: skip
QUICK = {"ddp_with_a_codec", "local_sgd", "checkpoints"}
if HAS_FSDP2:
    SCENARIOS += [fsdp, fsdp_is_ddp, fsdp_changed_and_saved]
    QUICK |= {"fsdp"}


@pytest.mark.parametrize("scenario", named(SCENARIOS, QUICK))
def test_chosen_rows_on_three_ranks(ranks: RankPool, scenario: Scenario) -> None:
    ranks.check(scenario, setup=be_quiet)
