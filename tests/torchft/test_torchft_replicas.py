"""Process groups for torchft: sums, memories, replicas that come, go, die and disagree."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
from torch.distributed import ReduceOp

pytest.importorskip("torchft", reason="torchft is not installed")

from gradwire.errors import AggregateError, CheckpointError, GradwireError, SpecError
from gradwire.torchft import ProcessGroup
from gradwire.torchft.sum_under_way import SumUnderWay
from support.torchft_groups import D, Integers, Quorums, add_up, allreduce, in_threads, left, make, vote

SOON = 10  # seconds that anything here may take on a busy machine; timeouts of groups are longer, unless they matter


@pytest.fixture(params=[1, pytest.param(2, marks=pytest.mark.thorough)], ids=["inline", "thread"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """With one thread exchanges run in the training's own, otherwise in another."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def exchange_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def conserved(groups: list[ProcessGroup], gradients: list[Integers], arrived: torch.Tensor) -> bool:
    """What arrived and what is left is what was computed."""
    total = arrived + sum(map(left, groups), torch.zeros(D))
    return torch.equal(total, sum((g.computed for g in gradients), torch.zeros(D)))


def round_of(groups: list[ProcessGroup], gradients: list[Integers]) -> torch.Tensor:
    """Exchange everybody's next integers; all get the same sum."""
    tensors = [g.next() for g in gradients]
    add_up(groups, tensors)
    assert all(torch.equal(tensor, tensors[0]) for tensor in tensors)
    return tensors[0]


def test_what_arrives_and_what_is_left_is_what_was_computed(threads):
    groups, gradients, arrived = [make() for _ in range(3)], [Integers(i) for i in range(3)], torch.zeros(D)
    Quorums().form(groups)
    for _ in range(5):
        arrived += round_of(groups, gradients)
        vote(groups)
        for g in gradients:
            g.count()
    assert conserved(groups, gradients, arrived) and all(left(group).any() for group in groups)
    assert groups[0].stats()["ratio"] > 50 and groups[0].stats()["steps"] == 5


def test_a_round_that_is_discarded_leaves_memories_as_they_were(threads):
    quorums, groups, gradients = Quorums(), [make(), make()], [Integers(0), Integers(1)]
    quorums.form(groups)
    arrived = round_of(groups, gradients)
    vote(groups)
    for g in gradients:
        g.count()
    before = [left(group) for group in groups]
    round_of(groups, gradients)
    vote(groups, committed=False)
    quorums.form(groups)
    assert all(torch.equal(left(group), memory) for group, memory in zip(groups, before, strict=True))
    assert conserved(groups, gradients, arrived)


@pytest.mark.parametrize("committers", [1, 0], ids=["one_commits", "nobody_commits"])
def test_an_undecided_round_goes_with_those_whose_weights_are_taken(committers):
    """Replica 2 was killed in the round; 0 has got everything and commits, or not, 1 has not and discards it."""
    quorums, groups, gradients = Quorums(), [make() for _ in range(3)], [Integers(i) for i in range(3)]
    quorums.form(groups)
    arrived = round_of(groups, gradients)
    vote(groups)
    for g in gradients:
        g.count()
    torn = round_of(groups, gradients)
    vote(groups[:1], committed=bool(committers))
    vote(groups[1:], committed=False)
    groups[2].shutdown()
    quorums.form(groups[:2])
    survivors = gradients[:2]
    if committers:
        arrived += torn
        for g in gradients:
            g.count()
    lost_with_2 = gradients[2].computed - arrived_of_2(gradients[2], rounds=1 + committers)
    total = arrived + sum(map(left, groups[:2]), torch.zeros(D)) + lost_with_2
    assert torch.equal(total, sum((g.computed for g in gradients), torch.zeros(D)))
    assert groups[0].stats()["steps"] == groups[1].stats()["steps"] == 1 + committers
    round_of(groups[:2], survivors)  # and they go on


def arrived_of_2(gradients: Integers, rounds: int) -> torch.Tensor:
    """What replica 2 has sent in so many rounds: the same as if it had been alone."""
    alone, again = make(), Integers(2)
    Quorums().form([alone])
    sent = torch.zeros(D)
    for _ in range(rounds):
        sent += round_of([alone], [again])
        vote([alone])
    return sent


