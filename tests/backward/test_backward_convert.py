"""gradwire.backward.convert and revert: which layers change, by which name, and what stays as it is."""

from __future__ import annotations

import copy
import functools
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import gradwire
from gradwire.backward import convert, converted, forget, revert
from gradwire.errors import GradwireError, SpecError
from support.cases import for_each
from support.helpers import bits


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.blocks = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(torch.relu(self.first(x))))


def step(model: nn.Module, seed: int = 0, rows: int = 10, inputs: int = 6) -> None:
    model.zero_grad()
    model(torch.randn(rows, inputs, generator=torch.Generator().manual_seed(seed))).square().sum().backward()


def gradients(model: nn.Module) -> dict[str, bytes]:
    return {name: bits(p.grad) for name, p in model.named_parameters()}


def kinds(model: nn.Module) -> list[type]:
    return [type(module) for module in model.modules()]


def test_layers_change_in_place_and_back():
    model = Net()
    before, modules, parameters = kinds(model), list(model.modules()), list(model.parameters())
    state, called = copy.deepcopy(model.state_dict()), []
    model.head.register_forward_hook(lambda *_: called.append(1))
    attributes = [set(vars(module)) for module in modules]
    exact = Net()
    exact.load_state_dict(state)
    step(exact)

    assert convert(model, 0.25) is model
    assert all(isinstance(layer, nn.Linear) for layer in converted(model).values())
    assert list(converted(model)) == ["first", "blocks.0", "blocks.2", "head"]
    assert "k=0.25, policy=topk, decay=1.0" in repr(model.first)
    step(model)
    assert called and gradients(model) != gradients(exact)
    assert sorted(set(model.state_dict()) - set(state))[:2] == [
        "blocks.0.weight_memory_inputs", "blocks.0.weight_memory_outputs",
    ]  # fmt: skip

    assert revert(model) is model
    assert kinds(model) == before and not converted(model)
    assert all(a is b for a, b in zip(modules, model.modules(), strict=True))
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert [set(vars(module)) for module in modules] == attributes
    assert list(model.state_dict()) == list(state)
    step(model)
    assert gradients(model) == gradients(exact)
    revert(model)


def test_evaluation_is_exact():
    model, plain = Net(), Net()
    plain.load_state_dict(model.state_dict())
    convert(model, 1).eval()
    step(model), step(plain)
    assert gradients(model) == gradients(plain)
    assert converted(model)["head"].memory.inputs is None
    model.train()
    with torch.no_grad():
        assert bits(model(torch.ones(2, 6))) == bits(plain(torch.ones(2, 6)))
    model.requires_grad_(False)
    assert model(torch.ones(2, 6, requires_grad=True)).requires_grad
    assert converted(model)["head"].memory.inputs is None


def test_shapes_alone():
    """Models on the meta device are run to count parameters and operations."""
    model = convert(Net().to("meta"), 0.25)
    model(torch.empty(7, 6, device="meta")).sum().backward()
    assert model.head.weight.grad.shape == (3, 8) and model.head.memory.bytes == 0


def test_names():
    model = convert(Net(), {"head": None, "blocks.*": 0.25, "*": 3})
    assert {name: layer.choice.k for name, layer in converted(model).items()} == {
        "first": 3, "blocks.0": 0.25, "blocks.2": 0.25,
    }  # fmt: skip
    assert type(model.head) is nn.Linear
    convert(model, {"blocks.*": None, "head": 1.0})  # "first" is matched by nothing, and exact again
    assert list(converted(model)) == ["head"]
    convert(model, {"*": 0.5, "head": None})
    assert len(converted(model)) == 4, "the first pattern that matches counts"
    convert(model, {"head": None, "blocks.*": None, "first": 2, "*": 0.5})
    assert list(converted(model)) == ["first"], "a last resort need not be used"
    assert list(converted(convert(nn.Linear(2, 2), 1))) == [""]


