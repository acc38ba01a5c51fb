"""A byte budget for an update: never exceeded, well used, and nothing is lost where there is an error memory."""

from __future__ import annotations

import glob
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gradwire
from gradwire import GradwireError, SpecError

pytest.importorskip("flwr")

from gradwire.catalogue import spec_by_name
from gradwire.catalogue.spec_by_name import parse_spec, recipe_of_tensor
from gradwire.flower.client.byte_budget import parse_bytes, within
from gradwire.flower.shared import update
from gradwire.kernels.reference import FLOAT_MAX
from support.cases import for_each
from support.helpers import heavy

WITH_MEMORY = (
    "co3", "co3:format=fp8", "ecq", "ecq:nmse=0.01", "signsgd", "stc", "sbc2", "dgc", "topk:k=50", "sbc:p=0.3",
    "topk:p=0.2,scope=model", "m22", "countsketch", {"*.bias": "none", "small*": "ecq", "*": "stc:p=0.2"},
)  # fmt: skip
WITHOUT = ("none", "fp16", "gennorm", "qsgd:levels=33", "orq:levels=17", "linear", "terngrad", "topk:p=0.1,decay=0")


def a_model(scale: float = 1.0) -> dict[str, torch.Tensor]:
    """Layers of unlike size, scale and tails."""
    return {
        "stem.weight": heavy(30_000, 1, 0.6).reshape(300, 100) * 2e-3 * scale,
        "stem.bias": heavy(300, 2, 1.0) * 1e-3 * scale,
        "bn.running_mean": heavy(300, 3, 2.0) * 1e-2 * scale,
        "body.weight": heavy(50_000, 4, 1.0).reshape(250, 200) * 3e-4 * scale,
        "body.bias": heavy(250, 5, 1.0) * 1e-3 * scale,
        "head.weight": heavy(6_000, 6, 1.8) * 5e-3 * scale,
    }


INTEGERS = {"bn.num_batches_tracked": torch.tensor(17), "mask": torch.arange(40) % 3 == 0}
NAMES = [*a_model(), *INTEGERS]
BASE = {name: torch.zeros_like(t) for name, t in (a_model() | INTEGERS).items()}


def decays(spec, tensors) -> dict[str, float]:
    recipes = parse_spec(update.full_spec(spec, list(tensors)))
    return {name: recipe_of_tensor(name, t.numel(), recipes).decay for name, t in tensors.items()}


def check_conservation(spec, sent, differences, before, memory) -> None:
    """sent + memory = update + γ · memory before, for every tensor with a memory."""
    for name, decay in decays(spec, differences).items():
        if not decay:
            continue
        u = differences[name].double() + decay * before.get(name, torch.zeros(())).double()
        u = u.clamp(-FLOAT_MAX, FLOAT_MAX)  # as everywhere
        left = memory.get(name, torch.zeros(())).double()
        scale = float(u.abs().max()) if u.numel() else 0.0
        # To the rounding of fp32, whose least number is 1.4e-45.
        assert torch.allclose(sent[name].double() + left, u, rtol=0, atol=1e-6 * scale + 3e-45), name


def after(data: bytes, model: dict[str, torch.Tensor] = BASE) -> dict[str, torch.Tensor]:
    """All tensors of a model of zeros after the update."""
    return {**model, **update.decode(data, model)}


def empty_bytes() -> int:
    return len(update.encode({}, INTEGERS, NAMES, "co3").data)


# ── one update ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("spec", WITH_MEMORY, ids=str)
@pytest.mark.parametrize("limit", [900, 3_000, 12_000, 40_000])
def test_a_budget_is_met_used_and_loses_nothing_by_few_encodings(spec, limit, monkeypatch):
    differences = a_model()
    whole = update.encode(differences, INTEGERS, NAMES, spec)
    calls = []
    encode = update.encode
    monkeypatch.setattr(update, "encode", lambda *a: calls.append(1) or encode(*a))
    found = within(limit, differences, INTEGERS, NAMES, spec)
    assert len(calls) <= 8
    sent = after(found.data)
    assert len(found.data) <= limit
    if len(whole.data) <= limit:
        assert found.data == whole.data  # never finer than asked for
    else:
        assert len(found.data) >= 0.7 * limit
    check_conservation(spec, sent, differences, {}, found.memory)
    for name, value in INTEGERS.items():
        assert torch.equal(sent[name], value)


@for_each("spec", WITHOUT[:-1])
def test_without_a_memory_what_is_sent_is_right_on_average(spec):
    differences = {name: t for name, t in a_model().items() if name.startswith("head") or name == "stem.bias"}
    limit = int(0.6 * len(update.encode(differences, {}, NAMES, spec).data)) if spec != "terngrad" else 3_000
    draws = 12
    mean = dict.fromkeys(differences, 0.0)
    for seed in range(draws):
        found = within(limit, differences, {}, NAMES, spec, seed=seed)
        assert len(found.data) <= limit and not found.memory
        sent = after(found.data)
        mean = {name: m + sent[name].double() / draws for name, m in mean.items()}
    for name, m in mean.items():
        # The mean of 12 unbiased draws has 1/√12 of the error of one, about; a bias would stay.
        one = (sent[name].double() - differences[name].double()).norm()
        assert (m - differences[name].double()).norm() < 0.4 * one


