"""Codecs that use the shape of a tensor get whole rows of it, wherever tensors are cut and whoever gets a part."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.aggregate.messages import tensor_parts
from gradwire.aggregate.messages.tensor_parts import TensorPart, shards_for_ranks, split_into_messages
from gradwire.catalogue.spec_by_name import parse_spec
from gradwire.frame import headers
from support.frames_seen import Seen, frames_seen
from support.rank_pool import RankPool, Scenario, named
from support.ranks import gathered

ROWS, REST = 45, (32, 3, 3)  # 12 960 entries, 288 of them in a row


def parts_of(tensor: torch.Tensor, spec: str) -> list[TensorPart]:
    return [part for message in split_into_messages([("w", tensor)], parse_spec(spec)) for part in message]


@pytest.fixture
def short_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_parts, "CHUNK", 4096)


@pytest.mark.usefixtures("short_messages")
def test_a_tensor_is_cut_between_its_rows_for_codecs_that_use_its_shape():
    tensor = torch.arange(ROWS * 288.0).view(ROWS, *REST)
    parts = parts_of(tensor, "structured")
    assert [part.shape for part in parts] == [(12, *REST)] * 3 + [(9, *REST)]
    assert torch.equal(torch.cat([part.entries for part in parts]), tensor)
    assert torch.equal(torch.cat([part.of(2 * tensor) for part in parts]), 2 * tensor)
    assert [part.key for part in parts_of(tensor, "co3")] == [
        "w[0:4096]",
        "w[4096:8192]",
        "w[8192:12288]",
        "w[12288:12960]",
    ]
    assert all(part.entries.dim() == 1 for part in parts_of(tensor, "co3"))
    shards = shards_for_ranks(parts[:1], 1, {}) + shards_for_ranks([tensor_parts.replace(parts[0], hi=12960)], 3, {})
    assert [part.shape for shard in shards for part in shard] == [(12, *REST)] + [(15, *REST)] * 3


@pytest.mark.usefixtures("short_messages")
def test_what_has_no_rows_that_fit_a_message_is_cut_as_ever():
    for shape in ((10_000,), (1, 10_000), (2, 5000)):
        parts = parts_of(torch.zeros(shape), "structured")
        assert [part.shape for part in parts] == [(4096,), (4096,), (1808,)], shape


class Weight(nn.Module):
    """The gradient of its parameter is the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(ROWS, *REST))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


def check_means(rank: int, aggregate: str, data_parallel: bool = False) -> Seen:
    """What came, plus what ranks and owners remember, is what was given; return which frames there were."""
    if data_parallel:
        model = gradwire.DataParallel(Weight(), "structured:decay=1", aggregate=aggregate)
        handle, inner = model.gradwire, model.module
    else:
        model = DistributedDataParallel(Weight())
        handle, inner = gradwire.ddp.attach(model, "structured:decay=1", aggregate=aggregate), model.module
    received, sent = torch.zeros(ROWS, *REST), torch.zeros(ROWS, *REST)
    with frames_seen() as seen:
        for step in range(2):
            model.zero_grad()
            x = torch.randn(ROWS, *REST, generator=torch.Generator().manual_seed(10 * step + rank))
            model(x).backward()
            received += inner.weight.grad
            sent += x
    state = handle.state_dict()
    left = gathered((state["memory"]["weight"], state.get("shards", {}).get("weight", torch.zeros_like(sent))))
    in_all = received + torch.stack([m for m, _ in left]).mean(0) + torch.stack([s for _, s in left]).sum(0)
    torch.testing.assert_close(in_all, torch.stack(gathered(sent)).mean(0), rtol=1e-4, atol=1e-5)
    assert {codec for codec, _ in seen} == {headers.STRUCTURED}
    return seen


def in_chunks(rank: int) -> None:
    before, tensor_parts.CHUNK = tensor_parts.CHUNK, 4096
    try:
        for data_parallel in (False, True):
            seen = check_means(rank, "all_gather", data_parallel)
            assert {shape for _, shape in seen} == {(12, *REST), (9, *REST)}
    finally:
        tensor_parts.CHUNK = before


def by_owners(rank: int) -> None:
    """The frames of a shard, and those of its mean."""
    seen = check_means(rank, "scatter_reduce")
    assert {shape for _, shape in seen} == {(15, *REST)} and len(seen) == 2 * (3 + 3)


def a_state_of_owners_is_loaded(rank: int) -> None:
    """Also by a rank that owns other rows than the one that saved it: what it remembers is sent with the next step."""
    shards = {"weight": torch.ones(ROWS, *REST)}
    model = DistributedDataParallel(Weight())
    handle = gradwire.ddp.attach(model, "structured:decay=1,nmse=1e-4", aggregate="scatter_reduce")
    handle.load_state_dict({**handle.state_dict(), "shards": shards})
    x = torch.randn(ROWS, *REST, generator=torch.Generator().manual_seed(1))
    model(x).backward()
    error = model.module.weight.grad - (x + 1)
    assert float(error.norm() / (x + 1).norm()) < 0.05


def between_hosts(rank: int) -> None:
    """Two hosts of two ranks: a rank of a host sends some rows of the host's mean."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    try:
        seen = check_means(rank, "hierarchical")
    finally:
        del os.environ["LOCAL_WORLD_SIZE"]
    assert {shape for _, shape in seen} == {(23, *REST) if rank % 2 == 0 else (22, *REST)}


@pytest.mark.parametrize("scenario", named([in_chunks, by_owners, a_state_of_owners_is_loaded]))
def test_on_three_ranks(ranks: RankPool, scenario: Scenario) -> None:
    ranks.check(scenario)


def test_between_hosts(ranks: RankPool) -> None:
    ranks.check(between_hosts, 4)
