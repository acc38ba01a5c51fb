"""What layers remember: over batches of other sizes and accumulated gradients, in checkpoints, on other devices."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

import gradwire
from gradwire.backward import RowMemory, convert, converted, forget
from gradwire.errors import GradwireError
from support.cases import for_each
from support.helpers import bits, check_same
from support.plain_rows import PlainRows, close


def rows(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * count + seed)
    sizes = torch.rand(count, 1, generator=generator)
    return torch.randn(count, 6, generator=generator) * sizes, torch.randn(count, 5, generator=generator)


@pytest.mark.parametrize("k", [3, 0.3])
def test_batches_of_other_sizes(k):
    """A shorter batch uses the first slots and the others wait; a longer one adds slots; an empty one does nothing."""
    layer, plain = gradwire.backward.Linear(6, 5, k=k, decay=0.8), PlainRows(6, 5, 0.8)
    for step, size in enumerate((8, 5, 0, 8, 12, 1, 2, 12, 7, 0, 12)):
        x, d = rows(size, step)
        waiting = None if layer.memory.inputs is None else layer.memory.inputs[size:].clone()
        layer.zero_grad()
        layer(x).backward(d)
        close(layer.weight.grad, plain.gradient(x, d, layer.choice.count(size)))
        for ours, theirs in zip((layer.memory.inputs, layer.memory.outputs), plain.left(), strict=True):
            close(ours, theirs)
        if waiting is not None:
            assert bits(layer.memory.inputs[size:][: len(waiting)]) == bits(waiting)
    assert len(layer.memory.inputs) == 12


@pytest.mark.parametrize("kind", ["linear", "time", "convolution"])
def test_an_empty_batch_is_as_in_torch(kind):
    x = {"linear": (0, 6), "time": (0, 3, 6), "convolution": (0, 6, 4)}[kind]
    plain = nn.Conv1d(6, 5, 1) if kind == "convolution" else nn.Linear(6, 5)
    layer = convert(copy.deepcopy(plain), 0.5)
    for model in (plain, layer):
        model(torch.zeros(x)).sum().backward()
    check_same(layer.weight.grad + 0.0, plain.weight.grad + 0.0)
    check_same(layer.bias.grad, plain.bias.grad)


def test_a_layer_without_outputs_or_inputs():
    for inputs, outputs in ((6, 0), (0, 5)):
        plain = nn.Linear(inputs, outputs)
        layer = convert(copy.deepcopy(plain), 2)
        for model in (plain, layer):
            model(torch.ones(4, inputs)).sum().backward()
        assert layer.weight.grad.shape == plain.weight.grad.shape and not layer.weight.grad.any()


@for_each("policy", ["topk", "weightedk", "randk"])
@for_each("centre", [True, False])
def test_rows_without_a_gradient_do_not_pile_up(policy, centre):
    """Padding: it has the same slots in every batch, until a batch comes that has none."""
    layer = gradwire.backward.Linear(6, 5, bias=False, k=4, policy=policy, centre=centre)
    for step in range(200):
        x, d = rows(16, step)
        x[12:], d[12:] = 1.0, 0.0
        layer(x).backward(d)
        assert not layer.memory.inputs[12:].any()
    layer.zero_grad()
    x, d = rows(16, 200)
    forgotten = copy.deepcopy(layer)
    forgotten.memory.inputs[12:], forgotten.memory.outputs[12:] = 0.0, 0.0
    for each in (layer, forgotten):
        torch.manual_seed(0)
        each.zero_grad()
        each(x).backward(d)
    check_same(layer.weight.grad, forgotten.weight.grad)


@pytest.mark.parametrize("centre", [True, False])
def test_padding_is_as_if_it_were_not_there(centre):
    padded = gradwire.backward.Linear(6, 5, bias=False, k=2, centre=centre)
    alone = copy.deepcopy(padded)
    for step in range(20):
        x, d = rows(8, step)
        x[5:], d[5:] = 3.0, 0.0
        for layer, count in ((padded, 8), (alone, 5)):
            layer.zero_grad()
            layer(x[:count]).backward(d[:count])
        close(padded.memory.inputs[:5], alone.memory.inputs.double().numpy())
        close(padded.weight.grad, alone.weight.grad.double().numpy())


def test_padding_leaves_what_a_slot_holds_as_it_was():
    """It is of other rows in every batch."""
    layer, plain = gradwire.backward.Linear(6, 5, bias=False, k=2, decay=0.9), PlainRows(6, 5, 0.9)
    for step in range(20):
        x, d = rows(8, step)
        away = torch.arange(8) % 4 == step % 4
        x[away], d[away] = 3.0, 0.0
        layer.zero_grad()
        layer(x).backward(d)
        close(layer.weight.grad, plain.gradient(x, d, 2))
        for ours, theirs in zip((layer.memory.inputs, layer.memory.outputs), plain.left(), strict=True):
            close(ours, theirs)


def test_padding_does_not_outgrow_half_precision():
    layer = gradwire.backward.Linear(4, 1, bias=False, k=2, dtype=torch.float16)
    x, d = torch.zeros(4, 4).half(), torch.tensor([[1.0], [1.0], [1.0], [0.0]]).half()
    x[0], x[3] = 1.0, 200.0  # 218 times the last one is more than fp16 can hold
    for _ in range(400):
        layer.zero_grad()
        layer(x).backward(d)
        assert layer.weight.grad.isfinite().all()


def test_accumulated_gradients():
    """Every backward pass takes from the memory and puts back; the products add up until the step."""
    layer, plain = gradwire.backward.Linear(6, 5, k=3), PlainRows(6, 5)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        batches = [rows(8 - (micro == 3), 10 * step + micro) for micro in range(4)]
        for x, d in batches:
            layer(x).backward(d / 4)
        close(layer.weight.grad, sum(plain.gradient(x, d / 4, 3) for x, d in batches))
        optimizer.step()
    close(layer.memory.outputs, plain.left()[1])


def test_one_memory_is_of_one_layer():
    memory = RowMemory()
    for outputs in (5, 1):
        weight = torch.randn(outputs, 6, requires_grad=True)
        y = gradwire.backward.linear(rows(8, 0)[0], weight, k=2, memory=memory)
        if outputs == 5:
            y.sum().backward()
    with pytest.raises(GradwireError, match="a RowMemory belongs to one weight"):
        y.sum().backward()


# ── state_dict ────────────────────────────────────────────────────────────────────────────────────


def make(k: object = 0.25, seed: int = 0, **options: object) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))
    return convert(model, k, **options) if k else model


def train(model: nn.Module, steps: range, size: int = 12) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in steps:
        optimizer.zero_grad()
        x, d = rows(size, step)
        dtype = next(model.parameters()).dtype
        (model(x.to(dtype)) * d.to(dtype)).sum().backward()
        optimizer.step()


def state(model: nn.Module) -> dict[str, bytes]:
    return {name: bits(tensor) for name, tensor in model.state_dict().items()}


def saved(model: nn.Module) -> dict[str, torch.Tensor]:
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def test_a_training_goes_on_bit_for_bit():
    model, other = make(), make(seed=1)
    train(model, range(3))
    checkpoint = saved(model)
    assert list(checkpoint) == [
        f"{layer}.{name}" for layer in "02"
        for name in ("weight", "bias", "weight_memory_inputs", "weight_memory_outputs")
    ]  # fmt: skip
    train(other, range(7, 9), size=20)  # its own memory, which is longer, gives way
    other.load_state_dict(checkpoint, strict=True)
    assert state(other) == state(model)
    train(model, range(3, 6)), train(other, range(3, 6))
    assert state(other) == state(model)
    lost = make()
    lost.load_state_dict(checkpoint)
    forget(lost)
    train(lost, range(3, 6))
    assert state(lost) != state(model), "memory is part of the state"


def test_a_loaded_memory_is_not_shared():
    model, other = make(), make()
    train(model, range(2))
    other.load_state_dict(model.state_dict())
    before = state(model)
    train(other, range(2))
    assert state(model) == before


def test_plain_states_and_back():
    plain, model = make(None), make()
    train(model, range(2))
    assert not model.load_state_dict(plain.state_dict(), strict=True).unexpected_keys
    assert all(layer.memory.bytes == 0 for layer in converted(model).values())
    assert state(model) == state(plain)
    train(model, range(2))
    with pytest.raises(RuntimeError, match="weight_memory_inputs"):
        plain.load_state_dict(model.state_dict())
    plain.load_state_dict(model.state_dict(), strict=False)
    plain.load_state_dict(gradwire.backward.revert(model).state_dict())
    without = make(decay=0)
    without.load_state_dict(saved(convert(model, 0.5)))
    train(model, range(1)), without.load_state_dict(saved(model), strict=True)
    assert not [name for name in without.state_dict() if "memory" in name]


@for_each(
    ("inputs", "outputs"),
    [((3, 7), (3, 8)), ((3, 6), (4, 8)), ((3, 6), (3, 5)), ((6,), (8,)), ((), ()), ((0, 6), (3, 8)), ((3, 6), None)],
)
def test_memories_that_do_not_fit(inputs, outputs):
    model = make()
    train(model, range(1))
    before, bad = state(model), make().state_dict()
    bad["0.weight_memory_inputs"], bad["0.weight_memory_outputs"] = torch.zeros(inputs), torch.zeros(outputs or ())
    if outputs is None:
        del bad["0.weight_memory_outputs"]
    with pytest.raises(RuntimeError, match=r"0\.weight: its row memory .* rows of 6 as rows of 8"):
        model.load_state_dict(bad)
    memory = {name for name in before if name.startswith("0.weight_memory")}
    assert {name: value for name, value in state(model).items() if name in memory} == {n: before[n] for n in memory}


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1j])
def test_memories_that_are_no_finite_numbers(bad):
    """A row that is not finite never leaves the memory: every gradient from then on would be NaN."""
    model = make()
    train(model, range(1))
    before, checkpoint = state(model), saved(model)
    checkpoint["2.weight_memory_outputs"] = checkpoint["2.weight_memory_outputs"] + torch.tensor(bad)
    with pytest.raises(RuntimeError, match=r"2\.weight: its row memory .* take 2\.weight_memory_inputs and"):
        model.load_state_dict(checkpoint)
    assert state(model) == before


def test_other_dtypes_and_devices():
    model = make()
    train(model, range(2))
    exact = {name: layer.memory.inputs.double() for name, layer in converted(model).items()}
    model.double()
    train(model, range(0))
    for name, layer in converted(model).items():
        check_same(layer.memory.inputs.double(), exact[name])
    train(model, range(2, 3))
    assert {layer.memory.inputs.dtype for layer in converted(model).values()} == {torch.float64}
    model.to(torch.bfloat16)
    train(model, range(3, 4))
    assert {layer.memory.outputs.dtype for layer in converted(model).values()} == {torch.float32}
    narrow = make(memory_dtype=torch.bfloat16)
    narrow.load_state_dict(saved(model))
    train(narrow, range(4, 5))
    assert {layer.memory.inputs.dtype for layer in converted(narrow).values()} == {torch.bfloat16}
    model.to("meta")
    assert all(layer.memory.bytes == 0 for layer in converted(model).values())
    model.load_state_dict(saved(narrow), assign=True)
    assert state(model) == state(narrow)


def test_distributed_checkpoint():
    """The memory has a name that torch.distributed.checkpoint can follow."""
    model, other = make(), make(seed=1)
    train(model, range(3))
    checkpoint = get_model_state_dict(model)
    assert {name: bits(t) for name, t in checkpoint.items()} == state(model)
    set_model_state_dict(other, checkpoint, options=StateDictOptions(strict=True))
    assert state(other) == state(model)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    fresh = make(seed=2)
    set_model_state_dict(fresh, whole, options=StateDictOptions(full_state_dict=True))
    train(model, range(3, 5)), train(fresh, range(3, 5))
    assert state(fresh) == state(model)
