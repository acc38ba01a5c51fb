"""Weight gradients from K rows (docs/backward.md): exact at K = M, nothing lost below it, and as the paper has it.

tests/support/plain_rows.py is the method once more, in fp64 numpy.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import gradwire
from gradwire.backward import POLICIES, RowMemory
from gradwire.backward.autograd import mean_input
from gradwire.backward.row_choice import Choice
from support.cases import for_each
from support.helpers import bits, check_same
from support.plain_rows import PlainRows, close

DTYPES = (torch.float32, torch.float64, torch.bfloat16)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def picks(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Which rows were chosen, backward pass by backward pass."""
    found: list[list[int]] = []
    pick = Choice.pick

    def recording(choice: Choice, scores: torch.Tensor) -> torch.Tensor:
        chosen = pick(choice, scores)
        found.append(chosen.tolist())
        return chosen

    monkeypatch.setattr(Choice, "pick", recording)
    return found


def outcome(layer: nn.Module, x: torch.Tensor, seed: int = 1) -> dict[str, torch.Tensor]:
    """What the layer gives and what goes back through it."""
    layer.zero_grad()
    x = x.detach().requires_grad_()
    y = layer(x)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(seed)).to(y.dtype))
    return {"y": y.detach(), "x": x.grad, **{name: p.grad for name, p in layer.named_parameters()}}


INPUTS: dict[str, Callable[[], torch.Tensor]] = {
    "rows": lambda: torch.randn(33, 20),
    "one row": lambda: torch.randn(20),
    "time": lambda: torch.randn(4, 9, 20),
    "four dimensions": lambda: torch.randn(2, 3, 4, 20),
    "time first": lambda: torch.randn(9, 4, 20).transpose(0, 1),
    "every other feature": lambda: torch.randn(33, 40)[:, ::2],
    "one row again and again": lambda: torch.randn(1, 20).expand(33, 20),
}


@for_each("dtype", DTYPES, ids=str)
@for_each("shape", INPUTS)
def test_all_rows_are_the_exact_gradient_bit_for_bit(dtype, shape):
    for bias in (True, False):
        plain = nn.Linear(20, 13, bias=bias).to(dtype)
        for k, decay in ((1.0, 1.0), (1.0, 0.0), (10**6, 0.5)):
            layer = gradwire.backward.convert(copy.deepcopy(plain), k, decay=decay)
            for seed in range(2):  # memory stays empty, so that the second batch is exact as well
                x = INPUTS[shape]().to(dtype)
                exact, ours = outcome(plain, x, seed), outcome(layer, x, seed)
                assert exact.keys() == ours.keys()
                for name, value in exact.items():
                    check_same(ours[name], value)


@for_each("policy", POLICIES)
@for_each("dtype", DTYPES, ids=str)
def test_outputs_and_gradients_of_inputs_and_bias_are_exact_at_any_k(dtype, policy):
    plain = nn.Linear(20, 13).to(dtype)
    layer = gradwire.backward.convert(copy.deepcopy(plain), 3, policy)
    for make in INPUTS.values():
        x = make().to(dtype)
        exact, ours = outcome(plain, x), outcome(layer, x)
        for name in ("y", "x", "bias"):
            check_same(ours[name], exact[name])
    assert bits(ours["weight"]) != bits(exact["weight"])


FORMATS = {1: torch.contiguous_format, 2: torch.channels_last, 3: torch.channels_last_3d}


@for_each("places", [1, 2, 3])
@for_each("dtype", DTYPES, ids=str)
def test_convolutions(places, dtype):
    """torch sums a convolution's weight gradient in an order of its own: that one is equal to rounding."""
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[places - 1]
    for stride, layout, bias in ((1, torch.contiguous_format, True), (2, torch.contiguous_format, False),
                                 (3, FORMATS[places], True), (1, FORMATS[places], False)):  # fmt: skip
        plain = kind(7, 9, 1, stride=stride, bias=bias, dtype=dtype)
        x = torch.randn(3, 7, *(6, 5, 4)[:places]).to(dtype).to(memory_format=layout)
        exact = outcome(plain, x)
        for k in (1.0, 2):
            ours = outcome(gradwire.backward.convert(copy.deepcopy(plain), k), x)
            assert exact.keys() == ours.keys()
            for name in exact.keys() - {"weight"}:
                check_same(ours[name], exact[name])
            assert ours["weight"].shape == exact["weight"].shape
            if k == 1.0:
                close(
                    ours["weight"],
                    exact["weight"].double().numpy(),
                    (2 if dtype == torch.bfloat16 else 16) * torch.finfo(dtype).eps,
                )