def test_a_committer_is_believed_several_quorums_later():
    """Replica 1, which discarded the round, misses a quorum in which others have gone on."""
    quorums, groups, gradients = Quorums(), [make() for _ in range(3)], [Integers(i) for i in range(3)]
    quorums.form(groups)
    arrived = round_of(groups, gradients)
    vote([groups[0], groups[2]])
    vote(groups[1:2], committed=False)
    for g in gradients:
        g.count()
    others, of_others = [groups[0], groups[2]], [gradients[0], gradients[2]]
    quorums.form(others)
    arrived += round_of(others, of_others)
    vote(others)
    for g in of_others:
        g.count()
    quorums.form(groups)
    assert conserved(groups, gradients, arrived)
    assert [group.stats()["steps"] for group in groups] == [2, 2, 2]


def test_a_replica_that_joins_begins_without_memory_and_the_others_keep_theirs():
    quorums, groups, gradients = Quorums(), [make(), make()], [Integers(0), Integers(1)]
    quorums.form(groups)
    arrived = round_of(groups, gradients)
    vote(groups)
    kept = [left(group) for group in groups]
    for g in gradients:
        g.count()
    groups.append(make())
    gradients.append(Integers(2))
    quorums.form(groups)
    assert [left(group).any().item() for group in groups] == [True, True, False]
    assert all(torch.equal(left(group), memory) for group, memory in zip(groups, kept, strict=False))
    arrived += round_of(groups, gradients)
    vote(groups)
    for g in gradients:
        g.count()
    assert conserved(groups, gradients, arrived)


def test_zeros_of_a_replica_that_heals_leave_its_memory_waiting():
    quorums, groups, gradients = Quorums(), [make(), make()], [Integers(0), Integers(1)]
    quorums.form(groups)
    round_of(groups, gradients)
    vote(groups)
    waiting = left(groups[1])
    add_up(groups, [gradients[0].next(), torch.zeros(D)])
    vote(groups)
    assert torch.equal(left(groups[1]), waiting) and waiting.any()


