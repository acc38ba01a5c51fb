"""Downloads: whatever way a client comes to a model, it has the server's bits; and nothing is lost on the way."""

from __future__ import annotations

import math
import struct
import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire import FrameError, GradwireError, SpecError
from gradwire.catalogue.all_recipes import CATALOGUE
from support.cases import for_each
from support.helpers import bits, check_same

pytest.importorskip("flwr")
from gradwire.flower.server.download_chain import DownloadChain
from gradwire.flower.shared import update
from gradwire.flower.shared.model_copy import ModelCopy, digest, whole_bytes

REFUSED = ("orq", "qsgd", "terngrad", "linear")
SPECS = (
    "none", "bf16", "co3", "co3:rounding=stochastic", "ecq:rate=0.4", "stc:p=0.01", "sbc", "sbc2", "dgc", "countsketch",
    "topk:p=0.05,scope=model,small=same", "homomorphic", "signsgd",
)  # fmt: skip
Model = dict[str, torch.Tensor]


def made(seed: int = 0) -> Model:
    """Of all kinds of tensors that models have."""
    torch.manual_seed(seed)
    return {
        "conv.weight": torch.randn(70, 80),
        "conv.bias": torch.randn(70),
        "bn.running_mean": torch.zeros(70),
        "bn.running_var": torch.ones(70),
        "bn.num_batches_tracked": torch.tensor(0),
        "empty": torch.zeros(0, 3),
        "mask": torch.zeros(5, dtype=torch.bool),
        "double": torch.randn(10, 5, dtype=torch.float64),
        "half": torch.randn(90, 60).half(),
        "scale": torch.tensor(1.0),
        "attention": torch.full((3, 3), -math.inf),
    }


def trained(model: Model, seed: int, rate: float = 0.01) -> Model:
    """A round later."""
    torch.manual_seed(seed)
    result = {}
    for name, t in model.items():
        if name.endswith("running_var"):
            result[name] = t * 0.5 + 0.5 * torch.rand(t.shape)
        elif t.is_floating_point() and name != "attention":
            result[name] = t + rate * torch.randn(t.shape, dtype=t.dtype)
        else:
            result[name] = t + 7 if t.dtype == torch.int64 else t
    result["mask"] = torch.rand(5) < 0.5
    return result


def check_has(copy: ModelCopy, chain: DownloadChain) -> None:
    assert copy.number == chain.number
    assert list(copy.model) == list(chain.shared_copy)
    for name, t in chain.shared_copy.items():
        check_same(copy.model[name], t)


def brought_up(copy: ModelCopy | None, chain: DownloadChain) -> ModelCopy:
    """As a client does it."""
    data = chain.steps_since(copy.number) if copy else None
    result = ModelCopy.whole(chain.number, chain.shared_copy) if data is None or copy is None else copy.apply(data)
    check_has(result, chain)
    return result


def steps_in(data: bytes) -> tuple[int, int, int, list[bytes]]:
    """A message, read as docs/flower.md has it."""
    assert data[:4] == b"GWD\1"
    assert struct.unpack("<I", data[4:8])[0] == zlib.crc32(data[8:])
    first, last, stated = struct.unpack("<III", data[8:20])
    steps, at = [], 20
    while at < len(data):
        length = shift = 0
        while True:
            byte, at = data[at], at + 1
            length, shift = length | (byte & 127) << shift, shift + 7
            if byte < 128:
                break
        steps.append(data[at : at + length])
        at += length
    assert at == len(data)
    return first, last, stated, steps


# ── the same bits on any path ─────────────────────────────────────────────────────────────────────


@pytest.mark.thorough
@settings(max_examples=40)
@given(st.sampled_from(SPECS), st.integers(0, 2**32), st.lists(st.sets(st.integers(0, 2)), min_size=2, max_size=5))
def test_copies_are_the_servers_on_any_path(spec, seed, taking_part):
    chain, model = DownloadChain(spec), made(seed)
    copies: list[ModelCopy | None] = [None] * 4
    for present in taking_part:
        chain.publish(model)
        for i in present | {3}:  # the last one never skips a round
            copies[i] = brought_up(copies[i], chain)
        model = trained(model, seed + chain.number)
    for copy in copies:
        brought_up(copy, chain)


