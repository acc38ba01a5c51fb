"""Parts and overlap of LocalSGD on three real ranks, and its outer optimizer. Every scenario checks itself on each."""

from __future__ import annotations

import copy
import itertools
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gradwire import AggregateError, CheckpointError, GradwireError, LocalSGD, SpecError
from gradwire.local_sgd.parts import Turns, divide
from gradwire.local_sgd.sync_round import Sync
from support.cases import for_each
from support.rank_pool import WORLD, RankPool, Scenario, connect, named
from support.ranks import (
    Loss,
    Net,
    Tensors,
    add_toy_recipe,
    check_alike,
    check_raises,
    check_that_rank_1_was_missed,
    digest,
    gathered,
    lose_rank_1,
    loss_of,
)
from support.torch_versions import HAS_MUON

STREAMING = {"sync_every": 4, "parts": 2, "overlap": 1}


def make(spec: object = "none", seed: int = 0, **options: object) -> LocalSGD:
    torch.manual_seed(seed)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return LocalSGD(model, optimizer, spec, **{**STREAMING, **options})


def step(handle: LocalSGD, rank: int, number: int, bad: bool = False) -> None:
    handle.optimizer.zero_grad()
    loss = loss_of(handle.model, rank, number)
    (loss * torch.nan if bad else loss).backward()
    handle.optimizer.step()


def values(model: nn.Module) -> Tensors:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


# ── turns ──


@for_each(("parts", "every"), [(1, 1), (1, 7), (2, 7), (3, 30), (4, 4), (5, 13)])
def test_every_part_has_its_turn_once_in_a_round(parts: int, every: int) -> None:
    turns, seen = Turns(parts), []
    for step in range(1, 3 * every + 1):
        turns.count_step()
        if turns.is_due(every):
            seen.append((step, turns.take_turn()))
    assert [part for _, part in seen] == 3 * list(range(parts))
    for part in range(parts):
        at = [step for step, other in seen if other == part]
        assert at[1] - at[0] == at[2] - at[1] == every
    assert min(b - a for (a, _), (b, _) in itertools.pairwise(seen)) >= turns.least_gap(every)


def test_a_turn_that_is_taken_back_counts_all_steps() -> None:
    turns = Turns(2)
    for _ in range(3):
        turns.count_step()
    assert turns.take_turn() == 0 and turns.unsent == [0, 3]
    turns.count_step()
    turns.take_back()
    assert (turns.next, turns.since, turns.unsent) == (0, 4, [4, 4])


def test_parts_are_about_as_large_as_each_other() -> None:
    sizes = {"embedding": 500, **{f"layer{i}": 100 for i in range(10)}, "head": 500}
    divided = divide(sizes, 4)
    assert [name for part in divided for name in part] == list(sizes)
    assert [sum(sizes[name] for name in part) for part in divided] == [500, 500, 500, 500]
    assert divide({"large": 1000, "a": 1, "b": 1}, 3) == [["large"], ["a", "b"]], "no part is empty"


# ── what it computes ──