def test_where_a_recipe_has_chosen_to_forget_its_own_knob_is_turned():
    spec = "topk:p=0.1,decay=0,small=same"
    for limit in (2_000, 8_000):
        found = within(limit, a_model(), INTEGERS, NAMES, spec)
        assert 0.7 * limit < len(found.data) <= limit and not found.memory


def test_error_falls_as_the_budget_grows():
    differences = a_model()
    errors = []
    for limit in (1_500, 3_000, 6_000, 12_000, 20_000, 30_000):
        memory = within(limit, differences, INTEGERS, NAMES, "co3:format=fp8").memory
        errors.append(sum(float(e.double().square().sum()) for e in memory.values()))
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 100 * errors[-1]


def test_at_the_bytes_of_co3_the_error_is_no_larger_than_its_own():
    differences = a_model()
    co3 = update.encode(differences, INTEGERS, NAMES, "co3")
    found = within(len(co3.data), differences, INTEGERS, NAMES, "co3:format=fp8")
    own, there = (sum(float(e.double().square().sum()) for e in x.memory.values()) for x in (found, co3))
    assert own < 0.8 * there


# ── budgets that are too small ────────────────────────────────────────────────────────────────────


def test_where_nothing_fits_everything_waits():
    differences = {name: t for name, t in a_model().items() if "running" not in name}
    limit = empty_bytes()
    before = {"stem.weight": torch.ones(300, 100)}
    found = within(limit, differences, INTEGERS, NAMES, "co3", before)
    assert len(found.data) == limit
    assert torch.equal(found.memory["stem.weight"], differences["stem.weight"] + 0.9)
    assert torch.equal(found.memory["body.weight"], differences["body.weight"])
    found.memory["body.weight"].zero_()
    assert differences["body.weight"].any()  # the memory is no view of what it was given


@for_each("spec", ["co3", *WITHOUT[:-1]])
def test_the_least_budget_is_named_and_is_enough(spec):
    with pytest.raises(GradwireError, match=r"takes at least (\d+)") as error:
        within(30, a_model(), INTEGERS, NAMES, spec)
    least = int(str(error.value).split("at least ")[1].split(",")[0])
    assert ("co3, ecq and stc" in str(error.value)) == (spec != "co3")
    with pytest.raises(GradwireError, match=f"at least {least},"):
        within(least - 1, a_model(), INTEGERS, NAMES, spec)
    assert len(within(least, a_model(), INTEGERS, NAMES, spec).data) <= least


def test_the_bytes_of_the_message_around_it_count():
    found = within(5_000, a_model(), INTEGERS, NAMES, "co3", overhead=2_000)
    assert 2_100 < len(found.data) <= 3_000
    assert found.data == within(3_000, a_model(), INTEGERS, NAMES, "co3").data
    with pytest.raises(GradwireError, match="a budget of 900 bytes is impossible") as error:
        within(900, a_model(), INTEGERS, NAMES, "co3", overhead=10_000)
    least = int(str(error.value).split("at least ")[1].split(",")[0])
    assert least > 10_000
    within(least, a_model(), INTEGERS, NAMES, "co3", overhead=10_000)


def test_nothing_to_send_takes_a_byte():
    assert len(within(1, {"a": torch.zeros(10)}, {}, ["a"], "co3").data) == 1
    with pytest.raises(GradwireError, match="at least 1,"):
        within(0, {"a": torch.zeros(10)}, {}, ["a"], "co3")


def test_an_update_that_is_not_finite_is_refused():
    with pytest.raises(GradwireError, match="NaN or an infinity"):
        within(500, a_model() | {"stem.bias": torch.full((300,), math.nan)}, INTEGERS, NAMES, "co3")


