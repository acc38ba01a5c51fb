"""What `auto` decides from the times and errors it is told; the processes that tell it are in test_data_parallel.py."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

import gradwire
from gradwire import SpecError
from gradwire.engine import auto, tuner
from gradwire.engine.auto import CANDIDATES, CHECK, EXACT, HALF, PLAIN, Auto
from gradwire.engine.cost_model import Load, Speed, all_reduce_s, structure_may_pay
from support.cases import for_each
from support.rank_pool import RankPool
from support.ranks import backward, make_ddp

ERRORS = {spec: 0.03 if spec == "co3" else 0.5 for spec in CANDIDATES if spec not in PLAIN} | {"bf16": 3e-6}


class Steps:
    """A training whose steps take as long as the recipe in use makes them."""

    def __init__(self, seconds: dict[str, float], target: float = 0.1, exact_seconds: float = 0.0):
        self.seconds = seconds
        self.used: list[str] = []
        self.auto = Auto(lambda values: values, lambda entry_bytes: exact_seconds * entry_bytes / 4, target)

    def run(self, steps: int) -> str:
        for _ in range(steps):
            errors = ERRORS if self.auto.measuring else {}
            self.used.append(self.auto.spec)
            self.auto.step_done(self.seconds.get(self.auto.spec, 1.0), errors)
        return self.auto.spec


@for_each(
    ("seconds", "target", "best"),
    [
        ({"co3": 0.1, EXACT: 0.5}, 0.1, "co3"),
        ({"co3": 0.5, EXACT: 0.1}, 0.1, EXACT),
        ({"co3": 0.1, EXACT: 0.101}, 0.1, EXACT),  # as fast, and exact
        ({"co3": 0.1, "ecq:rate=1": 0.01, EXACT: 0.5}, 0.1, "co3"),  # the other one's error is too large
        ({"co3": 0.1, "ecq:rate=1": 0.01, EXACT: 0.5}, 1.0, "ecq:rate=1"),
        ({"co3": 0.1, EXACT: 0.5}, 0.0, EXACT),
        ({"co3": 0.5, HALF: 0.2, EXACT: 0.3}, 0.1, HALF),
        ({"co3": 0.201, HALF: 0.2, EXACT: 0.3}, 0.1, HALF),
        ({"co3": 0.5, HALF: 0.3, EXACT: 0.3}, 0.1, EXACT),
        ({"co3": 0.5, HALF: 0.2, EXACT: 0.3}, 0.0, EXACT),
    ],
)
def test_the_fastest_with_a_small_enough_error(seconds: dict[str, float], target: float, best: str) -> None:
    training = Steps(seconds, target)
    assert training.run(60) == best
    assert training.auto.settled
    if target < 0.5:
        assert set(training.used) <= {"co3", *PLAIN}, "what would be left out is not even tried"


def test_plain_all_reduce_is_not_tried_where_its_bytes_alone_take_too_long() -> None:
    training = Steps({"co3": 0.1, EXACT: 4.0}, exact_seconds=3.9)
    assert training.run(60) == "co3"
    assert training.used.count(HALF) == 0 and EXACT not in training.used
    training = Steps({"co3": 0.1, HALF: 0.15}, exact_seconds=0.3)
    assert training.run(60) == "co3"
    assert HALF in training.used and EXACT not in training.used
    assert training.auto.reason == (
        "co3 from now on; whole steps took co3 100.0 ms, bf16 all-reduce 150.0 ms (20 steps of trials)"
    )


def test_a_changed_link_is_noticed() -> None:
    training = Steps({"co3": 0.1, EXACT: 0.5})
    assert training.run(60 + CHECK) == "co3"
    training.seconds = {"co3": 0.06, EXACT: 0.02}
    assert training.run(5 * CHECK) == EXACT
    training.seconds = {"co3": 0.1, EXACT: 0.5}
    assert training.run(5 * CHECK) == "co3"


def test_a_slow_step_now_and_then_is_not_a_change() -> None:
    training = Steps({"co3": 0.1, EXACT: 0.5})
    training.run(60 + CHECK)
    training.used.clear()
    for _ in range(5):
        training.run(CHECK - 5)
        for _ in range(5):
            training.auto.step_done(3.0, {})
    assert training.auto.settled and set(training.used) == {"co3"}


def test_its_spec() -> None:
    assert auto.parse("auto") == 0.1
    assert auto.parse("auto:error=0.5") == 0.5
    assert auto.parse("co3") is None
    for wrong in ("auto:eror=1", "auto:error=x", "auto:error=-1"):
        with pytest.raises(SpecError):
            auto.parse(wrong)
    with pytest.raises(SpecError, match="attach"):
        gradwire.recipe("auto")


def test_costs() -> None:
    """By hand: 1 MB of frames in 4 messages at 100 MB/s, 1 ms a round."""
    speed, load = Speed(1e-3, 1e8), Load(1e6, 4, 10e-3, 5e-3)
    assert load.all_gather_s(speed, 2) == pytest.approx(4e-3 + 10e-3 + 10e-3 + 10e-3)
    assert load.scatter_reduce_s(speed, 2) == pytest.approx(8e-3 + 10e-3 + 15e-3 + 10e-3)
    assert load.all_gather_s(speed, 16) > load.scatter_reduce_s(speed, 16)
    assert all_reduce_s(4 * 10**6, speed, 2) == pytest.approx(2e-3 + 40e-3)


def test_under_adam_no_sparse_recipe_is_a_candidate() -> None:
    assert auto.candidates(True, False, under_adam=False) == list(CANDIDATES)
    dense = [spec for spec in CANDIDATES if not spec.startswith("sbc")]
    assert auto.candidates(True, False, under_adam=True) == dense != list(CANDIDATES)


def used_with(kind: type[torch.optim.Optimizer], rank: int) -> tuple[set[str], bool]:
    """The recipes that were tried, and whether adam was recommended in the end."""
    said: list[str] = []
    log, listener = logging.getLogger("gradwire.engine.tuner"), logging.Handler()
    listener.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log.setLevel(logging.INFO)
    log.addHandler(listener)
    try:
        model, used = make_ddp(), set()
        optimizer = kind(model.parameters(), lr=1e-3)
        handle = gradwire.ddp.attach(model, "auto:error=1", optimizer=optimizer)
        handle.gradients.tuner.auto.plain_seconds = lambda entry_bytes: 1e9  # so that no all-reduce is chosen
        for step in range(45):
            backward(model, rank, step)
            used.add(handle.gradients.tuner.auto.spec)
    finally:
        log.removeHandler(listener)
    return used, any('"adam"' in line for line in said)


def where_one_has_an_adam(rank: int) -> None:
    """All ranks leave out the same, and rank 0 speaks for all."""
    used, advised = used_with(torch.optim.SGD if rank else torch.optim.AdamW, rank)
    assert "co3" in used and not any(spec.startswith("sbc") for spec in used), used
    assert advised == (rank == 0)


def where_none_has_an_adam(rank: int) -> None:
    used, advised = used_with(torch.optim.SGD, rank)
    assert any(spec.startswith("sbc") for spec in used) and not advised, used


def test_structure_is_a_candidate_where_bits_take_longer_than_coding() -> None:
    """By hand: 2 bits at 2 MB/s are 125 ns; coding takes 50 ns and 3 for each of two ranks."""
    assert structure_may_pay(Speed(1e-3, 2e6), 2) and not structure_may_pay(Speed(1e-3, 2e8), 2)
    assert structure_may_pay(Speed(1e-3, 3e7), 8) and not structure_may_pay(Speed(1e-3, 3e7), 2)
    assert auto.candidates(halves=True, structured=False, under_adam=False) == list(CANDIDATES)
    tried = auto.candidates(halves=False, structured=True, under_adam=False)
    assert tried[-2:] == ["structured", EXACT] and HALF not in tried and "structured" in auto.RECIPE_NAMES


def on_a_slow_link(rank: int) -> None:
    """It is measured beside the others, and used for some steps; on a fast link never."""
    measure = Speed.measure
    for rate, tried in ((1e5, True), (1e10, False)):
        Speed.measure = lambda link, rate=rate: Speed(1e-3, rate)
        try:
            model = make_ddp()
            handle = gradwire.ddp.attach(model, "auto")
            used = set()
            for step in range(22):
                backward(model, rank, step)
                used.add(handle.gradients.tuner.auto.spec)
        finally:
            Speed.measure = measure
        assert ("structured" in used) == tried, used
        errors = {trial.spec: trial.error for trial in handle.gradients.tuner.auto.trials}
        assert "co3" in errors and (not tried or 0 < errors["structured"] < 0.04), errors


def on_a_link_that_becomes_fast(rank: int) -> None:
    """When it tries again, it goes by the link as it is then: what was hopeless before is tried, too."""
    measure, check, clock = Speed.measure, auto.CHECK, [0.0]
    tuner.time = SimpleNamespace(perf_counter=lambda: clock[0])  # type: ignore[assignment]
    auto.CHECK = 2
    try:
        Speed.measure = lambda link: Speed(1e-3, 1e3)
        model = make_ddp()
        handle = gradwire.ddp.attach(model, "auto")
        used: list[str] = []
        aggregations: list[str] = []

        def run(steps: int, seconds: float) -> None:
            used.clear()
            aggregations.clear()
            for step in range(steps):
                clock[0] += seconds
                backward(model, rank, step)
                used.append(handle.gradients.tuner.auto.spec)
                aggregations.append(handle.gradients.exchange.aggregate)

        run(50, 0.1)
        assert handle.gradients.tuner.auto.settled and "structured" in used and not PLAIN.keys() & set(used), used
        assert aggregations[-1] == "scatter_reduce", aggregations
        Speed.measure = lambda link: Speed(1e-5, 1e12)
        run(70, 0.01)
        assert handle.gradients.tuner.auto.settled and PLAIN.keys() <= set(used), used
        assert "structured" not in used[10:] and "all_gather" in aggregations, (used, aggregations)
    finally:
        Speed.measure, auto.CHECK, tuner.time = measure, check, time


@pytest.mark.parametrize(
    "scenario", [on_a_slow_link, on_a_link_that_becomes_fast, where_one_has_an_adam, where_none_has_an_adam]
)
def test_on_three_ranks(ranks: RankPool, scenario: Callable[[int], None]) -> None:
    ranks.check(scenario)