def test_a_client_that_comes_back_gets_the_steps_it_missed():
    chain, model = DownloadChain("stc:p=0.01"), made()
    chain.publish(model)
    away = ModelCopy.whole(1, chain.shared_copy)
    steps = []
    for number in range(2, 7):
        model = trained(model, number)
        assert chain.publish(model) == number
        first, last, stated, (step,) = steps_in(chain.steps_since(number - 1))
        assert (first, last, stated) == (number - 1, number, digest(chain.shared_copy))
        steps.append(step)
    for have in range(1, 7):
        assert steps_in(chain.steps_since(have)) == (have, 6, digest(chain.shared_copy), steps[have - 1 :])
    check_has(away.apply(chain.steps_since(1)), chain)
    for have in (0, -1, 7, 2**40):  # new, senseless, or of another training
        assert chain.steps_since(have) is None


def test_steps_that_a_client_has_already_are_skipped():
    chain, model = DownloadChain("topk"), made()
    copies: list[ModelCopy | None] = [None]
    for number in range(1, 5):
        chain.publish(model)
        copies.append(brought_up(copies[-1], chain))
        model = trained(model, number)
    late = chain.steps_since(1)
    for copy in copies[1:]:
        check_has(copy.apply(late), chain)
    early = chain.steps_since(3)
    with pytest.raises(FrameError, match="do not continue"):
        copies[2].apply(early)
    chain.publish(model)
    with pytest.raises(FrameError, match="do not continue"):
        brought_up(copies[4], chain).apply(late)


def test_the_digest_sees_all_but_strides():
    model = made()
    turned = {n: t.T.clone().T if t.dim() == 2 else t for n, t in model.items()}
    turned["conv.bias"] = torch.stack([model["conv.bias"]] * 2, 1)[:, 0]
    turned["scale"] = torch.tensor([[1.0, 2.0]]).T[0].squeeze()
    assert digest(turned) == digest(model)
    entry = model["conv.weight"].clone()
    entry[-1, -1] = torch.nextafter(entry[-1, -1], torch.tensor(9.0))
    others = [
        {**model, "conv.weight": entry},
        {**model, "conv.weight": model["conv.weight"].view(80, 70)},
        {**model, "bn.num_batches_tracked": torch.tensor(1)},
        {**model, "bn.num_batches_tracked": torch.tensor(0.0, dtype=torch.float64)},
        dict(reversed(model.items())),
        {n if n != "empty" else "none": t for n, t in model.items()},
    ]
    assert len({digest(m) for m in [model, *others]}) == len(others) + 1


# ── nothing is lost ───────────────────────────────────────────────────────────────────────────────


@settings(max_examples=25)
@given(st.sampled_from(SPECS), st.integers(0, 2**32))
def test_what_was_sent_and_what_waits_is_all_there_is(spec, seed):
    chain, first = DownloadChain(spec), made(seed)
    chain.publish(first)
    model, sent = first, torch.zeros(70, 80, dtype=torch.float64)
    for number in range(1, 5):
        model = trained(model, number)
        chain.publish(model)
        data = chain.steps_since(number)
        if data is None:  # `none` gains nothing, and goes out whole
            assert spec == "none"
            check_same(chain.shared_copy["conv.weight"], model["conv.weight"])
            return
        (step,) = steps_in(data)[3]
        zeros = {name: torch.zeros_like(t) for name, t in model.items()}
        sent += update.decode(step, zeros).get("conv.weight", zeros["conv.weight"]).double()
    waits = model["conv.weight"].double() - chain.shared_copy["conv.weight"].double()
    torch.testing.assert_close(
        sent + waits, (model["conv.weight"].double() - first["conv.weight"].double()), rtol=0, atol=4 * 2**-22
    )  # each of four sums of numbers below 8 is rounded to half of 2^-21
    for name in ("bn.num_batches_tracked", "mask", "attention", "empty"):
        check_same(chain.shared_copy[name], model[name])