# ── many updates ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.thorough
@pytest.mark.parametrize("spec", ["co3", "stc:p=0.3"])
def test_a_hundred_rounds_of_drifting_updates(spec):
    """Updates shrink a hundredfold, point another way in each round, and keep a common direction."""
    limit, memory, used = 2_000, {}, []
    rng = torch.Generator().manual_seed(0)
    drift = {name: t for name, t in a_model().items() if name in ("stem.bias", "head.weight")}
    drift["body.weight"] = a_model()["body.weight"][:40]
    base = BASE | {name: torch.zeros_like(t) for name, t in drift.items()}
    arrived = dict.fromkeys(drift, 0.0)
    wanted = dict.fromkeys(drift, 0.0)
    for step in range(100):
        fade = 0.01 ** (step / 99)
        differences = {n: fade * (t + t.abs() * torch.randn(t.shape, generator=rng)) for n, t in drift.items()}
        found = within(limit, differences, INTEGERS, NAMES, spec, memory, steps=step, seed=3)
        sent = after(found.data, base)
        check_conservation(spec, sent, differences, memory, found.memory)
        used.append(len(found.data))
        memory = found.memory
        arrived = {n: a + sent[n].double() for n, a in arrived.items()}
        wanted = {n: w + differences[n].double() for n, w in wanted.items()}
    assert max(used) <= limit
    assert min(used) > 0.7 * limit and sum(used) > 0.9 * limit * 100
    if decays(spec, drift)["head.weight"] == 1:  # all of it arrives, but for what waits at the end
        left = wanted["head.weight"] - arrived["head.weight"]
        assert left.norm() < 0.2 * wanted["head.weight"].norm()


def test_a_warm_up_is_held_within_the_budget():
    """dgc begins with a quarter of the entries."""
    lengths = [len(within(5_000, a_model(), INTEGERS, NAMES, "dgc", steps=s).data) for s in (0, 100, 300, 399, 400)]
    assert max(lengths) <= 5_000 and lengths[0] > 3_500 > lengths[-1]


# ── any tensors, any budget ───────────────────────────────────────────────────────────────────────


@st.composite
def updates(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    tensors = {}
    for i in range(draw(st.integers(0, 5))):
        shape = draw(st.sampled_from([(), (0,), (1,), (7,), (3, 50), (33, 33), (4096,), (5, 1001), (9_000,)]))
        scale = draw(st.sampled_from([1e-42, 1e-20, 1e-3, 1.0, 1e20, 1e38]))
        kind = draw(st.sampled_from(["normal", "heavy", "sparse", "zero", "equal"]))
        count = math.prod(shape)
        x = {
            "normal": rng.standard_normal(count), "heavy": rng.standard_normal(count) ** 5 / 1e3,
            "sparse": rng.standard_normal(count) * (rng.random(count) < 0.01), "zero": np.zeros(count),
            "equal": np.ones(count),
        }[kind]  # fmt: skip
        name = draw(st.sampled_from(["w[0]", "b*", "running_var", "c.bias", "d"])) + str(i)
        limit = 3.4e38
        tensors[name] = torch.from_numpy(np.clip(x * scale, -limit, limit).astype(np.float32).reshape(shape))
    return tensors


@settings(max_examples=60, deadline=None)
@given(updates(), st.integers(0, 20_000), st.sampled_from([*WITH_MEMORY, *WITHOUT]), st.booleans(), st.integers(0, 500))
def test_any_update_and_any_budget(differences, limit, spec, remembers, steps):
    values = {"n": torch.tensor([1, 2, 3])}
    names = [*differences, "n"]
    memory = {n: t.flip(0) * 0.5 for n, t in differences.items() if t.dim() and decays(spec, {n: t})[n]}
    memory = memory if remembers else {}
    try:
        found = within(limit, differences, values, names, spec, memory, steps)
    except GradwireError as error:
        assert "takes at least" in str(error)
        assert limit < int(str(error).split("at least ")[1].split(",")[0])
        return
    assert len(found.data) <= limit
    model = {name: torch.zeros_like(t) for name, t in (differences | values).items()}
    sent = after(found.data, model)
    assert torch.equal(sent["n"], values["n"])
    check_conservation(spec, sent, differences, memory, found.memory)


# ── numbers of bytes ──────────────────────────────────────────────────────────────────────────────


def test_numbers_of_bytes():
    assert parse_bytes("200kB") == 200_000 and parse_bytes("200KiB") == 204_800
    assert parse_bytes(77) == parse_bytes("77") == parse_bytes(" 77 B ") == 77
    assert parse_bytes("1.5 MB") == 1_500_000 and parse_bytes("2MiB") == 2 * 2**20
    assert parse_bytes("1gb") == 10**9 and parse_bytes("0.5KiB") == 512
    for bad in ("", "kB", "-3kB", "3 bits", "1e6", "200kBs", "٣kB", "0.5", "1.0001kB", -5, 2.5, True, None, "9" * 99):
        with pytest.raises(SpecError, match=r"200kB|whole number"):
            parse_bytes(bad)


def test_a_pattern_for_every_tensor_of_a_large_model_is_compiled_once():
    """fnmatch alone, which remembers 256 patterns, would compile 180,000 here."""
    names = [f"layer[{i}].weight" for i in range(600)]
    recipes = parse_spec({glob.escape(name): "none" for name in names})
    before = spec_by_name._compiled.cache_info().misses
    assert all(spec_by_name.recipe_of_name(name, recipes) == gradwire.recipe("none") for name in names)
    assert spec_by_name._compiled.cache_info().misses - before <= 600