def simulate(steps: int, every: int, parts: list[list[str]], overlap: int, mix: float | None) -> Tensors:
    """Streaming of all ranks, by hand: means move what is shared, and arrive `overlap` steps later."""
    common = values(make().model)
    handles = [make() for _ in range(WORLD)]
    outer = torch.optim.SGD(list(common.values()), lr=0.7, momentum=0.9, nesterov=True)
    flight: tuple[int, list[str], dict[str, torch.Tensor], list[Tensors]] | None = None

    def land() -> None:
        nonlocal flight
        if flight is None:
            return
        _, names, means, starts = flight
        flight = None
        for name in names:
            common[name].grad = -means[name]
        outer.step()
        for name in names:
            common[name].grad = None
        for handle, start in zip(handles, starts, strict=True):
            for name in names:
                p = handle.model.get_parameter(name)
                if mix is None or not within:
                    p.data = common[name] + (p.data - start[name])
                else:
                    p.data = mix * p.data + (1 - mix) * common[name]

    def send(number: int, at: int) -> None:
        nonlocal flight
        starts = [values(handle.model) for handle in handles]
        means = {n: sum(s[n] - common[n] for s in starts) / WORLD for n in parts[number]}
        flight = at, parts[number], means, starts

    turn, within = 0, True
    for i in range(1, steps + 1):
        for rank, handle in enumerate(handles):
            with warnings.catch_warnings(action="ignore"):
                step(handle, rank, i)
        if flight is not None and i >= flight[0]:
            land()
        if i % (every // len(parts)) == 0:
            send(turn, i + overlap)
            turn = (turn + 1) % len(parts)
            if not overlap:
                land()
    land()
    within = False
    for _ in parts:
        send(turn, 0)
        land()
        turn = (turn + 1) % len(parts)
    return common


def parts_and_overlap_by_hand(rank: int) -> None:
    for parts, overlap, mix in ((2, 0, None), (2, 1, None), (2, 2, None), (1, 3, None), (2, 1, 0.5), (1, 3, 0.0)):
        handle = make(outer="nesterov", parts=parts, overlap=overlap, mix=mix)
        with handle:
            for i in range(1, 12):
                step(handle, rank, i)
        expected = simulate(11, 4, handle._parts, overlap, mix)
        for name, p in handle.model.named_parameters():
            torch.testing.assert_close(p.detach(), expected[name], rtol=1e-5, atol=1e-6)
        check_alike(handle.model)


def replicas_share_the_common_parameters(rank: int) -> None:
    """With uneven ranks, error memories, and when they enter again; nothing of the error memories is lost."""
    for spec, outer in (("none", None), ("co3", "nesterov"), ("topk:p=0.05,ahead=0.5,flush=0.2,small=same", None)):
        handle = make(spec, outer=outer)
        for epoch, batches in enumerate(((9, 9, 9), (3, 7, 0), (0, 0, 0), (5, 2, 6))):
            with handle:
                for i in range(batches[rank]):
                    step(handle, rank, 20 * epoch + i)
            check_alike(handle.model)
            assert handle.pending == 0 and not handle._mid_round
            for name, p in handle.model.named_parameters():
                assert torch.equal(p, handle._common.tensors[name])
        assert len(set(gathered(handle.stats()["syncs"]))) == 1


def nothing_waits_for_a_mean_before_it_is_due(rank: int) -> None:
    """Rank 0 makes its steps up to the one where the mean is due while the others have not sent theirs."""
    handle = make("co3", sync_every=6, parts=1, overlap=3)
    with handle:
        for i in range(9):  # the first time, lengths are exchanged ahead
            step(handle, rank, i)
        if rank == 0:
            for i in range(9, 14):  # sent after the twelfth, due after the fifteenth
                step(handle, rank, i)
        dist.barrier()
        for i in range(14 if rank == 0 else 9, 20):
            step(handle, rank, i)
    check_alike(handle.model)


def a_function_as_a_schedule(rank: int) -> None:
    """Where it becomes shorter than the overlap, an exchange lands before the next one starts."""
    handle = make("co3", sync_every=lambda step: 12 if step < 13 else 2, overlap=5)
    with handle:
        for i in range(20):
            step(handle, rank, i)
    check_alike(handle.model)


def a_sync_by_hand_exchanges_all_parts(rank: int) -> None:
    handle = make("none")
    with handle:
        for i in range(3):
            step(handle, rank, i)
        handle.sync()
        check_alike(handle.model)
        step(handle, rank, 3)
    check_alike(handle.model)


def a_diverged_rank_is_left_out(rank: int) -> None:
    handle = make("co3")
    with warnings.catch_warnings(record=True) as caught, handle:
        warnings.simplefilter("always")
        for i in range(12):
            step(handle, rank, i, bad=rank == 1 and i == 4)
        assert any("rank 1 has a NaN" in str(w.message) for w in caught)
    check_alike(handle.model)
    assert all(bool(p.isfinite().all()) for p in handle.model.parameters())


# ── what is saved ──


def resuming(rank: int) -> None:
    """At every place of a round, with exchanges under way: the same bits as without stopping, or saving."""

    def fresh(seed: int) -> LocalSGD:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(20, 70), nn.BatchNorm1d(70), nn.Linear(70, 5))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return LocalSGD(model, optimizer, "co3", sync_every=6, parts=2, overlap=2, outer="nesterov")

    def train(handle: LocalSGD, start: int, stop: int, save_at: int = -1) -> object:
        saved = None
        with handle:
            for i in range(start, stop):
                if i == save_at:
                    model, optimizer = copy.deepcopy((handle.model.state_dict(), handle.optimizer.state_dict()))
                    saved = model, optimizer, copy.deepcopy(handle.state_dict())
                step(handle, rank, i)
        return saved

    straight = fresh(0)
    train(straight, 0, 14)
    expected = check_alike(straight.model)
    for at in (3, 4, 6, 8, 9):  # sent at 3, 6, 9; due at 5, 8, 11
        saving = fresh(0)
        model, optimizer, state = train(saving, 0, 14, at)
        assert check_alike(saving.model) == expected, "saving changes nothing"
        assert (state["under_way"] is not None) == (at not in (8,)), at
        resumed = fresh(rank)
        resumed.model.load_state_dict(model)
        resumed.optimizer.load_state_dict(optimizer)
        resumed.load_state_dict(state)
        train(resumed, at, 14)
        assert check_alike(resumed.model) == expected, at
    other = LocalSGD(resumed.model, resumed.optimizer, "co3", sync_every=6, outer="nesterov")
    check_raises(CheckpointError, "parts=2: build LocalSGD with as many", lambda: other.load_state_dict(state))
    for key, damage in (("part", 7), ("due", -1), ("start", {"a": torch.ones(1)}), ("moves", 1), ("buffers", "all")):
        wrong = {**state, "under_way": {**state["under_way"], key: damage}}
        check_raises(CheckpointError, "", lambda wrong=wrong: fresh(0).load_state_dict(wrong))


