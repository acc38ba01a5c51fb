"""What broke the exchange once: late peers, failed backward passes, damaged messages, odd models. Real processes."""

from __future__ import annotations

import gc
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradwire
from gradwire import AggregateError, FrameError, GradwireError, data_parallel
from gradwire.aggregate.exchanges.shard_owner_memory import ShardMemory
from gradwire.aggregate.messages import present_tensors
from gradwire.aggregate.messages.model_recipes import ModelRecipes
from gradwire.aggregate.messages.tensor_parts import TensorPart
from gradwire.aggregate.transport.link import Link
from gradwire.aggregate.transport.message_prefix import PREFIX, Subject
from gradwire.engine.auto import CANDIDATES, Auto
from support.rank_pool import RankPool, Scenario, named
from support.ranks import Net, check_raises, digest, gathered, loss_of

WORLD = 2


class Weights(nn.Module):
    def __init__(self, entries: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(entries))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


def rests_of_a_late_peer(rank: int) -> None:
    """The rest of a message that has outgrown its block is waited for, longer than the slices in which we wait."""
    entries = 3 * WORLD * 4096
    model = gradwire.DataParallel(Weights(entries), "co3", aggregate="scatter_reduce")
    send_and_receive = Link.send_and_receive
    counts = []

    def late(self: Link, sent: dict, received: dict) -> None:
        counts.append(len(sent) + len(received))
        time.sleep(0.6 * rank)
        send_and_receive(self, sent, received)

    Link.send_and_receive = late
    try:
        for step in range(3):
            x = torch.randn(entries, generator=torch.Generator().manual_seed(rank))
            x[20:] *= step == 2  # after the first step the order is another, and lengths are agreed on anew
            model.zero_grad()
            model(x).backward()
    finally:
        Link.send_and_receive = send_and_receive
    assert max(counts) > 0
    assert len(set(gathered(digest({"g": model.module.weight.grad})))) == 1


def backward_that_fails_on_one_rank(rank: int) -> None:
    """After some gradients were sent, and caught: all ranks get an AggregateError that says so, and no crash."""
    before, data_parallel.TOGETHER = data_parallel.TOGETHER, 1
    model = gradwire.DataParallel(Net(), "none")
    loss_of(model, rank, 0).backward()
    data_parallel.TOGETHER = before

    def fail(gradient: torch.Tensor) -> None:
        raise KeyError("mine")

    if rank == 1:
        model.module.first.weight.register_hook(fail)
        check_raises(KeyError, "mine", lambda: loss_of(model, rank, 1).backward())
    start = time.monotonic()
    for _ in range(2):
        check_raises(
            AggregateError, "a backward pass of rank 1 ended with an error", lambda: loss_of(model, rank, 2).backward()
        )
    assert time.monotonic() - start < 8


def lengths_that_cannot_be(rank: int) -> None:
    """No memory is taken for them, in the first exchange as in later ones."""
    for aggregate in ("all_gather", "scatter_reduce"):
        for first in (True, False):
            model = gradwire.DataParallel(Weights(9000), "co3", aggregate=aggregate)
            if not first:
                model(torch.ones(9000)).backward()
            _with_lengths(2**39 if rank == 1 else None, lambda m=model: m(torch.ones(9000)).backward())
            dist.barrier()


def _with_lengths(length: int | None, work: Callable[[], object]) -> None:
    collective = Link.all_to_all

    def damaged(self: Link, parts: list[torch.Tensor], *rest: object) -> object:
        if length is not None:
            parts = [part.clone() for part in parts]
            for part in parts:
                if len(part):
                    struct.pack_into("<Q", part.view(torch.uint8).numpy(), 0, length)
        return collective(self, parts, *rest)

    Link.all_to_all = damaged
    try:
        if length is None:
            check_raises(AggregateError, "rank 1 announced a message of 5497558", work)
        else:  # it does not see what it sends, and may be through before the others have looked
            with suppress(AggregateError):
                work()
    finally:
        Link.all_to_all = collective


def momentum_is_masked_in_every_shard(rank: int) -> None:
    for aggregate in ("all_gather", "scatter_reduce"):
        inner = Weights(WORLD * 8192)
        optimizer = torch.optim.SGD(inner.parameters(), 0.1, momentum=0.9)
        model = gradwire.DataParallel(
            inner, "dgc:warmup=0,p=0.01,clip_norm=0", optimizer=optimizer, aggregate=aggregate
        )
        model(torch.randn(WORLD * 8192, generator=torch.Generator().manual_seed(rank))).backward()
        velocity = model.gradwire.gradients.memories.velocity.memory["weight"]
        assert all(bool((shard == 0).any()) for shard in velocity.chunk(WORLD)), aggregate


def parameters_that_cannot_be_averaged(rank: int) -> None:
    inner = Net()
    inner.first.weight.requires_grad_(False)
    model = gradwire.DataParallel(inner, "co3")
    inner.first.weight.requires_grad_(True)
    check_raises(GradwireError, "'first.weight' was frozen", lambda: loss_of(model, rank, 0))
    model.gradwire.detach()
    inner.first.bias = nn.Parameter(torch.zeros(3, dtype=torch.float8_e4m3fn))
    check_raises(GradwireError, "in bfloat16", lambda: gradwire.DataParallel(inner, "co3"))


