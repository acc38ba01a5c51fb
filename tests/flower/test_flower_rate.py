"""Adaptive rates: the formulas' numbers, which way they go, and instructions that no server should send."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradwire
from gradwire import SpecError

pytest.importorskip("flwr")

from gradwire.catalogue.spec_by_name import parse_spec, recipe_of_name
from gradwire.flower.client.instructed_spec import spec_for
from gradwire.flower.shared import update
from gradwire.flower.shared.adaptive_rate import AdaQuantFL, FedDQ, parse
from support.cases import for_each

NAMES = ["w[0].weight", "b*.bias", "bn.running_var"]


def levels(instruction: str) -> int:
    return int(gradwire.recipe(instruction).values["levels"])


# ── AdaQuantFL ────────────────────────────────────────────────────────────────────────────────────


def test_adaquantfl_by_its_formula():
    rate = AdaQuantFL()
    told = []
    for loss in (2.3, 2.3, 1.0, 0.575, 0.23, 0.023, 4.0, 9.2, 1e9):
        rate.observe([(loss, 10)])
        told.append(rate.instruction())
    # s = ⌈√(2.3/f)·2⌉ = 2, 2, 4 (3.03), 4 (4.0 exactly), 7 (6.3), 20 exactly, 2 (1.5), 1 exactly, 1 (0.0001)
    assert told == [f"qsgd:levels={2 * s + 1}" for s in (2, 2, 4, 4, 7, 20, 2, 1, 1)]


def test_the_levels_of_s_intervals():
    """QSGD's s intervals on |x|/‖x‖ are s levels on either side, and zero."""
    x = torch.linspace(-1, 1, 512)
    for s in (1, 2, 5):
        sent = gradwire.decode(gradwire.codec(f"qsgd:levels={2 * s + 1},bucket=0").encode(x))
        assert sorted(set(sent.abs().tolist())) == pytest.approx([i / s for i in range(s + 1)])


def test_before_the_first_loss_it_is_the_start():
    assert AdaQuantFL().instruction() == "qsgd:levels=5"
    assert AdaQuantFL(start=4).instruction() == "qsgd:levels=9"


def test_losses_are_weighted():
    rate = AdaQuantFL()
    rate.observe([(4.0, 1), (1.0, 3)])  # 1.75
    rate.observe([(0.4375, 7)])
    assert rate.intervals == 4
    rate.observe([(0.0, 1), (0.875, 1), (math.nan, 100), (5.0, 0), (3.0, -1), (1.0, math.inf)])
    assert rate.intervals == 4


@pytest.mark.parametrize("losses", [[], [(math.nan, 1)], [(math.inf, 1)], [(1.0, 0)], [(1e308, 1e308), (1e308, 1)]])
def test_a_loss_that_is_missing_changes_nothing(losses):
    rate = AdaQuantFL()
    rate.observe(losses)  # nor is it f(w₀)
    rate.observe([(9.0, 1)])
    rate.observe([(1.0, 1)])
    assert rate.intervals == 6
    rate.observe(losses)
    assert rate.intervals == 6


def test_a_loss_of_nothing_is_bounded():
    for loss in (0.0, -1.0, 5e-324):
        rate = AdaQuantFL(most=50)
        rate.observe([(1e300, 1)])
        rate.observe([(loss, 1)])
        assert rate.instruction() == "qsgd:levels=101"
    assert levels(AdaQuantFL(start=127).instruction()) == 255  # the most that a quantizer has
    rate = AdaQuantFL()
    for loss in (0.0, 1.0, -3.0, 0.5):
        rate.observe([(loss, 1)])
        assert rate.intervals == 2  # no ratio to a first loss of 0


@given(st.lists(st.floats(1e-6, 1e6), min_size=2, max_size=20))
def test_adaquantfl_rises_as_the_loss_falls(losses):
    rate = AdaQuantFL()
    rate.observe([(losses[0], 1)])
    found = []
    for loss in sorted(losses[1:], reverse=True):
        rate.observe([(loss, 1)])
        found.append(levels(rate.instruction()))
    assert found == sorted(found)


# ── FedDQ ─────────────────────────────────────────────────────────────────────────────────────────


def spec_of(x: torch.Tensor, resolution: float) -> int:
    spec = spec_for(FedDQ(resolution).instruction(), {"w[0].weight": x})
    return levels(str(recipe_of_name("w[0].weight", parse_spec(spec))))


