"""Numbers that are not finite or do not fit, autocast, and loss scales: the memory stays what it should be."""

from __future__ import annotations

import copy
import functools
import math

import pytest
import torch
from torch import nn

import gradwire
from gradwire.backward import convert, converted
from support.cases import for_each
from support.helpers import bits, check_same


def batch(step: int, size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(size, 6, generator=generator), torch.randn(size, 5, generator=generator)


def memory(layer: nn.Module) -> tuple[bytes, bytes]:
    return bits(layer.memory.inputs), bits(layer.memory.outputs)


@for_each("bad", [math.nan, math.inf, -math.inf])
@for_each("where", ["inputs", "outputs"])
@for_each("k", [2, 1.0])
def test_rows_that_are_not_finite_do_not_reach_the_memory(bad, where, k):
    layer = gradwire.backward.Linear(6, 5, k=2, centre=False)
    x, d = batch(0)
    layer(x).backward(d)
    convert(layer, k, centre=False)
    before = layer.memory.inputs.clone(), layer.memory.outputs.clone()
    x, d = batch(1)
    (x if where == "inputs" else d)[3, 2] = bad  # not of the rows that would be chosen, or of them
    layer.zero_grad()
    layer(x).backward(d)
    assert layer.weight.grad.isnan().all()
    for kept, old, rows in zip((layer.memory.inputs, layer.memory.outputs), before, (x, d), strict=True):
        joined = old + rows  # all other rows are remembered, and nothing was taken out
        joined[3] = old[3]
        check_same(kept, joined)
    x, d = batch(2)
    layer.zero_grad()
    layer(x).backward(d)
    assert layer.weight.grad.isfinite().all()


def test_a_mean_that_is_not_finite_leaves_the_memory_as_it_was():
    layer = gradwire.backward.Linear(6, 5, k=2)
    x, d = batch(0)
    layer(x).backward(d)
    before = memory(layer)
    x[3, 2] = math.inf
    layer(x).backward(d)
    assert layer.weight.grad.isnan().any() and memory(layer) == before


@pytest.mark.parametrize("policy", gradwire.backward.POLICIES)
def test_without_a_memory_a_bad_row_is_noticed_all_the_same(policy):
    layer = gradwire.backward.Linear(6, 5, k=1, policy=policy, decay=0)
    x, d = batch(0)
    x[0] = 0
    d[0, 0] = math.inf
    layer(x).backward(d)
    assert layer.weight.grad.isnan().all()


def test_the_first_batch_may_be_the_bad_one():
    layer = gradwire.backward.Linear(6, 5, k=2)
    x, d = batch(0)
    layer(x * math.inf).backward(d)
    assert layer.weight.grad.isnan().all()
    other = gradwire.backward.Linear(6, 5, k=2)
    for each in (layer, other):
        each.zero_grad()
        each(x).backward(d)
    check_same(layer.weight.grad, other.weight.grad)
    assert memory(layer) == memory(other)


@pytest.mark.parametrize(("dtype", "most"), [(torch.float16, 6e4), (torch.bfloat16, 3e38), (torch.float32, 3e38)])
def test_sums_that_do_not_fit_are_not_remembered(dtype, most):
    """Row and memory may each be finite, and their sum too large for the dtype."""
    layer = gradwire.backward.Linear(2, 2, k=1, centre=False, dtype=dtype)
    d = torch.full((2, 2), 0.5, dtype=dtype)
    layer(torch.tensor([[most / 2, 0], [0, most]], dtype=dtype)).backward(d)
    assert layer.weight.grad.isfinite().all() and layer.memory.inputs[0, 0] > 0
    before = layer.memory.inputs[0].clone(), layer.memory.outputs[0].clone()
    layer.zero_grad()
    layer(torch.tensor([[0.75 * most, 0], [0, 1]], dtype=dtype)).backward(d)
    assert layer.weight.grad.isnan().all()
    check_same(layer.memory.inputs[0], before[0])
    check_same(layer.memory.outputs[0], before[1])
    assert layer.memory.inputs[1].tolist() == [0, 1]


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
def test_what_a_narrower_memory_cannot_hold(kept):
    layer = gradwire.backward.Linear(6, 5, k=2, dtype=torch.float64, memory_dtype=kept)
    x, d = (t.double() for t in batch(0))
    layer(x).backward(d)
    before = memory(layer)
    layer.zero_grad()
    layer(x * 1e100).backward(d * 1e-50)
    assert layer.weight.grad.isnan().all() and memory(layer) == before
    layer.zero_grad()
    layer(x).backward(d)
    assert layer.weight.grad.isfinite().all()


# ── autocast ──────────────────────────────────────────────────────────────────────────────────────


def make(k: object = None, **options: object) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 8), nn.Tanh(), nn.Unflatten(1, (8, 1)), nn.Conv1d(8, 7, 1), nn.Flatten(), nn.Linear(7, 5)
    )
    return convert(model, k, **options) if k else model


