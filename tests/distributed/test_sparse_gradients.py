"""Embeddings with sparse=True: averaged as they are under `none`, and refused in words under any other recipe."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire import GradwireError
from support.rank_pool import RankPool, Scenario, named
from support.ranks import check_raises, digest, gathered

WORLD = 2


class Text(nn.Module):
    """Two embeddings, of which the first comes last in the backward pass, and one is used only when asked for."""

    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8, sparse=sparse)
        self.spare = nn.EmbeddingBag(20, 8, sparse=sparse, mode="sum")
        self.last = nn.Linear(8, 4)

    def forward(self, words: torch.Tensor, spare: bool = True) -> torch.Tensor:
        x = self.embed(words).sum(0, keepdim=True)
        return self.last(x + self.spare(words[None] % 20) if spare else x)


def make(sparse: bool = True) -> Text:
    torch.manual_seed(0)
    return Text(sparse)


def words(rank: int, step: int) -> torch.Tensor:
    return torch.tensor([rank, 3, 3, 7 + rank + step])


SPEC = {"embed*": "none", "spare*": "none", "*": "co3"}


def attached(model: nn.Module, spec: object = SPEC, **options: object) -> nn.Module:
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.0001)
    gradwire.ddp.attach(ddp, spec, **options)
    return ddp


def data_parallel(model: nn.Module, spec: object = SPEC, **options: object) -> nn.Module:
    return gradwire.DataParallel(model, spec, **options)


def check_alike(model: nn.Module) -> None:
    assert len(set(gathered(digest({name: p.detach() for name, p in model.named_parameters()})))) == 1


def the_same_training_as_without_a_hook(rank: int) -> None:
    for wrap, spec in itertools.product((attached, data_parallel), (SPEC, "none")):
        results = []
        for make_model in (DistributedDataParallel, functools.partial(wrap, spec=spec)):
            inner = make()
            model = make_model(inner)
            optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
            for step in range(4):
                optimizer.zero_grad()
                model(words(rank, step)).pow(2).sum().backward()
                gradient = inner.embed.weight.grad
                assert gradient.is_sparse
                if step == 0:
                    results.append(gradient.to_dense())
                optimizer.step()
            check_alike(inner)
        assert torch.allclose(results[0], results[1], atol=1e-7)
        if wrap is data_parallel:
            figures = model.gradwire.stats()
            assert figures["steps"] == 4 and figures["wire_bytes_sent"] > 0


def accumulated_and_not_used(rank: int) -> None:
    """Under no_sync rows are collected. A rank that used none gets the rows of others, or None if no rank used any."""
    model = data_parallel(make())
    with model.no_sync():
        model(words(rank, 0)).sum().backward()
    model(words(rank, 1)).sum().backward()
    rows = set(model.module.embed.weight.grad.coalesce().indices().flatten().tolist())
    assert rows == {0, 1, 3, 7, 8, 9}
    model.zero_grad()
    model(words(rank, 0), spare=rank == 0).sum().backward()
    assert model.module.spare.weight.grad._nnz() == 3, "rank 0's rows, on both ranks"
    model.zero_grad()
    model(words(rank, 0), spare=False).sum().backward()
    assert model.module.spare.weight.grad is None


def a_sparse_gradient_that_is_not_finite(rank: int) -> None:
    """Error memories of all other parameters stay as they were, on all ranks."""
    for wrap in (attached, data_parallel):
        inner = make()
        model = wrap(inner, {**SPEC, "*": "topk:p=0.1,small=same"})
        handle = model.gradwire if wrap is data_parallel else model._gradwire_slot.state
        model(words(rank, 0)).sum().backward()
        before = {name: e.clone() for name, e in handle.state_dict()["memory"].items()}
        inner.embed.weight.register_hook(lambda g: g * (float("nan") if rank else 1.0))
        model.zero_grad()
        model(words(rank, 1)).sum().backward()
        after = handle.state_dict()["memory"]
        assert before and all(torch.equal(e, after[name]) for name, e in before.items())


def refusals(rank: int) -> None:
    for wrap in (attached, data_parallel):

        def step(wrap: object = wrap, **options: object) -> None:
            model = wrap(make(), **options)
            model(words(rank, 0)).sum().backward()

        check_raises(GradwireError, "'spare.weight': 'none'", lambda: step(spec={"embed*": "none", "*": "co3"}))
        inner = make()
        optimizer = torch.optim.SGD(inner.parameters(), lr=0.1, momentum=0.9)

        def taken_over(inner: Text = inner, optimizer: torch.optim.Optimizer = optimizer, wrap: object = wrap) -> None:
            model = wrap(inner, {**SPEC, "*": "stc"}, optimizer=optimizer)
            model(words(rank, 0)).sum().backward()

        check_raises(GradwireError, "an optimizer of its own", taken_over)
    dense = data_parallel(make(sparse=False), "co3")
    dense(words(rank, 0)).sum().backward()


SCENARIOS = [
    the_same_training_as_without_a_hook, accumulated_and_not_used, a_sparse_gradient_that_is_not_finite, refusals,
]  # fmt: skip


@pytest.mark.parametrize("scenario", named(SCENARIOS))
def test_on_two_ranks(ranks: RankPool, scenario: Scenario) -> None:
    ranks.check(scenario, WORLD, 30)
