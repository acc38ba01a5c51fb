"""Compressed DDP with peers that disagree, hang and die: three workers, real processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import gradwire
from gradwire import AggregateError
from support.rank_pool import connect, named
from support.ranks import backward, make_ddp


class Bucket:
    """What DDP hands to a hook; made by hand, because DDP itself refuses models that differ in shape."""

    def __init__(self, sizes: list[int], index: int = 0, last: bool = True):
        self._parameters = [torch.zeros(n) for n in sizes]
        self._buffer, self._index, self._last = torch.randn(sum(sizes)), index, last

    def parameters(self) -> list[torch.Tensor]:
        return self._parameters

    def gradients(self) -> list[torch.Tensor]:
        return list(self._buffer.split([p.numel() for p in self._parameters]))

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._last


def timed(scenario: Callable[[int, list[float]], None], seconds: float, rank: int, folder: Path) -> dict[str, object]:
    """What the scenario raised, and after how long: from its beginning, or from where it adds to the clock."""
    connect(rank, folder, "store", seconds)
    clock = [time.monotonic()]
    try:
        value: object = scenario(rank, clock)
    except Exception as error:
        value = (type(error).__name__, str(error))
    result = {"value": value, "seconds": time.monotonic() - clock[-1]}
    dist.destroy_process_group()
    return result


def check_aggregate_error(result: dict, message: str, seconds: float) -> None:
    kind, text = result["value"]
    assert kind == AggregateError.__name__, text
    assert message in text
    assert result["seconds"] < seconds


def other_spec(rank: int, clock: list[float]) -> None:
    """Rank 0 sends the biases in a frame of their own."""
    model = make_ddp()
    gradwire.ddp.attach(model, {"*.bias": "none", "*": "co3"} if rank == 0 else "co3")
    backward(model, rank, 0)


def other_sizes(rank: int, clock: list[float]) -> None:
    gradwire.ddp.State("co3").reduce(Bucket([5000 + 10 * rank]))


def other_parameters(rank: int, clock: list[float]) -> None:
    gradwire.ddp.State("co3").reduce(Bucket([5000, 5000] if rank == 2 else [5000]))


def more_buckets(rank: int, clock: list[float]) -> None:
    """Rank 0 goes on to a second bucket that nobody else has."""
    state = gradwire.ddp.State("co3")
    state.reduce(Bucket([5000], last=rank != 0))
    if rank == 0:
        state.reduce(Bucket([5000], index=1))


def damage(rank: int, clock: list[float]) -> None:
    """A bit of what rank 2 sends is flipped on its way."""
    state = gradwire.ddp.State("co3")
    gather = state.exchange._all_gather.transport
    start = gather.start

    def damaged_start(key: object, subject: object, block: torch.Tensor, length: int) -> object:
        if rank == 2:
            block[length] ^= 1
        return start(key, subject, block, length)

    gather.start = damaged_start
    state.reduce(Bucket([5000]))


def hang(rank: int, clock: list[float]) -> None:
    """Rank 1 falls asleep in the middle of a step, for longer than the timeout of five seconds."""
    model = make_ddp()
    gradwire.ddp.attach(model, "co3")
    backward(model, rank, 0)
    backward(model, rank, 1)
    if rank == 1:
        model.module.first.weight.register_hook(lambda grad: time.sleep(12))
    clock.append(time.monotonic())
    backward(model, rank, 2)


def death(rank: int, clock: list[float]) -> None:
    """Rank 1 is killed in the middle of a step, with buckets under way."""
    model = make_ddp()
    gradwire.ddp.attach(model, "co3")
    backward(model, rank, 0)
    backward(model, rank, 1)
    if rank == 1:
        model.module.first.weight.register_hook(lambda grad: os.kill(os.getpid(), signal.SIGKILL))
    clock.append(time.monotonic())
    backward(model, rank, 2)


DISAGREEING = [other_spec, other_sizes, other_parameters, damage]


@pytest.mark.parametrize("scenario", named(DISAGREEING, {"other_parameters", "damage"}))
def test_workers_that_disagree_are_told(ranks, scenario):
    bad = ranks.run(partial(timed, scenario, 20))
    for rank in (0, 2):
        check_aggregate_error(bad[rank], "same model", seconds=10)
    if scenario is damage:
        assert "checksum mismatch" in bad[0]["value"][1]
        assert "rank 2 sent" in bad[0]["value"][1]


@pytest.mark.thorough
def test_a_bucket_that_nobody_else_has_is_an_error(ranks):
    bad = ranks.run(partial(timed, more_buckets, 10))
    check_aggregate_error(bad[0], "rank 1 is gone", seconds=15)


@pytest.mark.thorough
def test_a_peer_that_hangs_is_an_error_after_the_timeout(ranks):
    bad = ranks.run(partial(timed, hang, 5))
    for rank in (0, 2):
        check_aggregate_error(bad[rank], "rank 1 is alive and computes in step 2", seconds=11)


def test_a_peer_that_dies_is_an_error_within_the_timeout(ranks):
    bad = ranks.run(partial(timed, death, 10))
    assert bad[1] is None, "rank 1 was killed"
    for rank in (0, 2):
        check_aggregate_error(bad[rank], "rank 1 is gone", seconds=10)