def other_outer_optimizers_are_told(rank: int) -> None:
    """Also if only some ranks load a state: their momentum would move them apart."""

    def outer(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.7 if rank else 0.6, momentum=0.9)

    check_raises(AggregateError, "outer optimizers of ranks differ", make("none", outer=outer).__enter__)
    handle = make("none", outer="nesterov", overlap=0, parts=1)
    with handle:
        for i in range(8):
            step(handle, rank, i)
    state, model = copy.deepcopy(handle.state_dict()), copy.deepcopy(handle.model.state_dict())
    again = make("none", outer="nesterov", overlap=0, parts=1)
    if rank == 0:
        again.model.load_state_dict(model)
        again.load_state_dict(state)
    check_raises(AggregateError, "load the state of a checkpoint on all of them", again.__enter__)


def a_failed_round_is_rolled_back(rank: int) -> None:
    """Memories, common parameters, outer momentum and turns are as before it, and the round is made again."""
    handle = make("co3", outer="nesterov", parts=1, sync_every=4, overlap=2)
    with handle:
        for i in range(6):
            step(handle, rank, i)
        before = copy.deepcopy(handle.state_dict())
        for i in range(6, 8):
            step(handle, rank, i)
        under_way = handle._under_way
        assert under_way is not None and under_way.sync is not None
        sync_round = handle._connected()
        finish = sync_round.finish

        def failing(sync: object) -> object:
            finish(sync)
            raise GradwireError("the link is gone")

        sync_round.finish = failing
        check_raises(GradwireError, "the link is gone", handle.state_dict)
        sync_round.finish = finish
        after = handle.state_dict()
        for key in ("memory", "anchor"):
            assert digest(after[key]) == digest(before[key])
        assert repr(after["outer"]) == repr(before["outer"])
        assert after["parts"]["unsent"] == [4]
    check_alike(handle.model)


def a_failed_flush_takes_no_turn_back(rank: int) -> None:
    """All parts had been exchanged before it."""
    handle = make("topk:p=0.05,flush=0.2,small=same", parts=1, overlap=0)
    handle.__enter__()
    for i in range(5):
        step(handle, rank, i)
    sync_round = handle._connected()
    finish = sync_round.finish

    def failing(sync: Sync) -> object:
        arrived = finish(sync)
        if sync._last:
            raise GradwireError("the link is gone")
        return arrived

    sync_round.finish = failing
    check_raises(GradwireError, "the link is gone", lambda: handle.__exit__(None, None, None))
    state = handle.state_dict()
    assert state["parts"] == {"next": 0, "unsent": [0]} and state["pending"] == 0


def an_update_that_cannot_be_made(rank: int) -> None:
    """A rank without memory for its update takes no turn: it may go on, and sends the same part next."""
    handle = make("none", overlap=0)
    with handle:
        for i in range(8):
            make_updates = handle._replica.updates
            if rank == 1 and i == 1:
                handle._replica.updates = out_of_memory
                with pytest.raises(MemoryError):
                    step(handle, rank, i)
                handle._replica.updates = make_updates
                assert handle.state_dict()["parts"] == {"next": 0, "unsent": [2, 2]}
            else:
                step(handle, rank, i)
    check_alike(handle.model)


def out_of_memory(*_: object) -> Tensors:
    raise MemoryError


