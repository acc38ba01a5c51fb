"""The process groups that gradwire makes beside those of the training: under names of its own, and given back."""

from __future__ import annotations

import gc
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import gradwire
from support.rank_pool import RankPool, Scenario, named
from support.ranks import Layers, gathered
from support.torch_versions import HAS_FSDP2


def groups() -> list[str]:
    """The names of the groups that this rank is in."""
    return sorted(distributed_c10d._world.pg_names.values())


def step(model: nn.Module, rank: int) -> None:
    model(torch.full((2, 12), float(rank), dtype=torch.float32)).sum().backward()


def attached_by_ranks_with_different_groups(rank: int) -> None:
    """They are in different numbers of groups, and have made different numbers of them."""
    two = dist.new_group([0, 1])
    dist.new_group([0, 2])
    if rank == 1:
        dist.new_group([1], use_local_synchronization=True)
    if rank < 2:
        model = DistributedDataParallel(Layers(2), process_group=two)
        gradwire.ddp.attach(model, "co3", timeout=20)
        step(model, rank)


def groups_of_the_training_keep_their_names(rank: int) -> None:
    """torch numbers them on every rank by itself: a group of some ranks that it counts makes all later ones meet
    nobody."""
    two, before = dist.new_group([0, 1]), dist.new_group()
    if rank < 2:
        model = DistributedDataParallel(Layers(2), process_group=two)
        gradwire.ddp.attach(model, "co3")
        step(model, rank)
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    of_all = DistributedDataParallel(Layers(2))
    gradwire.ddp.attach(of_all, "co3", aggregate="hierarchical")
    step(of_all, rank)
    after = dist.new_group()
    assert int(after.group_name) == int(before.group_name) + 1
    dist.barrier(after)


def groups_are_given_back(rank: int) -> None:
    two = dist.new_group([0, 1])
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    for _ in range(3):
        before = groups()
        if rank < 2:
            model = DistributedDataParallel(Layers(2), process_group=two)
            handle = gradwire.ddp.attach(model, "co3")
            step(model, rank)
            assert groups() != before
            handle.detach()
        of_all = DistributedDataParallel(Layers(2))
        handle = gradwire.ddp.attach(of_all, "co3", aggregate="hierarchical")
        step(of_all, rank)
        handle.detach()
        assert groups() == before, groups()


def groups_of_models_that_are_collected(rank: int) -> None:
    """Of all wrappers, without a word to their handles."""
    two = dist.new_group([0, 1])
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    before = groups()
    for _ in range(2):
        models = []
        if rank < 2:
            models.append(DistributedDataParallel(Layers(2), process_group=two))
            gradwire.ddp.attach(models[0], "co3")
            models.append(gradwire.DataParallel(Layers(2), "co3", process_group=two))
        models.append(gradwire.DataParallel(Layers(2), "co3", aggregate="hierarchical"))
        models.append(DistributedDataParallel(Layers(2)))
        models[-1].register_comm_hook(gradwire.ddp.State("co3"), gradwire.ddp.hook)
        for model in models:
            step(model, rank)
        assert groups() != before
        dist.barrier()  # those that are behind still exchange
        del model, models
        gc.collect()
        assert groups() == before, groups()


def groups_of_ranks_that_disagree_are_given_back(rank: int) -> None:
    """Every try made another one, with its sockets and threads."""
    before, spec = groups(), "ecq" if rank == 1 else "co3"
    for _ in range(2):
        model = DistributedDataParallel(Layers(2))
        for attach in (gradwire.ddp.attach, lambda model, spec: gradwire.DataParallel(model.module, spec)):
            with pytest.raises(gradwire.AggregateError, match="rank 1 has spec ecq"):
                attach(model, spec)
            assert groups() == before, groups()
    handle = gradwire.ddp.attach(model, "co3")  # the same model can be attached after all
    step(model, rank)
    handle.detach()
    assert groups() == before, groups()


def group_of_one_rank_is_given_back(rank: int) -> None:
    """Hybrid sharding needs one."""
    from torch.distributed.fsdp import fully_shard

    model = Layers(2)
    fully_shard(model, mesh=init_device_mesh("cpu", (3, 1), mesh_dim_names=("replicate", "shard")))
    before = groups()
    for _ in range(2):
        handle = gradwire.fsdp.attach(model, "co3")
        assert len(groups()) == len(before) + 1
        step(model, rank)
        handle.detach()
        assert groups() == before, groups()
    assert gathered("done") == ["done"] * 3


SCENARIOS = [attached_by_ranks_with_different_groups, groups_of_the_training_keep_their_names, groups_are_given_back,
             groups_of_models_that_are_collected, groups_of_ranks_that_disagree_are_given_back]  # fmt: skip
SCENARIOS += [group_of_one_rank_is_given_back] if HAS_FSDP2 else []


@pytest.mark.parametrize("scenario", named(SCENARIOS))
def test_on_three_ranks(ranks: RankPool, scenario: Scenario) -> None:
    ranks.check(scenario, seconds=30)