@pytest.mark.parametrize("case", ["integers", "small", "maximum"])
def test_what_is_not_compressed_goes_through_as_it_is(case):
    groups = [make(), make()]
    Quorums().form(groups)
    dtype = torch.int64 if case == "integers" else torch.float32
    size, operation = (
        (100, ReduceOp.SUM) if case == "small" else (D, ReduceOp.MAX if case == "maximum" else ReduceOp.SUM)
    )
    tensors = [torch.full((size,), value, dtype=dtype) for value in (1, 2)]
    add_up(groups, tensors, operation)
    assert all((tensor == (2 if case == "maximum" else 3)).all() for tensor in tensors)
    assert groups[0].stats()["frame_bytes"] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_means_of_every_dtype_are_close_and_the_same_everywhere(dtype):
    groups = [make("co3:format=fp8") for _ in range(3)]
    Quorums().form(groups)
    tensors = [torch.randn(50, 200, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(3)]
    mean = sum(tensor.double() for tensor in tensors) / 3
    add_up(groups, tensors, ReduceOp.AVG)
    assert all(torch.equal(tensor, tensors[0]) and tensor.dtype == dtype for tensor in tensors)
    assert (tensors[0].double() - mean).norm() < 0.125 * mean.norm()  # fp8 has two bits after the first


def test_a_tensor_of_several_messages_that_is_not_contiguous():
    groups = [make("none"), make("none")]
    Quorums().form(groups)
    tensors = [torch.arange(9_000_000.0).view(3000, 3000).t() * value for value in (1, 2)]
    add_up(groups, tensors)
    assert torch.equal(tensors[0], torch.arange(9_000_000.0).view(3000, 3000).t() * 3)


def test_a_replica_that_dies_is_an_error_at_once(threads):
    """And the quorum of those that are left goes on, where nobody has forgotten anything."""
    quorums, groups, gradients = Quorums(), [make(seconds=60) for _ in range(3)], [Integers(i) for i in range(3)]
    quorums.form(groups)
    arrived = round_of(groups, gradients)
    vote(groups)
    for g in gradients:
        g.count()
    works: dict[int, object] = {}

    def train(i: int) -> str:
        work = allreduce(groups[i], gradients[i].next())
        with pytest.raises(AggregateError):
            work.wait()
        with pytest.raises(RuntimeError):
            work.get_future().wait()
        works[i] = work
        assert isinstance(groups[i].errored(), AggregateError)
        groups[i].end_round(False)
        return "failed"

    def die() -> str:
        time.sleep(0.2)
        groups[2].shutdown()
        return "dead"

    start = time.monotonic()
    assert in_threads([lambda: train(0), lambda: train(1), die]) == ["failed", "failed", "dead"]
    quorums.form(groups[:2])
    arrived += round_of(groups[:2], gradients[:2])
    vote(groups[:2])
    for g in gradients[:2]:
        g.count()
    assert time.monotonic() - start < SOON
    of_2 = arrived_of_2(gradients[2], rounds=1)
    total = arrived - of_2 + sum(map(left, groups[:2]), torch.zeros(D))
    assert torch.equal(total, gradients[0].computed + gradients[1].computed)


def test_a_replica_that_is_silent_is_an_error_within_the_timeout(threads):
    seconds = 6  # to meet in, too, on a busy machine
    quorums, groups = Quorums(), [make(seconds=seconds), make(seconds=seconds)]
    quorums.form(groups)
    start = time.monotonic()
    with pytest.raises(AggregateError, match="lost a peer, or it did not answer"):
        allreduce(groups[0], torch.ones(D)).wait()
    assert seconds - 1 < time.monotonic() - start < seconds + SOON


def test_a_new_quorum_ends_exchanges_that_are_under_way(exchange_thread):
    quorums, groups = Quorums(), [make(seconds=60), make(seconds=60)]
    quorums.form(groups)
    tensor = torch.ones(D)
    work = allreduce(groups[0], tensor)  # replica 1 does not come
    start = time.monotonic()
    quorums.form(groups)
    assert time.monotonic() - start < SOON
    with pytest.raises(AggregateError, match="quorum has changed"):
        work.wait()
    assert torch.equal(tensor, torch.ones(D))
    add_up(groups, [torch.ones(D), torch.ones(D)])


def test_a_replica_that_discards_a_round_lets_nobody_wait(exchange_thread):
    groups = [make(seconds=60), make(seconds=60)]
    Quorums().form(groups)
    work = allreduce(groups[0], torch.ones(D))
    start = time.monotonic()
    vote(groups[1:], committed=False)  # as when the weights of a peer did not come
    with pytest.raises(AggregateError):
        work.wait()
    assert time.monotonic() - start < SOON


def test_abort_ends_exchanges(exchange_thread):
    groups = [make(seconds=60), make(seconds=60)]
    Quorums().form(groups)
    work = allreduce(groups[0], torch.ones(D))
    threading.Timer(0.2, groups[0].abort).start()
    with pytest.raises(AggregateError, match="aborted"):
        work.wait()


def test_a_sum_that_was_aborted_at_the_last_moment_does_not_succeed(exchange_thread, monkeypatch):
    """torchft aborts from a timer: a sum that ends in that moment must not be said to end twice."""
    groups, tensors = [make(seconds=60), make(seconds=60)], [torch.ones(D), torch.ones(D)]
    came, succeeded = SumUnderWay.message_came, []

    def aborted_meanwhile(work):
        if work.tensor is tensors[0]:
            groups[0].abort()
        return came(work)

    def succeed(work):
        succeeded.append(work)

    monkeypatch.setattr(SumUnderWay, "message_came", aborted_meanwhile)
    monkeypatch.setattr(SumUnderWay, "succeed", succeed)
    Quorums().form(groups)
    works = [allreduce(group, tensor) for group, tensor in zip(groups, tensors, strict=True)]
    with pytest.raises(AggregateError, match="aborted"):
        works[0].wait()
    assert isinstance(groups[0].errored(), AggregateError) and works[0] not in succeeded


def test_a_replica_with_another_spec_leaves_and_the_others_go_on():
    quorums, groups, odd = Quorums(), [make("co3"), make("co3")], make("co3:format=fp8")
    quorums.form(groups)
    add_up(groups, [torch.ones(D), torch.ones(D)])
    vote(groups)
    with pytest.raises(AggregateError, match=r"replica 2 has spec co3:format=fp8.* has to leave"):
        quorums.form([*groups, odd])
    with pytest.raises(GradwireError, match=r"does not fit the others .*spec co3:.*fp8"):
        odd.errored()
    assert all(group.errored() is None for group in groups)
    for group in groups:
        group.end_round(False)
    quorums.form(groups)
    add_up(groups, [torch.ones(D), torch.ones(D)])


def test_a_vote_that_nobody_hears_of_is_refused():
    group = make()
    Quorums().form([group])
    add_up([group], [torch.ones(D)])
    assert group.errored() is None
    with pytest.raises(GradwireError, match="nobody has said whether torchft committed the last round"):
        allreduce(group, torch.ones(D))
    with pytest.raises(GradwireError, match="nobody has said"):
        group.errored()


def test_another_tensor_in_the_place_of_one_is_refused():
    group = make()
    Quorums().form([group])
    add_up([group], [torch.ones(D)])
    vote([group])
    with pytest.raises(GradwireError, match="every round must have the same ones in the same order"):
        allreduce(group, torch.ones(D + 1))


def test_fragments_that_take_turns_have_memories_of_their_own():
    groups, gradients = [make(), make()], [Integers(0), Integers(1)]
    for group in groups:
        group.expect_fragments(2)
    Quorums().form(groups)
    sums = []
    for _ in range(4):
        sums.append(round_of(groups, gradients))
        vote(groups)
    assert set(groups[0].state_dict()["memory"]) == {"0.0", "1.0"}
    fragment = groups[0].state_dict()["memory"]["1.0"] + groups[1].state_dict()["memory"]["1.0"]
    again = [Integers(0), Integers(1)]
    computed = [sum(g.next() for g in again) for _ in range(4)]
    assert torch.equal(fragment + sums[1] + sums[3], computed[1] + computed[3])


def test_not_a_number_leaves_all_memories_as_they_were():
    quorums, groups, gradients = Quorums(), [make("co3"), make("co3")], [Integers(0), Integers(1)]
    quorums.form(groups)
    round_of(groups, gradients)
    vote(groups)
    before = [left(group) for group in groups]
    spoilt = gradients[0].next()
    spoilt[7] = float("nan")
    tensors = [spoilt, gradients[1].next()]
    add_up(groups, tensors)
    vote(groups)
    assert all(tensor.isnan().any() for tensor in tensors)
    assert all(torch.equal(left(group), memory) for group, memory in zip(groups, before, strict=True))


def test_memories_in_half_precision():
    groups, gradients = [make("co3", memory="bf16") for _ in range(2)], [Integers(0), Integers(1)]
    Quorums().form(groups)
    for _ in range(2):
        round_of(groups, gradients)
        vote(groups)
    assert {memory.dtype for memory in groups[0].state_dict()["memory"].values()} == {torch.bfloat16}


def test_a_checkpoint_of_the_whole_training_has_memories():
    quorums, groups, gradients = Quorums(), [make(), make()], [Integers(0), Integers(1)]
    quorums.form(groups)
    for _ in range(2):
        round_of(groups, gradients)
        vote(groups)
    resumed = [make(), make()]
    for group, old in zip(resumed, groups, strict=True):
        group.load_state_dict(old.state_dict())
    quorums.form(resumed)
    last = [g.next() for g in gradients]
    expected, found = [t.clone() for t in last], [t.clone() for t in last]
    add_up(groups, expected)
    add_up(resumed, found)
    assert torch.equal(expected[0], found[0]) and resumed[0].stats()["steps"] == 2
    with pytest.raises(CheckpointError, match="recipe"):
        make("co3").load_state_dict(groups[0].state_dict())


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("sbc", "mask=off"), ("sbc2", "sends only every 10 steps"), ("homomorphic", "sums that are made on their way"),
        ("co4", "did you mean"), ({"*": "co3"}, "without names"), ("topk:mask=off,clip_norm=1", "clips"),
        ("adam", "use structured"),
    ],
)  # fmt: skip
def test_specs_that_torchft_cannot_follow(spec, message):
    with pytest.raises(SpecError, match=message):
        make(spec)


@pytest.mark.parametrize("timeout", [None, 60, "60", timedelta(0), timedelta(seconds=-1)])
def test_timeouts_that_are_none(timeout):
    with pytest.raises(SpecError, match="timedelta above 0"):
        ProcessGroup("co3", timeout=timeout)
    with pytest.raises(SpecError, match="timedelta above 0"):
        make("co3").set_timeout(timeout)


@pytest.mark.parametrize("spec", ["co3", "structured", "stc:mask=off"])
def test_a_usual_spec_is_no_reason_for_a_warning(spec):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(spec)