def test_rows_of_a_convolution_are_its_places(picks):
    """With stride, those that were looked at; the same rows give a linear layer the same gradient and memory."""
    convolution = gradwire.backward.convert(nn.Conv2d(7, 9, 1, stride=(2, 1), bias=False), 4)
    layer = gradwire.backward.Linear(7, 9, bias=False, k=4)
    for seed in range(3):
        x = torch.randn(2, 7, 5, 2)
        ours = outcome(convolution, x, seed)["weight"]
        d = torch.randn(2, 9, 3, 2, generator=torch.Generator().manual_seed(seed)).movedim(1, -1)
        layer.zero_grad()
        layer(x[:, :, ::2].movedim(1, -1)).backward(d)
        assert bits(ours) == bits(layer.weight.grad)
    assert len(picks[0]) == 4 and picks[::2] == picks[1::2]
    assert bits(convolution.memory.outputs) == bits(layer.memory.outputs)


def test_an_image_without_a_batch_is_exact():
    plain = nn.Conv2d(7, 9, 1)
    layer = gradwire.backward.convert(copy.deepcopy(plain), 1)
    x = torch.randn(7, 5, 4)
    exact, ours = outcome(plain, x), outcome(layer, x)
    assert all(bits(ours[name]) == bits(exact[name]) for name in exact)


# ── the method, by numpy ──────────────────────────────────────────────────────────────────────────