@pytest.mark.thorough
@for_each("spec", [n for n in CATALOGUE if n not in REFUSED] + ["ecq:rate=1.5,rounding=stochastic"])
def test_what_waits_gets_less(spec):
    """As far as bits go, where the model stays: an error that fed on itself would grow without bound."""
    torch.manual_seed(1)
    chain = DownloadChain(spec)
    chain.publish({"w": torch.zeros(5000), "b": torch.zeros(30)})
    goal = {"w": torch.randn(5000) ** 3, "b": torch.randn(30)}
    left = [float(goal["w"].norm())]
    for i in range(40):
        chain.publish({name: t + 1e-6 * (i % 2) for name, t in goal.items()})
        left.append(float((goal["w"] - chain.shared_copy["w"]).norm()))
        assert left[-1] <= left[-2] * 1.0001 + 1e-3
        assert float((goal["b"] - chain.shared_copy["b"]).norm()) <= float(goal["b"].norm())
    assert left[-1] < 0.9 * left[0]


def test_training_from_the_copy_reaches_the_goal():
    """Replies are whole models here, made of the copy, which changes by 1% of its entries at a time."""
    torch.manual_seed(0)
    goal = torch.randn(5000)
    chain, model = DownloadChain("stc:p=0.01,small=same"), {"w": torch.zeros(5000)}
    for _ in range(600):
        chain.publish(model)
        seen = chain.shared_copy["w"]
        model = chain.rebased({"w": seen - 0.02 * (seen - goal)})
    assert float((model["w"] - goal).norm()) < 0.02 * float(goal.norm())


def test_a_reply_of_the_copy_itself_is_the_true_model():
    chain, model = DownloadChain("topk:p=0.001"), made()
    chain.publish(model)
    model = trained(model, 1)
    chain.publish(model)
    back = chain.rebased(chain.shared_copy)
    for name, t in model.items():
        torch.testing.assert_close(back[name], t, rtol=2**-9 if t.dtype == torch.float16 else 1e-6, atol=1e-6)
    assert chain.rebased({"other": torch.ones(2)})["other"].tolist() == [1, 1]


@pytest.mark.parametrize("spec", ["co3", "stc", "sbc:small=same"])
def test_variances_stay_positive(spec):
    for seed in range(30):
        torch.manual_seed(seed)
        chain = DownloadChain(spec)
        chain.publish({**made(), "bn.running_var": 2 * torch.rand(70)})
        chain.publish({**made(), "bn.running_var": 1e-4 * torch.rand(70)})
        assert chain.steps_since(1) is not None
        assert float(chain.shared_copy["bn.running_var"].min()) >= 0


# ── numbers, cache, and what goes out whole ───────────────────────────────────────────────────────


def test_a_model_is_encoded_once_for_all_clients(monkeypatch):
    calls = []
    encode = update.encode
    monkeypatch.setattr(update, "encode", lambda *args, **options: calls.append(1) or encode(*args, **options))
    chain, model = DownloadChain("stc"), made()
    for number in range(1, 4):
        messages = set()
        for _ in range(100):
            assert chain.publish({name: t.clone() for name, t in model.items()}) == number
            messages.add(id(chain.steps_since(number - 1)))
        assert len(messages) == 1
        assert len(calls) == number - 1
        model = trained(model, number)


def test_a_model_that_is_changed_in_place_is_another_one():
    chain, model = DownloadChain("co3"), made()
    chain.publish(model)
    model["conv.weight"][0, 0] += 1
    assert chain.publish(model) == 2
    assert chain.shared_copy["conv.weight"][0, 0] == pytest.approx(float(model["conv.weight"][0, 0]), abs=0.2)