def bad_arguments(rank: int) -> None:
    for message, options in (
        ("parts must be a number from 1 to 8", {"parts": 0}),
        ("parts must be a number from 1 to 8", {"parts": 9}),
        ("parts must be a number from 1 to 8", {"parts": True}),
        ("2 parts cannot be exchanged once each in 1 steps", {"sync_every": 1, "overlap": 0}),
        ("more than the 2 steps between two exchanges", {"overlap": 3}),
        ("overlap must be a number of steps from 0 on", {"overlap": -1}),
        ("mix must be a number from 0 to below 1", {"mix": 1}),
        ("it needs an overlap", {"mix": 0.5, "overlap": 0}),
        ("average, nesterov", {"outer": "adam"}),
        ("must be average, nesterov, or a function", {"outer": 0.7}),
        ("must return a torch.optim.Optimizer", {"outer": lambda p: None}),
    ):
        check_raises(SpecError, message, lambda options=options: make("none", **options))
    check_raises(SpecError, "set mask=off", lambda: make("stc"))
    check_raises(SpecError, "use mix=None", lambda: make("sparseloco", mix=0.5))
    handle = make("none", parts=1 + (rank > 0))
    check_raises(AggregateError, "parts", handle.__enter__)
    # The group for an overlap is made by all ranks: one that has none is found out before that, not by a timeout.
    handle = make("none", parts=1, overlap=int(rank != 1))
    check_raises(AggregateError, "rank 1 has overlap nothing, rank 0 1", handle.__enter__)


def muon_as_the_inner_optimizer(rank: int) -> None:
    """Any optimizer of torch's will do: Muon for a matrix, and what it does not take by another model's AdamW."""
    torch.manual_seed(0)
    model = nn.Linear(20, 5, bias=False)
    optimizer = torch.optim.Muon(model.parameters(), lr=0.02)
    with LocalSGD(model, optimizer, "co3", sync_every=4, outer="nesterov", overlap=2) as handle:
        for i in range(10):
            step(handle, rank, i)
    check_alike(model)


SCENARIOS = [
    parts_and_overlap_by_hand, replicas_share_the_common_parameters, nothing_waits_for_a_mean_before_it_is_due,
    a_function_as_a_schedule, a_sync_by_hand_exchanges_all_parts, a_diverged_rank_is_left_out, resuming,
    other_outer_optimizers_are_told, a_failed_round_is_rolled_back, a_failed_flush_takes_no_turn_back,
    an_update_that_cannot_be_made, bad_arguments,
]  # fmt: skip
SCENARIOS += [muon_as_the_inner_optimizer] if HAS_MUON else []


@pytest.mark.parametrize("scenario", named(SCENARIOS))
def test_on_three_ranks(ranks: RankPool, scenario: Scenario) -> None:
    ranks.check(scenario, seconds=30, setup=add_toy_recipe)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "scenario", named([replicas_share_the_common_parameters, resuming, nothing_waits_for_a_mean_before_it_is_due])
)
def test_with_an_exchange_thread(ranks: RankPool, scenario: Scenario) -> None:
    """Where torch computes with several threads; elsewhere exchanges run in the training's."""
    ranks.check(with_two_threads(scenario), seconds=60, setup=add_toy_recipe)


class with_two_threads:
    def __init__(self, scenario: Scenario):
        self.scenario = scenario

    def __call__(self, rank: int) -> None:
        torch.set_num_threads(2)
        try:
            self.scenario(rank)
        finally:
            torch.set_num_threads(1)


def a_rank_that_does_not_come(rank: int) -> None:
    """It is named, with an overlap and without."""
    for options in ({}, {"parts": 1, "overlap": 0}):
        handle = make("none", process_group=dist.new_group(timeout=timedelta(seconds=3)), **options)
        if rank != 1:
            check_raises(AggregateError, "rank 1 did not attach within 3 s", handle.__enter__)
        dist.barrier()


@pytest.mark.thorough
def test_a_rank_that_does_not_come(ranks: RankPool) -> None:
    ranks.check(a_rank_that_does_not_come, seconds=60)


def lose_a_rank(rank: int, folder: Path) -> list[Loss]:
    """Rank 1 dies after it has sent a part; the others learn that when the next one is due, or when they leave."""
    connect(rank, folder, "lost", 10)
    torch.set_num_threads(2)
    handle = make("co3")
    return lose_rank_1(handle, rank, 4, lambda number: step(handle, rank, number))


def test_a_lost_rank_is_an_error_within_the_timeout(ranks: RankPool) -> None:
    check_that_rank_1_was_missed(*ranks.run(lose_a_rank, seconds=60))