def test_a_layer_with_two_names_is_one_layer():
    model = Net()
    model.again = model.first
    convert(model, {"again": 2, "first": 3, "*": None})
    assert model.first.choice.k == 2 and list(converted(model)) == ["first"]


def test_which_layers():
    class Own(nn.Linear):
        pass

    model = nn.ModuleDict({
        "linear": nn.Linear(2, 2), "own": Own(2, 2), "bilinear": nn.Bilinear(2, 2, 2),
        "attention": nn.MultiheadAttention(2, 1), "complex": nn.Linear(2, 2, dtype=torch.complex64),
        "one": nn.Conv1d(2, 2, 1), "two": nn.Conv2d(2, 2, (1, 1), stride=2),
        "three": nn.Conv3d(2, 2, 1, dilation=2), "same": nn.Conv2d(2, 2, 1, padding="same"),
        "wide": nn.Conv2d(2, 2, (1, 3)), "padded": nn.Conv2d(2, 2, 1, padding=1),
        "groups": nn.Conv1d(2, 2, 1, groups=2), "transposed": nn.ConvTranspose2d(2, 2, 1),
    })  # fmt: skip
    model["patched"] = nn.Linear(2, 2)
    model["patched"].forward = lambda x: x
    assert list(converted(convert(model, 1))) == ["linear", "one", "two", "three", "same"]


def test_complex_rows_are_refused():
    weight = torch.randn(2, 2, dtype=torch.complex64, requires_grad=True)
    with pytest.raises(GradwireError, match="complex"):
        gradwire.backward.linear(torch.randn(3, 2, dtype=torch.complex64), weight, k=1)


def test_converting_twice_keeps_memories():
    model = convert(Net(), 0.25)
    step(model)
    memories = [bits(layer.memory.inputs) for layer in converted(model).values()]
    convert(model, 2, "randk", decay=0.5)
    assert [bits(layer.memory.inputs) for layer in converted(model).values()] == memories
    assert {(layer.choice.k, layer.choice.policy, layer.memory.decay) for layer in converted(model).values()} == {
        (2, "randk", 0.5)
    }
    convert(model, 2, memory_dtype=torch.bfloat16)
    size = model.head.memory.bytes
    step(model)
    assert model.head.memory.bytes == size // 2
    forget(model)
    assert all(layer.memory.bytes == 0 for layer in converted(model).values())
    convert(model, 2, decay=0)
    step(model)
    assert all(layer.memory is None for layer in converted(model).values())
    forget(model)
    assert not [key for key in model.state_dict() if "memory" in key]


@for_each(
    ("options", "message"),
    [
        ({"k": 0}, "at least one row"),
        ({"k": -3}, "at least one row"),
        ({"k": 0.0}, "above 0 and at most 1"),
        ({"k": 1.5}, "a number of rows is an int"),
        ({"k": float("nan")}, "above 0"),
        ({"k": True}, "number of rows"),
        ({"k": "4"}, "number of rows"),
        ({"k": {"head": 0}}, "at least one row"),
        ({"k": 1, "policy": "topp"}, "topk"),
        ({"k": 1, "policy": None}, "policy"),
        ({"k": 1, "decay": -0.1}, "decay=-0.1"),
        ({"k": 1, "decay": 1.1}, "0 .no memory. to 1"),
        ({"k": 1, "decay": float("nan")}, "decay"),
        ({"k": 1, "decay": "1"}, "decay='1'"),
        ({"k": 1, "memory_dtype": torch.float16}, "torch.bfloat16"),
        ({"k": 1, "memory_dtype": torch.int8, "decay": 0}, "torch.bfloat16"),
        ({"k": {"block.*": 1, "*": 2}}, "no layer has a name like 'block.*'"),
        ({"k": {"blocks": 1}}, "there are: first, blocks.0, blocks.2, head"),
        ({"k": 1, "grad_scaler": 1024.0}, "GradScaler"),
        ({"k": 1, "optimizer": "sgd"}, "leave optimizer= out"),
    ],
)
def test_what_cannot_be_done_changes_nothing(options, message):
    model = Net()
    with pytest.raises(SpecError) as raised:
        convert(model, **options)
    assert message.replace(".no memory.", "(no memory)") in str(raised.value)
    assert not converted(model)
    convert(model, 0.5)
    step(model)
    before = {name: (layer.choice, bits(layer.memory.inputs)) for name, layer in converted(model).items()}
    with pytest.raises(SpecError):
        convert(model, **options)
    assert {name: (layer.choice, bits(layer.memory.inputs)) for name, layer in converted(model).items()} == before


