"""Tensors that are cut into several messages, which are under way at the same time."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.aggregate.messages import tensor_parts
from support.rank_pool import RankPool, Scenario, named
from support.ranks import check_alike, gathered

ENTRIES = 50_003  # thirteen chunks of 4096 entries, of which the last is not whole


class Weight(nn.Module):
    """The gradient of its parameter is the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(ENTRIES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


def _check_chunks(rank: int, aggregate: str, data_parallel: bool) -> None:
    """The mean of a tensor in chunks, plus the mean of what ranks remember, is the mean of the gradients."""
    before, tensor_parts.CHUNK = tensor_parts.CHUNK, tensor_parts.ALIGNED
    try:
        if data_parallel:
            model = gradwire.DataParallel(Weight(), "co3:decay=1", aggregate=aggregate)
            handle, inner = model.gradwire, model.module
        else:
            model = DistributedDataParallel(Weight())
            handle, inner = gradwire.ddp.attach(model, "co3:decay=1", aggregate=aggregate), model.module
        received, sent = torch.zeros(ENTRIES), torch.zeros(ENTRIES)
        for step in range(3):
            model.zero_grad()
            x = torch.randn(ENTRIES, generator=torch.Generator().manual_seed(10 * step + rank))
            model(x).backward()
            received += inner.weight.grad
            sent += x
        state = handle.state_dict()
        left = gathered((state["memory"]["weight"], state.get("shards", {}).get("weight", torch.zeros(ENTRIES))))
        of_ranks = torch.stack([memory for memory, _ in left]).mean(0)
        of_owners = torch.stack([shards for _, shards in left]).sum(0)
        wanted = torch.stack(gathered(sent)).mean(0)
        torch.testing.assert_close(received + of_ranks + of_owners, wanted, rtol=1e-4, atol=1e-5)
        assert handle.gradients.exchange.messages >= 3 * 10, "the tensor was not cut"
        check_alike(inner)
    finally:
        tensor_parts.CHUNK = before


def ddp_in_chunks(rank: int) -> None:
    _check_chunks(rank, "all_gather", data_parallel=False)


def ddp_in_chunks_by_owners(rank: int) -> None:
    _check_chunks(rank, "scatter_reduce", data_parallel=False)


def data_parallel_in_chunks(rank: int) -> None:
    _check_chunks(rank, "all_gather", data_parallel=True)


@pytest.mark.parametrize("scenario", named([ddp_in_chunks, ddp_in_chunks_by_owners, data_parallel_in_chunks]))
def test_chunks_on_three_ranks(ranks: RankPool, scenario: Scenario) -> None:
    ranks.check(scenario)