def test_feddq_by_its_formula():
    # bits = ⌈log₂(range/resolution)⌉, from 2 to 8; levels = 2^bits − 1
    for span, bits in [
        (0.08, 3),
        (0.0801, 4),
        (0.16, 4),
        (0.65, 7),
        (1.28, 7),
        (1.29, 8),
        (99.0, 8),
        (0.03, 2),
        (0, 2),
    ]:
        assert spec_of(torch.tensor([span / 2, 0.0, -span / 4]), 0.01) == 2**bits - 1


@given(st.lists(st.floats(0, 1e3), min_size=2, max_size=20), st.sampled_from([1e-4, 0.005, 0.3]))
def test_feddq_falls_as_the_range_falls(spans, resolution):
    found = [spec_of(torch.tensor([span, 0.0]), resolution) for span in sorted(spans, reverse=True)]
    assert found == sorted(found, reverse=True)


def test_feddq_tells_tensors_apart_and_keeps_running_statistics():
    x = torch.randn(3000)
    differences = {NAMES[0]: x, NAMES[1]: x[:100] * 1e-3, NAMES[2]: x[:50], "none": torch.zeros(0)}
    spec = spec_for("feddq:resolution=0.01", differences)
    recipes = parse_spec(spec)
    assert levels(str(recipe_of_name(NAMES[0], recipes))) == 255
    assert levels(str(recipe_of_name(NAMES[1], recipes))) == 3
    assert recipe_of_name(NAMES[2], recipes).name == "bf16"
    found = update.decode(update.encode(differences, {}, list(differences), spec).data,
                          {n: torch.zeros_like(t) for n, t in differences.items()})  # fmt: skip
    step = 2 * float(x.abs().max()) / 254
    assert (found[NAMES[0]] - x).abs().max() <= step * 1.01
    assert step < 4 * 0.01  # 8 bits are the most: here the range would need 10


def test_an_update_that_is_not_finite_is_refused_where_it_is_encoded():
    differences = {"a": torch.tensor([math.inf, 1.0]), "b": torch.tensor([math.nan])}
    spec = spec_for("feddq:resolution=0.01", differences)
    with pytest.raises(gradwire.GradwireError, match="diverged"):
        update.encode(differences, {}, ["a", "b"], spec)


# ── instructions and names ────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("spec", ["co3", "qsgd:levels=5", "stc:p=0.01"])
def test_a_recipe_is_what_it_is(spec):
    assert spec_for(spec, {}) == spec


@for_each(
    "bad",
    [
        "", "adaquantfl", "feddq:", "feddq:resolution=0", "feddq:resolution=-1", "feddq:resolution=nan", "feddq:bits=3",
        "feddq:resolution=1e400", "feddq:resolution=0.1,resolution=0.2", "qsgd:levels=4", "qsgd:levels=" + "9" * 9000,
        "co4", "auto", None, 5, b"co3", {"*": "co3"}, "feddq:" + "x=1," * 10**6,
    ],
    ids=lambda text: str(text)[:30],
)  # fmt: skip
def test_a_hostile_instruction_is_refused(bad):
    with pytest.raises(SpecError):
        spec_for(bad, {"a": torch.ones(5)})


def test_names_of_the_command_line():
    assert parse("adaquantfl") == AdaQuantFL()
    assert parse("adaquantfl:start=4,loss=loss,most=9") == AdaQuantFL(4, "loss", 9)
    assert parse("feddq:resolution=0.01") == FedDQ(0.01)
    assert parse("feddq").instruction() == "feddq:resolution=0.005"
    assert parse(FedDQ(1e-7).instruction()) == FedDQ(1e-7)


@for_each(
    ("bad", "hint"),
    [
        ("adaquant", "did you mean 'adaquantfl'"), ("FedDQ", "did you mean 'feddq'"), ("qsgd", "allowed: adaquantfl"),
        ("adaquantfl:begin=3", "unknown parameter of adaquantfl 'begin'"), ("adaquantfl:start=0", "from 1 to 127"),
        ("adaquantfl:start=9,most=3", "above most=3"), ("feddq:resolution=fine", "feddq: 'fine' is not a number"),
        ("feddq:resolution", "key=value"),
    ],
)  # fmt: skip
def test_unknown_names_and_parameters_are_named(bad, hint):
    with pytest.raises(SpecError, match=hint):
        parse(bad)


@pytest.mark.parametrize("make", [lambda: AdaQuantFL(start=0), lambda: AdaQuantFL(start=1.5), lambda: FedDQ(0)])
def test_constructors_refuse_the_same(make):
    with pytest.raises(SpecError):
        make()