@pytest.mark.parametrize(("spec", "kept"), [("none", 0), ("bf16", 1), ("co3", 5), ("stc:p=0.1", 8)])
def test_the_cache_is_no_longer_than_the_model(spec, kept):
    chain, model = DownloadChain(spec), {"w": torch.randn(20_000)}
    for number in range(1, 40):
        chain.publish(model)
        cached = [data for have in range(1, number) if (data := chain.steps_since(have)) is not None]
        assert all(len(data) < whole_bytes(model) for data in cached)
        assert sum(map(len, chain._steps)) <= whole_bytes(model)
        model = trained({**model, "mask": torch.zeros(0)}, number)
        del model["mask"]
    assert kept <= len(cached) < 39
    assert steps_in(chain.steps_since(39))[3] == []  # and one who has it gets a few bytes


@pytest.mark.parametrize(
    "other",
    [
        {"conv.weight": torch.zeros(80, 70)},
        {"new": torch.ones(2)},
    ],
)
def test_other_tensors_go_out_whole_first(other):
    chain, model = DownloadChain("co3"), made()
    chain.publish(model)
    model = {**model, **other}
    assert chain.publish(model) == 2
    assert chain.steps_since(1) is None
    check_has(ModelCopy.whole(2, model), chain)
    assert chain.publish(trained(model, 1)) == 3
    assert chain.steps_since(1) is None
    assert chain.steps_since(2) is not None


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (torch.zeros(9000), torch.full((9000,), math.inf)),
        (torch.full((9000,), -3e38), torch.full((9000,), 3e38)),
        (torch.zeros(9000).double(), torch.full((9000,), 1e200, dtype=torch.float64)),
        (torch.zeros(9000).half(), torch.linspace(65472, 65504, 9000).half()),
        (torch.zeros(9000, dtype=torch.complex64), torch.ones(9000, dtype=torch.complex64)),
    ],
)
def test_what_no_step_can_hold_still_arrives(before, after):
    chain = DownloadChain("co3:format=e2m1")
    chain.publish({"w": before})
    copy = ModelCopy.whole(1, {"w": before})
    chain.publish({"w": after})
    copy = brought_up(copy, chain)
    torch.testing.assert_close(copy.model["w"], after, rtol=0.2, atol=0)


def test_nan_is_an_error_that_changes_nothing():
    chain, model = DownloadChain("co3"), made()
    chain.publish(model)
    chain.publish(trained(model, 1))
    before, data = bits(chain.shared_copy["conv.weight"]), chain.steps_since(1)
    for name in ("conv.weight", "half", "double", "scale", "bn.running_var"):
        bad = {n: t.clone() for n, t in trained(model, 2).items()}
        bad[name].view(-1)[-1] = math.nan
        with pytest.raises(GradwireError, match="diverged"):
            chain.publish(bad)
        assert (chain.number, chain.steps_since(1)) == (2, data)
        assert bits(chain.shared_copy["conv.weight"]) == before
    with pytest.raises(GradwireError, match="diverged"):
        DownloadChain("co3").publish({"w": torch.tensor([math.nan])})


@for_each("spec", [*REFUSED, "auto", "ecq:rate=1,rounding=stochastic", {"*.bias": "qsgd", "*": "co3"}])
def test_recipes_that_are_refused(spec):
    with pytest.raises(SpecError):
        DownloadChain(spec)


def test_schedules_go_by_the_number_of_the_model():
    chain, model = DownloadChain("topk:p=0.001,warmup=3,start=0.2"), {"w": torch.zeros(50_000)}
    sizes = []
    for number in range(1, 6):
        chain.publish(model)
        sizes.append(len(chain.steps_since(number - 1) or b""))
        model = {"w": model["w"] + torch.randn(50_000)}
    assert sizes[1] > 3 * sizes[2] > 9 * sizes[3] / 2 > 0
    assert sizes[3] == pytest.approx(sizes[4], rel=0.2)


# ── bad input ─────────────────────────────────────────────────────────────────────────────────────


