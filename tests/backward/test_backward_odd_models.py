"""Converted layers in the hands of other parts of torch: they behave as torch's own do, or say what to do."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils import parametrizations, prune
from torch.optim.swa_utils import AveragedModel

import gradwire
from gradwire import GradwireError
from gradwire.backward import convert, converted, forget, revert
from support.cases import for_each


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def gradients(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(x).square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def trained(k: float = 0.5) -> nn.Sequential:
    """With something in its memories."""
    model = convert(mlp(), k)
    gradients(model, torch.randn(4, 6))
    return model


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0)


# ── inputs ──


@pytest.mark.parametrize("layer", [nn.Linear(6, 4), nn.Conv1d(6, 4, 1)], ids=["linear", "conv"])
def test_inputs_by_their_name(layer):
    x = torch.randn(2, 6, 6)
    expected = layer(input=x)
    assert torch.equal(convert(layer, 0.5)(input=x), expected)


@pytest.mark.parametrize("shape", [(6,), (0, 6), (2, 0, 6)])
def test_few_rows(shape):
    layer = nn.Linear(6, 4)
    exact = gradients(layer, x := torch.randn(shape))
    assert_same(gradients(convert(layer, 0.5), x), exact)


def test_no_features():
    layer = convert(nn.Linear(0, 4), 0.5)
    assert gradients(layer, torch.randn(3, 0))["weight"].shape == (4, 0)


def test_nested_and_meta_tensors_are_exact():
    parts = [torch.randn(3, 6), torch.randn(2, 6)]
    plain, layer = nn.Linear(6, 4), convert(nn.Linear(6, 4), 0.5)
    layer.load_state_dict(plain.state_dict())
    for each in (plain, layer):
        each(torch.nested.nested_tensor(parts, layout=torch.jagged)).values().square().sum().backward()
    assert torch.equal(layer.weight.grad, plain.weight.grad)
    gradients(convert(mlp().to("meta"), 0.5), torch.randn(4, 6, device="meta"))


def test_sparse_inputs_are_exact():
    plain, layer, x = nn.Linear(6, 4), convert(nn.Linear(6, 4), 0.5), torch.eye(6).to_sparse()
    layer.load_state_dict(plain.state_dict())
    assert_same(gradients(layer, x), gradients(plain, x))


@pytest.mark.usefixtures("alone")
def test_layers_of_tensor_parallelism_are_exact():
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    models, x = [mlp(), convert(mlp(), 0.5)], torch.randn(8, 6)
    for model in models:
        parallelize_module(model, init_device_mesh("cpu", (1,)), plan)
    exact, ours = ({name: g.full_tensor() for name, g in gradients(model, x).items()} for model in models)
    assert_same(ours, exact)


def test_gradients_lie_in_memory_as_their_weights():
    """DistributedDataParallel warns of others."""
    layer = convert(nn.Conv2d(8, 5, 1).to(memory_format=torch.channels_last), 0.5)
    gradients(layer, torch.randn(2, 8, 4, 4).to(memory_format=torch.channels_last))
    assert layer.weight.grad.stride() == layer.weight.stride() != nn.Conv2d(8, 5, 1).weight.stride()


# ── weights that are computed ──


@pytest.mark.parametrize(
    "norm", [nn.utils.weight_norm, nn.utils.spectral_norm, lambda layer: prune.l1_unstructured(layer, "weight", 0.5)]
)
def test_weights_computed_by_hooks(norm: Callable[[nn.Module], nn.Module]):
    plain, model, x = mlp(), mlp(), torch.randn(4, 6)
    for each in (plain, model):
        torch.manual_seed(1)  # spectral norm starts at random
        norm(each[0])
    convert(model, 1.0)
    torch.testing.assert_close(gradients(model, x), gradients(plain, x))
    convert(model, 0.5)
    assert "0" in converted(model)
    gradients(model, x)
    assert model[0].memory.bytes


def test_a_parametrization_is_computed_once_a_step():
    """Spectral norm goes on by one iteration whenever somebody looks at the weight."""
    plain, model, x = mlp(), convert(mlp(), 0.5), torch.randn(4, 6)
    for each in (plain, model):
        torch.manual_seed(1)
        parametrizations.spectral_norm(each[0])
        each.double().float()
        for _ in range(2):
            gradients(each, x)
    iterated = [each[0].parametrizations.weight[0]._u for each in (plain, model)]
    assert torch.equal(*iterated)
    assert model[0].memory.bytes


def test_another_weight():
    model = trained()
    model[2] = nn.Linear(5, 3)
    model[0].weight, model[0].bias = nn.Parameter(torch.randn(5, 6)), None
    with pytest.raises(GradwireError, match=r"6 inputs and 8 outputs, but the rows have 6 and 5.*forget\(model\)"):
        gradients(model, torch.randn(4, 6))
    forget(model)
    gradients(model, torch.randn(4, 6))


def test_lazy_layers_are_converted_after_their_first_batch():
    model = nn.Sequential(nn.LazyLinear(8))
    with pytest.raises(GradwireError, match="lazy layers until a batch has gone through them"):
        convert(model, 0.5)
    model(torch.randn(4, 6))
    assert list(converted(convert(model, 0.5))) == ["0"]


# ── models that are copied, saved, cast and recorded ──


def test_a_saved_model_goes_on_where_it_was():
    model, x, file = trained(), torch.randn(4, 6), io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert_same(gradients(again, x), gradients(model, x))
    assert_same(again.state_dict(), model.state_dict())


@for_each("swap", [False, True], ids=["in place", "swapped"])
@for_each("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_memories_survive_a_change_of_dtype(dtype: torch.dtype, swap: bool):
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        model = trained()
        remembered = model[0].memory.inputs.clone()
        assert remembered.any()
        model.to(dtype)
        assert torch.equal(model[0].memory.inputs.float(), remembered)
        x = torch.randn(4, 6, dtype=dtype)
        assert gradients(model, x)["0.weight"].dtype == dtype
        assert model[0].memory.inputs.dtype == torch.promote_types(dtype, torch.float32)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def test_a_state_that_is_loaded_in_inference_mode():
    model = trained()
    with torch.inference_mode():
        model.load_state_dict(copy.deepcopy(model.state_dict()))
    gradients(model, torch.randn(4, 6))


def test_a_backward_pass_in_inference_mode():
    layer, x = convert(nn.Linear(6, 4), 2).double(), torch.randn(8, 6, dtype=torch.float64)  # fp64: the reference
    loss = layer(x).square().sum()
    with torch.inference_mode():
        loss.backward()
    layer.zero_grad()
    layer(x).square().sum().backward()
    assert layer.weight.grad.any()


def test_a_layer_without_parameters_can_be_moved():
    layer = convert(nn.Linear(6, 4, bias=False), 2)
    gradients(layer, torch.randn(8, 6))
    weight = layer.weight.detach()
    del layer.weight
    layer.weight = weight
    assert layer.double().memory.bytes


def test_an_average_of_models_has_its_own_memories():
    model, x = trained(), torch.randn(4, 6)
    average = AveragedModel(model)
    remembered = copy.deepcopy(average.module.state_dict())
    gradients(model, x)
    average.update_parameters(model)
    assert_same(average.module.state_dict(), remembered)


def test_recorded_graphs_are_exact():
    model, x = convert(mlp(), 0.5), torch.randn(4, 6)
    graph = torch.jit.trace(model, x)
    assert_same(gradients(graph, x), gradients(mlp(), x))
    assert not model[0].memory.bytes
    exported = torch.export.export(trained().eval(), (x,)).module()
    assert torch.equal(exported(x), mlp()(x))


def test_the_fast_path_of_a_transformer():
    torch.manual_seed(0)
    layer, x = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), torch.randn(4, 5, 8)
    plain = copy.deepcopy(layer).eval()
    assert list(converted(convert(layer, 0.5))) == ["linear1", "linear2"]  # attention calls no layer for its own
    gradients(layer, x)
    assert layer.linear1.memory.bytes
    layer.eval()
    with torch.no_grad():
        assert torch.equal(layer(x), plain(x))
    assert type(revert(layer).linear1) is nn.Linear


def test_replicas_of_data_parallel_would_share_a_memory():
    layer = gradwire.backward.Linear(6, 4, k=0.5)
    with pytest.raises(GradwireError, match="use DistributedDataParallel"):
        layer._replicate_for_data_parallel()
    gradwire.backward.Linear(6, 4, k=0.5, decay=0)._replicate_for_data_parallel()
