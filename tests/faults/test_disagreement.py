"""Ranks that differ in spec, version, model or step: all are told who it is and how it differs, and nobody hangs."""

from __future__ import annotations

import re
import time

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire import AggregateError
from gradwire.aggregate.peers import handshake
from gradwire.aggregate.transport.all_to_all import AllToAll
from support.rank_pool import RankPool, Scenario, named
from support.ranks import Net, check_raises, loss_of

TIMEOUT = 3.0  # seconds that gradwire waits for a peer here


def make_ddp(model: nn.Module | None = None) -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(model or Net(), bucket_cap_mb=0.001)


def train(model: nn.Module, rank: int, steps: int = 1) -> None:
    for step in range(steps):
        model.zero_grad()
        loss_of(model, rank, step).backward()


# ── at attach ──


def other_spec(rank: int) -> None:
    spec = "co3:format=fp8" if rank == 1 else "co3"
    mine = [str(gradwire.recipe(s)) for s in ("co3:format=fp8", "co3")]
    check_raises(
        AggregateError, f"rank 1 has spec {mine[0]}, rank 0 {mine[1]}", lambda: gradwire.ddp.attach(make_ddp(), spec)
    )
    gradwire.ddp.attach(make_ddp(), "co3")  # all are alive, and can try again


def other_aggregation(rank: int) -> None:
    chosen = "scatter_reduce" if rank == 2 else "all_gather"
    expected = "rank 2 has aggregate scatter_reduce, rank 0 all_gather"
    check_raises(AggregateError, expected, lambda: gradwire.DataParallel(Net(), "co3", aggregate=chosen))


def other_version(rank: int) -> None:
    """It is known before anything else of the other version is looked at."""
    before = handshake.__version__
    handshake.__version__ = "9.9.9" if rank == 2 else before
    try:
        expected = f"rank 2 runs gradwire 9.9.9, rank 0 {before}"
        check_raises(AggregateError, expected, lambda: gradwire.ddp.attach(make_ddp(), "co3"))
    finally:
        handshake.__version__ = before


def other_names(rank: int) -> None:
    """DDP itself looks at shapes only."""
    model = Net()
    if rank == 0:
        model.head, model.last.forward = model.last, None
        del model._modules["last"]
        model.__dict__["last"] = model.head
    expected = "rank 0 has a parameter 'head.weight', the others do not"
    check_raises(AggregateError, expected, lambda: gradwire.ddp.attach(make_ddp(model), "co3"))


def other_shapes(rank: int) -> None:
    model = Net()
    model.last = nn.Linear(64, 6 if rank == 1 else 5)
    expected = "rank 1 has last.weight as float32 (6, 64), rank 0 float32 (5, 64)"
    check_raises(AggregateError, expected, lambda: gradwire.DataParallel(model, "co3"))


def other_dtype_and_frozen(rank: int) -> None:
    model = Net()
    model.last = model.last.to(torch.float64 if rank == 1 else torch.float32)
    model.norm.bias.requires_grad_(rank != 2)
    expected = "rank 2 has norm.bias as float32 (64,) without gradient, rank 0 float32 (64,); rank 1 has last.weight as"
    check_raises(AggregateError, expected, lambda: gradwire.DataParallel(model, "co3"))


def not_attached(rank: int) -> None:
    model = make_ddp()
    if rank == 1:
        time.sleep(TIMEOUT + 1.5)
    else:
        expected = f"rank 1 did not attach within {TIMEOUT:g} s"
        check_raises(AggregateError, expected, lambda: gradwire.ddp.attach(model, "co3", timeout=TIMEOUT))


# ── in mid-training ──


def other_step(rank: int) -> None:
    """One rank has loaded another checkpoint."""
    model = make_ddp()
    handle = gradwire.ddp.attach(model, "co3", timeout=TIMEOUT)
    train(model, rank)
    if rank == 1:
        handle.load_state_dict({**handle.state_dict(), "steps": 5})
    with pytest.raises(AggregateError) as caught:
        train(model, rank)
    # What a rank has found out itself, or was told by the first that did.
    by_others, by_itself = (
        r"rank 1 is at step 5, (this rank|rank [02]) at step 1",
        r"at step 1, (this rank|rank 1) at step 5",
    )
    assert re.search(f"{by_others}|{by_itself}", str(caught.value)), str(caught.value)