def published() -> tuple[DownloadChain, ModelCopy, bytes]:
    """A chain with three steps, a copy of its second model, and what it missed."""
    chain, model = DownloadChain("stc"), {"w": torch.randn(80, 80), "b": torch.randn(9), "n": torch.tensor(1)}
    for number in range(1, 5):
        chain.publish(model)
        if number == 2:
            copy = ModelCopy.whole(2, chain.shared_copy)
        model = {n: t + (torch.randn(t.shape) * 0.01 if n != "n" else 1) for n, t in model.items()}
    data = chain.steps_since(2)
    assert data is not None
    check_has(copy.apply(data), chain)
    return chain, copy, data


def sealed(data: bytes) -> bytes:
    return data[:4] + struct.pack("<I", zlib.crc32(data[8:])) + data[8:]


def check_refused(copy: ModelCopy, data: bytes) -> None:
    before = {name: bits(t) for name, t in copy.model.items()}
    with pytest.raises(FrameError):
        copy.apply(data)
    for name, t in copy.model.items():
        assert bits(t) == before[name]


def test_truncated_messages():
    _, copy, data = published()
    for length in range(len(data)):
        check_refused(copy, data[:length])
        check_refused(copy, sealed(data[:length])) if length >= 8 else None
    check_refused(copy, sealed(data + b"\0"))


def test_messages_with_a_changed_byte():
    _, copy, data = published()
    for i in range(len(data)):
        for flip in (1, 0x80, 0xFF):
            bad = bytearray(data)
            bad[i] ^= flip
            check_refused(copy, bytes(bad))
            if i >= 8:
                check_refused(copy, sealed(bytes(bad)))


@for_each(
    "body",
    [
        struct.pack("<III", 2, 2**32 - 1, 0),
        struct.pack("<III", 0, 2**32 - 1, 0) + b"\0" * 1000,
        struct.pack("<III", 2, 3, 0) + b"\xff\xff\xff\xff\xff\xff\x7f",
        struct.pack("<III", 2, 3, 0) + b"\x05\xff\xff\xff\xff\x7f",
        struct.pack("<III", 2, 3, 0) + b"\x08\x01\xff\xff\xff\xff\xff\x7f\x00",
        struct.pack("<III", 2, 3, 0) + b"\x03\x01\x07\x00",
        b"",
    ],
)
def test_huge_counts(body):
    check_refused(published()[1], sealed(b"GWD\1\0\0\0\0" + body))


def test_a_frame_that_declares_more_than_the_tensor_has():
    _, copy, _ = published()
    large = {"w": torch.zeros(2**20), "b": torch.zeros(9), "n": torch.tensor(1)}
    step = update.encode({"w": torch.ones(2**20)}, {}, list(large), "topk:k=1").data
    assert len(step) < 128
    body = struct.pack("<III", 2, 3, 0) + bytes([len(step)]) + step
    check_refused(copy, sealed(b"GWD\1\0\0\0\0" + body))


def test_a_tensor_of_another_dtype_goes_out_as_it_is():
    """Flower's mean of integers is a float."""
    chain, model = DownloadChain("co3"), made()
    copy = ModelCopy.whole(chain.publish(model), model)
    chain.publish({**model, "bn.num_batches_tracked": torch.tensor(1.5, dtype=torch.float64)})
    copy = copy.apply(chain.steps_since(1))
    assert copy.model["bn.num_batches_tracked"].dtype == torch.float64
    check_has(copy, chain)


def test_more_than_a_whole_model_is_not_looked_at():
    _, copy, _ = published()
    body = struct.pack("<III", 2, 4 + 2**15, 0) + bytes([1, 0]) * 2**15
    assert len(body) > whole_bytes(copy.model)
    check_refused(copy, sealed(b"GWD\1\0\0\0\0" + body))


def test_another_version_names_the_fix():
    _, copy, data = published()
    with pytest.raises(FrameError, match="upgrade"):
        copy.apply(data[:3] + b"\2" + data[4:])


def test_a_copy_of_another_training_is_found_out():
    _, copy, data = published()
    other = ModelCopy.whole(2, {**copy.model, "b": copy.model["b"] + 1})
    check_refused(other, data)
    check_refused(ModelCopy.whole(2, {n: copy.model[n] for n in ("b", "w", "n")}), data)