def batches(count: int, rows: int = 12, inputs: int = 6, outputs: int = 5) -> Iterator[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(count)
    for _ in range(count):
        sizes = torch.rand(rows, 1, generator=generator)  # so that rows have different norms
        yield torch.randn(rows, inputs, generator=generator) * sizes, torch.randn(rows, outputs, generator=generator)


@for_each("centre", [True, False], ids=["centred", "as in the paper"])
@for_each("decay", [1.0, 0.5, 0.0])
@for_each("policy", POLICIES)
def test_gradients_and_memories_are_those_of_the_paper(policy, decay, centre, picks):
    layer = gradwire.backward.Linear(6, 5, k=0.25, policy=policy, decay=decay, centre=centre)
    plain = PlainRows(6, 5, decay, centre)
    picks.clear()
    for x, d in batches(20):
        layer.zero_grad()
        layer(x + 0.5).backward(d)
        chosen = None if policy == "topk" else picks[-1]
        close(layer.weight.grad, plain.gradient(x + 0.5, d, 3, chosen=chosen))
        assert len(picks[-1]) == 3
        if decay:
            for ours, theirs in zip((layer.memory.inputs, layer.memory.outputs), plain.left(), strict=True):
                close(ours, theirs)
    assert len(picks) == 20


@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    k=st.one_of(st.integers(1, 6), st.floats(0.05, 1)),
    decay=st.sampled_from([1.0, 0.7, 0.01]),
    policy=st.sampled_from(POLICIES),
    centre=st.booleans(),
    rows=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    kept=st.sampled_from([None, torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**20),
)
def test_what_is_chosen_and_what_is_remembered_is_what_came_in(
    sizes, k, decay, policy, centre, rows, kept, seed
):  # fmt: skip
    """To the bit: a row is rounded once on its way into the sum, and once more by a narrower memory, chosen or not.

    What came in is less the mean of the inputs, where that goes through by itself.
    """
    generator = torch.Generator().manual_seed(seed)
    layer = gradwire.backward.Linear(
        3, 2, k=k, policy=policy, decay=decay, centre=centre, memory_dtype=kept, dtype=rows
    )
    wide = torch.promote_types(rows, torch.float32)
    stored = kept or wide
    expected = [torch.zeros(0, 3, dtype=stored), torch.zeros(0, 2, dtype=stored)]
    for size in sizes:
        batch = [torch.randn(size, n, generator=generator).to(rows) for n in (3, 2)]
        batch[0] *= torch.randint(0, 3, (size, 1), generator=generator)  # rows of zero, and ties
        layer.zero_grad()
        layer(batch[0]).backward(batch[1])
        memories = layer.memory.inputs, layer.memory.outputs
        if memories[0] is None:
            assert layer.choice.count(size) == size, "nothing to remember"
            check_same(layer.weight.grad, batch[1].t() @ batch[0])
            continue
        keep = np.sqrt(decay)
        sums = []
        mean = mean_input(*batch) if centre and size else torch.zeros(3, dtype=rows)
        centred = batch[0].to(wide) - mean.to(wide)
        brings = (centred != 0).any(1) & (batch[1] != 0).any(1)
        for i, incoming in enumerate(batch):
            longer = torch.zeros(max(0, size - len(expected[i])), incoming.shape[1], dtype=stored)
            expected[i] = torch.cat([expected[i], longer])
            entered = (incoming.to(wide) if i else centred) * brings[:, None]
            sums.append((expected[i][:size].to(wide) * keep + entered).to(stored).to(wide))
        zero = [(m[:size] == 0).all(1) for m in memories]
        left = ~(zero[0] & zero[1])
        taken = [s * ~left[:, None] for s in sums]
        for i, memory in enumerate(memories):
            new = expected[i].clone()
            new[:size] = sums[i] - taken[i]
            check_same(memory + 0.0, new + 0.0)  # −0 is 0 here
            expected[i] = new
        of_mean = torch.outer(batch[1].double().sum(0), mean.double())
        products = of_mean + taken[1].double().t() @ taken[0].double()
        close(layer.weight.grad, products.numpy(), 12 * torch.finfo(rows).eps)
        assert int(left.sum()) <= size - layer.choice.count(size)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_mean_is_of_rows_that_have_a_gradient(dtype):
    torch.manual_seed(0)
    x, d = (torch.randn(3000, 5) + 100).to(dtype), torch.randn(3000, 4).to(dtype)
    d[1000:] = 0
    d[:, 0] = 0
    x[1000:] = 60000.0 if dtype == torch.float16 else 1e30
    expected = x[:1000].double().mean(0)
    roundings = 1000 if dtype in (torch.float64, torch.float32) else 2  # of a sum; half types are summed in fp32
    torch.testing.assert_close(mean_input(x, d).double(), expected, rtol=roundings * torch.finfo(dtype).eps, atol=0)
    assert not mean_input(x, torch.zeros_like(d)).any()
    assert mean_input(x[:0], d[:0]).tolist() == [0] * 5


# ── the choice ────────────────────────────────────────────────────────────────────────────────────


def frequencies(choice: Choice, scores: list[float], draws: int = 3000) -> np.ndarray:
    """How often each row is among the chosen."""
    torch.manual_seed(0)
    tensor, counts = torch.tensor(scores, dtype=torch.float64), torch.zeros(len(scores))
    for _ in range(draws):
        counts[choice.pick(tensor)] += 1
    return counts.numpy() / draws


def check_frequencies(found: np.ndarray, expected: np.ndarray, draws: int = 3000) -> None:
    sigma = np.sqrt(expected * (1 - expected) / draws)
    assert (np.abs(found - expected) <= 4 * sigma + 1e-12).all(), (found, expected)


def test_weightedk_draws_in_proportion_to_squares_without_replacement():
    scores = [1.0, 2.0, 3.0, 0.5, 0.0]
    p = np.square(scores) / np.square(scores).sum()
    check_frequencies(frequencies(Choice(1, "weightedk"), scores), p)
    second = [sum(p[j] * p[i] / (1 - p[j]) for j in range(5) if j != i) for i in range(5)]
    check_frequencies(frequencies(Choice(2, "weightedk"), scores), p + second)
    check_frequencies(frequencies(Choice(1, "weightedk"), [1e-150 * s for s in scores]), p)


def test_randk_takes_all_rows_equally_often():
    check_frequencies(frequencies(Choice(2, "randk"), [0.0, 5.0, 1.0, 1e9, 0.1]), np.full(5, 0.4))


@pytest.mark.parametrize("policy", ["topk", "weightedk"])
def test_rows_without_a_score_come_last(policy):
    torch.manual_seed(0)
    for _ in range(50):
        assert {1, 4} <= set(
            Choice(3, policy).pick(torch.tensor([0.0, 1e-30, 0, 0, 1e30, 0], dtype=torch.float64)).tolist()
        )


@for_each("policy", POLICIES)
@for_each("score", [0.0, 1.0])
def test_ties_still_give_k_different_rows_in_order(policy, score):
    chosen = Choice(5, policy).pick(torch.full((12,), score, dtype=torch.float64)).tolist()
    assert chosen == sorted(set(chosen)) and len(chosen) == 5 and 0 <= chosen[0] <= chosen[-1] < 12


def test_shares_are_rounded_up_and_numbers_are_at_most_the_batch():
    assert [Choice(0.25).count(n) for n in (0, 1, 4, 5, 1000)] == [0, 1, 1, 2, 250]
    assert [Choice(7).count(n) for n in (0, 1, 7, 8)] == [0, 1, 7, 7]
    assert Choice(1e-12).count(100) == 1
    for percent in range(1, 101):  # 0.07·100 is a little more than 7 in floating point
        assert Choice(percent / 100).count(100) == percent
        assert Choice(percent / 100).count(10**6) == percent * 10**4


def test_the_function():
    """gradwire.backward.linear: with a memory of the caller's own, and without."""
    weight, bias, memory = torch.randn(5, 6, requires_grad=True), torch.randn(5, requires_grad=True), RowMemory(0.5)
    plain = PlainRows(6, 5, 0.5)
    for x, d in batches(5):
        weight.grad = None
        y = gradwire.backward.linear(x, weight, bias, k=3, memory=memory)
        assert bits(y) == bits(nn.functional.linear(x, weight, bias))
        y.backward(d)
        close(weight.grad, plain.gradient(x, d, 3))
    assert memory.bytes == 4 * 12 * (6 + 5)
    weight.grad = None
    gradwire.backward.linear(x, weight, k=3).backward(d)
    close(weight.grad, PlainRows(6, 5).gradient(x, d, 3))
