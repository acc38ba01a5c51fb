"""Converted layers within what else trainings do: recomputation, compilers, hooks, layers that are used twice."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradwire
from gradwire.backward import convert, converted
from support.helpers import bits
from support.plain_rows import PlainRows, close


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Unflatten(1, (8, 1)), nn.Conv1d(8, 7, 1), nn.ReLU(inplace=True),
        nn.Flatten(), nn.Linear(7, 3),
    )  # fmt: skip


def batch(step: int) -> torch.Tensor:
    return torch.randn(10, 6, generator=torch.Generator().manual_seed(step))


def states(model: nn.Module, forward: object = None, steps: int = 3) -> list[dict[str, bytes]]:
    """Gradients and memories after each step of a training."""
    forward = forward or model
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5), []
    for step in range(steps):
        optimizer.zero_grad()
        forward(batch(step)).square().sum().backward()
        optimizer.step()
        gradients = {f"{name}.grad": bits(p.grad) for name, p in model.named_parameters()}
        found.append(gradients | {name: bits(t) for name, t in model.state_dict().items()})
    return found


@pytest.fixture(scope="module")
def expected() -> list[dict[str, bytes]]:
    return states(convert(make(), 0.25))


def test_it_is_not_the_exact_training(expected):
    """Otherwise the tests here would show nothing."""
    exact = states(make())
    assert all(
        exact[step][name] != expected[step][name] for step in range(3) for name in ("0.weight.grad", "6.weight.grad")
    )
    assert len(expected[0]) == 6 + 6 + 6 and any(expected[2]["3.weight_memory_outputs"])


def test_in_place_activations_behind_a_layer(expected):
    model = convert(make(), 0.25)
    model[1], model[4] = nn.ReLU(), nn.ReLU()
    assert states(model) == expected


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_activations(expected, reentrant):
    """The forward pass runs twice, the backward pass once: a row enters the memory once."""
    model = convert(make(), 0.25)
    assert states(model, lambda x: checkpoint(model, x.requires_grad_(), use_reentrant=reentrant)) == expected


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled(expected, backend):
    torch.compiler.reset()
    model = convert(make(), 0.25)
    assert states(model, torch.compile(model, backend=backend)) == expected
    torch.compiler.reset()


@pytest.mark.thorough
def test_converted_after_it_was_compiled(expected):
    torch.compiler.reset()
    model = make()
    compiled = torch.compile(model, backend="eager")
    compiled(batch(0))
    convert(compiled, 0.25)
    assert len(converted(model)) == 3
    assert states(model, compiled) == expected
    torch.compiler.reset()


def test_saved_tensors_elsewhere(expected):
    model = convert(make(), 0.25)

    def forward(x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.numpy(force=True).copy(), torch.from_numpy):
            return model(x)

    assert states(model, forward) == expected


def test_functional_calls_and_gradients_by_name(expected):
    model = convert(make(), 0.25)
    parameters = dict(model.named_parameters())
    loss = torch.func.functional_call(model, parameters, (batch(0),)).square().sum()
    gradients = torch.autograd.grad(loss, parameters.values())
    for name, gradient in zip(parameters, gradients, strict=True):
        assert bits(gradient) == expected[0][f"{name}.grad"]


@pytest.mark.parametrize("again", ["used twice", "backward twice", "two losses"])
def test_every_backward_pass_of_a_layer_is_a_batch(again):
    """Its products add up; the memory goes on from one to the next."""
    layer, plain = gradwire.backward.Linear(6, 5, k=3), PlainRows(6, 5)
    d = torch.randn(10, 5, generator=torch.Generator().manual_seed(9))
    one, two = batch(1), batch(2)
    if again == "used twice":
        (layer(one) * d + layer(two) * d).sum().backward()
        order = (two, one)  # autograd starts with what was computed last
    elif again == "backward twice":
        loss = (layer(one) * d).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        order = (one, one)
    else:
        (layer(one) * d).sum().backward()
        (layer(two) * d).sum().backward()
        order = (one, two)
    close(layer.weight.grad, sum(plain.gradient(x, d, 3) for x in order))
    close(layer.memory.inputs, plain.left()[0])


def test_a_graph_that_was_freed():
    """As in torch; and the memory does not go on."""
    layer = gradwire.backward.Linear(6, 5, k=3)
    loss = layer(batch(0)).sum()
    loss.backward()
    before = bits(layer.memory.inputs)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    assert bits(layer.memory.inputs) == before


def test_inputs_changed_in_place_are_noticed():
    layer, x = gradwire.backward.Linear(6, 5, k=3), batch(0)
    y = layer(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    assert layer.memory.inputs is None


@pytest.mark.parametrize("kind", ["linear", "convolution"])
def test_second_derivatives_are_refused(kind):
    layer = convert(nn.Linear(6, 6) if kind == "linear" else nn.Conv1d(10, 6, 1), 2)
    x = batch(0)[None] if kind == "convolution" else batch(0)
    loss = layer(x).pow(3).sum()
    (gradient,) = torch.autograd.grad(loss, layer.weight, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.square().sum().backward()


def test_transforms_are_refused_rather_than_wrong():
    layer = gradwire.backward.Linear(6, 5, k=3)
    parameters = dict(layer.named_parameters())

    def loss(values: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer, values, (x,)).square().sum()

    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(loss)(parameters, batch(0))
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, batch(0)[:, None])
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.vmap(layer)(batch(0)[:, None])
    with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError, match="forward mode AD"):
        layer(torch.autograd.forward_ad.make_dual(batch(0), batch(1)))
    layer.eval()  # exact, and torch's own
    assert set(torch.func.grad(loss)(parameters, batch(0))) == {"weight", "bias"}


def test_hooks_and_frozen_parts():
    layer = gradwire.backward.Linear(6, 5, k=3)
    seen: list[object] = []
    layer.register_full_backward_hook(lambda module, of_inputs, of_outputs: seen.append(of_outputs[0].shape))
    layer.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.shape))
    layer.bias.requires_grad_(False)
    layer(batch(0).requires_grad_()).sum().backward()
    assert seen == [(5, 6), (10, 5)]
    assert layer.bias.grad is None


def test_tied_weights_have_a_memory_for_each_layer():
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6, bias=False))
    model[1].weight = model[0].weight
    convert(model, 2)
    model(batch(0)).square().sum().backward()
    memories = [layer.memory for layer in converted(model).values()]
    assert len(memories) == 2 and bits(memories[0].inputs) != bits(memories[1].inputs)


def test_copies_have_memories_of_their_own():
    model = convert(make(), 0.25)
    states(model, steps=1)
    other = copy.deepcopy(model)
    before = {name: bits(t) for name, t in other.state_dict().items()}
    states(model, steps=1)
    assert {name: bits(t) for name, t in other.state_dict().items()} == before
    assert bits(other[0].memory.inputs) != bits(model[0].memory.inputs)