@pytest.mark.parametrize("inside", [False, True], ids=["backward outside", "backward inside"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype, inside):
    """All rows: torch's own gradients, bit for bit (a convolution's to rounding); the memory stays fp32."""
    plain, model, some = make(), make(1.0), make(0.25)
    for step in range(2):
        x, d = batch(step)
        for each in (plain, model, some):
            each.zero_grad()
            with torch.autocast("cpu", dtype):
                y = each(x)
                assert y.dtype == dtype
                if inside:
                    y.backward(d.to(dtype))
            if not inside:
                y.backward(d.to(dtype))
        for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
            if name == "3.weight":
                torch.testing.assert_close(
                    q.grad, p.grad, rtol=0, atol=float(p.grad.abs().max()) * torch.finfo(dtype).eps
                )
            else:
                check_same(q.grad, p.grad)
        for (name, p), q in zip(plain.named_parameters(), some.named_parameters(), strict=True):
            assert q[1].grad.dtype == torch.float32
            assert (bits(p.grad) == bits(q[1].grad)) == name.endswith("bias")
    for layer in converted(some).values():
        assert layer.memory.inputs.dtype == layer.memory.outputs.dtype == torch.float32
        assert layer.memory.inputs.any()


def test_autocast_of_the_function():
    x, weight, bias = (torch.randn(shape, requires_grad=True) for shape in ((16, 8), (5, 8), (5,)))
    found = []
    for function in (nn.functional.linear, functools.partial(gradwire.backward.linear, k=1.0)):
        with torch.autocast("cpu", torch.bfloat16):
            y = function(x, weight, bias)
        assert y.dtype == torch.bfloat16
        found.append(torch.autograd.grad(y.float().square().sum(), (x, weight, bias)))
    for plain, ours in zip(*found, strict=True):
        check_same(ours, plain)


def test_autocast_leaves_fp64_alone():
    layer = convert(nn.Linear(6, 5, dtype=torch.float64), 2)
    x, d = batch(0)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x.double())
    assert y.dtype == torch.float64
    y.backward(d.double())
    assert layer.memory.inputs.dtype == torch.float64


# ── loss scales ───────────────────────────────────────────────────────────────────────────────────


def train(
    scaler: torch.amp.GradScaler | None, bad: dict[int, float], dtype: torch.dtype | None = None, skip: bool = False,
    **options: object,
) -> tuple[nn.Module, list[float]]:  # fmt: skip
    """`bad` multiplies the loss of a step; with `skip` those steps are left out."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-6)
    convert(model, 0.25, grad_scaler=scaler, optimizer=optimizer if options.pop("paper", False) else None, **options)
    scales = []
    for step in range(10):
        if skip and step in bad:
            continue
        x, d = batch(step)
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = (model(x).float() * d).sum() * bad.get(step, 1.0)
        optimizer.zero_grad()
        if scaler:
            scales.append(scaler.get_scale())
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()
    return model, scales


def scaler(start: float = 2.0**10) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=start, growth_interval=2)


@pytest.mark.parametrize("paper", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_the_memory_is_not_scaled(dtype, paper):
    """Scales are powers of two: the training is, bit for bit, the one without, less the steps that were skipped."""
    bad = {5: math.inf, 7: math.nan}
    ours, scales = train(scaler(), bad, dtype, paper=paper)
    plain, _ = train(None, bad, dtype, skip=True, paper=paper)
    assert len(set(scales)) > 2 and scales[6] == scales[5] / 2
    assert ours.state_dict().keys() == plain.state_dict().keys()
    for name, value in plain.state_dict().items():
        check_same(ours.state_dict()[name], value)
    exact, _ = train(None, bad, dtype, skip=True, decay=0)
    assert bits(exact[0].weight) != bits(plain[0].weight), "memory matters here"


def test_fp16_overflows_until_the_scale_fits():
    """fp16 holds 65504: while the scale is too large for a row, steps are skipped, and the rows that fit wait."""
    own = scaler(2.0**18)
    layer = convert(nn.Linear(6, 5), 2, grad_scaler=own)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    waiting, done = torch.zeros(8, 5), []
    for step in range(12):
        x, d = batch(step)
        layer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            y = layer(x / 64)  # so that products are smaller than rows
        scale = own.get_scale()
        own.scale((y.float() * d).sum()).backward()
        own.step(optimizer)
        own.update()
        done.append(own.get_scale() >= scale)
        rows = (d * scale).half().float() / scale
        joined = torch.where((((waiting + rows) * scale).norm(dim=1) <= 65504)[:, None], waiting + rows, waiting)
        assert done[-1] == torch.equal(joined, waiting + rows)
        if done[-1]:
            taken = ~layer.memory.outputs.any(dim=1)
            assert taken.sum() == 2
            joined[taken] = 0
        waiting = joined
        torch.testing.assert_close(layer.memory.outputs, waiting, rtol=1e-6, atol=0)
    assert done[:2] == [False, False] and done.count(True) >= 4


def test_products_that_do_not_fit():
    """The rows fit and their product does not: the step is skipped with the chosen rows, the others are remembered."""
    layer = gradwire.backward.Linear(2, 2, k=1, centre=False, dtype=torch.float16)
    x = torch.tensor([[1000.0, 0], [0, 1]]).half()
    layer(x).backward(torch.tensor([[1000.0, 0], [0, 1]]).half())
    assert not layer.weight.grad.isfinite().all()
    assert layer.memory.inputs.tolist() == [[0, 0], [0, 1]]


def test_a_scaler_that_is_switched_off_and_one_that_was_loaded():
    off = torch.amp.GradScaler("cpu", enabled=False)
    ours, _ = train(off, {})
    plain, _ = train(None, {})
    assert all(bits(a) == bits(b) for a, b in zip(ours.state_dict().values(), plain.state_dict().values(), strict=True))
    first = scaler()
    model = make(0.25, grad_scaler=first)
    for scale in (8.0, 64.0):
        first.load_state_dict(first.state_dict() | {"scale": scale})
        x, d = batch(0)
        model.zero_grad()
        first.scale((model(x) * d).sum()).backward()
        assert model[0].scales.factors(model[0].weight).chosen_outputs == scale


def test_a_copied_model_follows_the_scaler():
    own = scaler()
    model = copy.deepcopy(make(0.25, grad_scaler=own))
    own.scale(torch.ones(()))
    own.update(4.0)
    assert model[0].scales.factors(model[0].weight).chosen_outputs == 4.0