def test_models_without_such_layers():
    with pytest.raises(GradwireError, match="nothing to convert"):
        convert(nn.Sequential(nn.ReLU(), nn.Conv2d(3, 4, 3)), 0.5)
    assert not converted(revert(nn.ReLU()))


def test_a_class_made_of_a_converted_one():
    """fully_shard and parametrizations make a class of their own: the choice can change, but not the class."""
    layer = convert(nn.Linear(4, 4), 2)
    nn.utils.parametrize.register_parametrization(layer, "bias", nn.Identity())
    step(layer, inputs=4)
    convert(layer, 3)
    assert layer.choice.k == 3 and layer.memory.inputs is not None
    for work in (revert, lambda model: convert(model, {"": None})):
        with pytest.raises(GradwireError, match="ParametrizedLinear was made of a converted layer"):
            work(layer)
    assert layer.choice.k == 3


@pytest.mark.thorough
def test_importing_gradwire_does_not_import_the_compiler():
    """It takes a second, which DDP and optimizers ask for themselves when they are used."""
    code = "import sys, gradwire.backward; sys.exit('torch._dynamo' in sys.modules)"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, env=dict(os.environ))


def test_converting_again_keeps_scaler_and_optimizer():
    layer, scaler = nn.Linear(6, 5), torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    convert(layer, 2, optimizer=optimizer, grad_scaler=scaler)
    x = torch.randn(8, 6)
    layer(x).sum().backward()
    kept = bits(layer.memory.inputs)
    convert(layer, 3)
    assert layer.scales.optimizer is optimizer and layer.scales.grad_scaler is scaler
    assert bits(layer.memory.inputs) == kept


def test_layers_converted_apart_keep_what_is_theirs():
    first, second = convert(nn.Linear(6, 5), 2), nn.Linear(5, 4)
    optimizer = torch.optim.SGD(second.parameters(), lr=0.1)
    convert(second, 2, optimizer=optimizer)
    model = nn.Sequential(first, second, nn.Linear(4, 4))
    model[:2](torch.randn(8, 6)).sum().backward()
    kept = bits(second.memory.inputs)
    convert(model, 3)
    assert [layer.scales.optimizer for layer in model] == [None, optimizer, None]
    assert bits(second.memory.inputs) == kept


def test_an_optimizer_that_got_momentum_can_be_left_behind():
    layer = nn.Linear(6, 5)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    convert(layer, 2, optimizer=optimizer)
    optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.raises(SpecError, match=r"gradwire\.backward\.revert\(model\) first"):
        convert(layer, 2)
    assert convert(revert(layer), 2).scales.optimizer is None


def test_a_replaced_forward_stays_in_use():
    layer = convert(nn.Linear(6, 5), 2)
    own = layer.forward
    layer.forward = functools.partial(own)
    with pytest.raises(GradwireError, match="put its own back before it is reverted"):
        revert(layer)
    layer(torch.randn(8, 6)).sum().backward()
    del layer.forward
    assert type(revert(layer)) is nn.Linear


def test_a_memory_in_other_units_is_dropped():
    layer = convert(nn.Linear(6, 5), 2)
    layer(torch.randn(8, 6)).sum().backward()
    convert(layer, 2, optimizer=torch.optim.SGD(layer.parameters(), lr=0.1))
    assert layer.memory.inputs is None


def test_centre_is_true_or_false():
    with pytest.raises(SpecError, match="True or False, not 'no'"):
        convert(nn.Linear(6, 5), 2, centre="no")