def fewer_steps(rank: int) -> None:
    """A rank has run out of batches, and does something else."""
    model = gradwire.DataParallel(Net(), "co3", timeout=TIMEOUT)
    train(model, rank, 2)
    if rank == 1:
        time.sleep(TIMEOUT + 1.5)
    else:
        check_raises(AggregateError, "rank 1 is alive and computes in step 2, for", lambda: train(model, rank))


def another_codec(rank: int) -> None:
    """A rank changes its codec without the others."""
    model = make_ddp()
    gradwire.ddp.attach(model, "co3", timeout=TIMEOUT)
    train(model, rank, 2)
    if rank == 1:
        expected = "ranks 0, 2 did not attach within 3 s"
        check_raises(AggregateError, expected, lambda: gradwire.ddp.attach(model, "ecq", timeout=TIMEOUT))
    else:
        check_raises(AggregateError, "rank 1 is alive and computes in step 2, for", lambda: train(model, rank))


def frozen_later(rank: int) -> None:
    """DDP waits for the gradient of a parameter that one rank has frozen: its last bucket never comes."""
    model = make_ddp()
    gradwire.ddp.attach(model, "co3", timeout=TIMEOUT)
    train(model, rank, 2)
    if rank == 1:
        model.module.first.weight.requires_grad_(False)
        train(model, rank)
        time.sleep(TIMEOUT + 1.5)
    else:
        check_raises(AggregateError, "rank 1 is alive", lambda: train(model, rank))


def damaged_shard(rank: int) -> None:
    """Only the owner of a shard sees that it came damaged; it tells the others."""
    model = gradwire.DataParallel(Net(), "co3", aggregate="scatter_reduce")
    train(model, rank, 2)
    start = AllToAll.start

    def damaged_start(self, key, subject, blocks, lengths):
        if rank == 2:
            blocks[0][lengths[0] + 12] ^= 1
        return start(self, key, subject, blocks, lengths)

    AllToAll.start = damaged_start
    try:
        who = "this rank" if rank == 0 else "rank 0"
        check_raises(AggregateError, f"rank 2 sent what {who} cannot use", lambda: train(model, rank))
    finally:
        AllToAll.start = start


def error_of_one(rank: int) -> None:
    """Whatever else goes wrong on a rank, the others learn at once."""
    model = make_ddp()
    handle = gradwire.ddp.attach(model, "co3")
    train(model, rank, 2)
    if rank == 1:

        def encode(*_: object, **__: object) -> None:
            raise MemoryError("no room")

        handle.state.exchange.coder.encode = encode
        check_raises(MemoryError, "no room", lambda: train(model, rank))
    else:
        check_raises(AggregateError, "rank 1 failed: MemoryError: no room", lambda: train(model, rank))


def stopped_while_all_ranks_save(rank: int) -> None:
    """It is in the call with the others, and stops before the states are gathered: gradwire's timeout counts there."""
    model = gradwire.DataParallel(Net(), "co3", timeout=TIMEOUT)
    train(model, rank)
    began = time.monotonic()
    if rank == 1:
        with model.gradwire.all_ranks.together("handle.all_ranks.state_dict()"):
            time.sleep(TIMEOUT + 1.5)
    else:
        expected = r"rank 1 is alive and .* in step 1, for"
        with pytest.raises(AggregateError, match=expected):
            model.gradwire.all_ranks.state_dict()
        assert time.monotonic() - began < 4 * TIMEOUT


def saved_after_detach(rank: int) -> None:
    """Its own process group is gone then."""
    model = gradwire.DataParallel(Net(), "co3", timeout=TIMEOUT)
    train(model, rank)
    model.gradwire.detach()
    assert len(model.gradwire.all_ranks.state_dict().get("ranks", ())) == (3 if rank == 0 else 0)


SCENARIOS = [
    other_spec, other_aggregation, other_version, other_names, other_shapes, other_dtype_and_frozen, not_attached,
    other_step, fewer_steps, another_codec, frozen_later, damaged_shard, error_of_one, stopped_while_all_ranks_save,
    saved_after_detach,
]  # fmt: skip
QUICK = {"other_spec", "other_version", "other_shapes", "damaged_shard"}


@pytest.mark.parametrize("scenario", named(SCENARIOS, QUICK))
def test_disagreement_on_three_ranks(ranks: RankPool, scenario: Scenario) -> None:
    ranks.check(scenario)