def models_are_collected(rank: int) -> None:
    """With the thread and the socket of each."""
    before = threading.active_count()
    for step in range(3):
        model = gradwire.DataParallel(Net(), "co3")
        loss_of(model, rank, step).backward()
        del model
        gc.collect()
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before, threading.enumerate()


def auto_keeps_the_aggregation(rank: int) -> None:
    """That was asked for, when it goes on to another recipe."""
    model = gradwire.DataParallel(Weights(9000), "auto", aggregate="scatter_reduce")
    model(torch.ones(9000)).backward()
    model.gradwire.gradients.tuner.use("ecq:rate=1")
    assert model.gradwire.aggregate == "scatter_reduce"


def half_precision_sums(rank: int) -> None:
    """Plain all-reduce of fp16 gradients whose sum is beyond its range, though their mean is not."""
    model = gradwire.DataParallel(Weights(10).half(), "auto")
    model.gradwire.gradients.connect()
    model.gradwire.gradients.exchange.use("all_reduce")
    model(torch.full((10,), 60000.0).half()).backward()
    assert model.module.weight.grad.tolist() == [60000.0 // 32 * 32] * 10


class Scale:
    """As of a GradScaler."""

    value = 1.0

    def get_scale(self) -> float:
        return self.value


def memories_that_go_with_plain_all_reduce(rank: int) -> None:
    """Under DDP: at the scale of the loss, and not in a step that a GradScaler will skip."""
    scale = Scale()
    model = nn.parallel.DistributedDataParallel(Weights(9000))
    handle = gradwire.ddp.attach(model, "auto", grad_scaler=scale)
    x = torch.randn(9000, generator=torch.Generator().manual_seed(rank))
    model(x).backward()
    gradients = handle.gradients
    memory = handle.state_dict()["memory"]["weight"]
    assert float(memory.abs().max()) > 0
    gradients.tuner.auto._left = gradients.tuner.auto._left[-1:]
    gradients.tuner.use("exact")
    scale.value = 4.0
    for value in (float("inf"), 1.0):
        model.zero_grad()
        model(4 * x * value).backward()
        if value > 1:
            assert torch.equal(handle.state_dict()["memory"]["weight"], memory)
    true = sum(gathered(4 * (x + memory))) / WORLD
    assert bool(((model.module.weight.grad - true).abs() < 1e-5).all())
    assert not handle.state_dict()["memory"]


SCENARIOS = [
    rests_of_a_late_peer, backward_that_fails_on_one_rank, lengths_that_cannot_be, momentum_is_masked_in_every_shard,
    parameters_that_cannot_be_averaged, models_are_collected, auto_keeps_the_aggregation, half_precision_sums,
    memories_that_go_with_plain_all_reduce,
]  # fmt: skip
QUICK = {
    "backward_that_fails_on_one_rank",
    "lengths_that_cannot_be",
    "momentum_is_masked_in_every_shard",
    "half_precision_sums",
    "memories_that_go_with_plain_all_reduce",
}


@pytest.mark.parametrize("scenario", named(SCENARIOS, QUICK))
def test_exchange_on_ranks(ranks: RankPool, scenario: Scenario) -> None:
    ranks.check(scenario, WORLD, seconds=20)


# ── without processes ─────────────────────────────────────────────────────────────────────────────


def test_presence_is_protected() -> None:
    """Another tensor of the same size must not take the place of one that was sent."""
    present = [True, False, True, True]
    note = np.frombuffer(present_tensors.pack(present) + b"frames", dtype=np.uint8)
    assert present_tensors.unpack(note, 4)[0] == present
    assert bytes(note[present_tensors.unpack(note, 4)[1] :]) == b"frames"
    for bit in range(8, 8 * (len(note) - 6)):
        damaged = note.copy()
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FrameError):
            present_tensors.unpack(damaged, 4)


def test_lengths_are_bounded() -> None:
    subject = Subject(3, 7, most=100)
    block = torch.zeros(PREFIX + 8, dtype=torch.uint8)
    subject.seal(block, 101)
    with pytest.raises(AggregateError, match="rank 5 announced a message of 101 bytes"):
        subject.check(5, block.numpy())
    subject.seal(block, 100)
    subject.check(5, block.numpy())


def test_shards_of_a_checkpoint_follow_the_scale() -> None:
    """Those that no step has asked for yet, too."""
    memory = ShardMemory()
    memory.load({"w": torch.full((4,), 3.0)})
    memory.rescale(8.0)
    assert memory.state_dict(8.0)["w"].tolist() == [3.0] * 4
    [plan] = ModelRecipes("co3").plan_frames([TensorPart("w", torch.zeros(4), 0, 4)], clock=0)
    memory.apart(plan)
    assert memory.errors.memory["w"].tolist() == [24.0] * 4


def test_auto_measures_again_after_an_overflow() -> None:
    """A GradScaler's first steps overflow: that says nothing about the candidates."""
    auto = Auto(lambda values: values, lambda: 1.0)
    auto.step_done(0.1, {})
    assert auto.measuring
    auto.step_done(0.1, dict.fromkeys(CANDIDATES[:-1], float("nan")))
    assert auto.measuring
    auto.step_done(0.1, dict.fromkeys(CANDIDATES[:-1], 0.01))
    assert not auto.measuring
    assert len(auto._left) == len(CANDIDATES)
