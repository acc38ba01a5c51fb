"""From the linear layers of a model to layers that choose rows, and back, in place."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

import torch
from torch import nn

from gradwire.backward import layers
from gradwire.backward.layers import ChosenRows
from gradwire.backward.row_choice import Choice
from gradwire.backward.row_memory import RowMemory
from gradwire.backward.row_scales import LossScaler, Scales
from gradwire.errors import GradwireError, SpecError

# Subclasses are left alone: their forward may be their own.
CONVERTED: dict[type[nn.Module], type[ChosenRows]] = {
    nn.Linear: layers.Linear,
    nn.Conv1d: layers.Conv1d,
    nn.Conv2d: layers.Conv2d,
    nn.Conv3d: layers.Conv3d,
}
PLAIN: dict[type[nn.Module], type[nn.Module]] = {new: old for old, new in CONVERTED.items()}

K = int | float | None


def convert(
    model: nn.Module, k: K | Mapping[str, K], policy: str = "topk", decay: float = 1.0, *,
    centre: bool = True, optimizer: torch.optim.Optimizer | None = None, grad_scaler: LossScaler | None = None,
    memory_dtype: torch.dtype | None = None,
) -> nn.Module:  # fmt: skip
    """Let linear layers and 1×1 convolutions of `model` make their weight gradients from k rows of a batch.

    The layers change in place; parameters, hooks and names stay what they are. Calling it again changes the choice, and
    keeps memories, optimizer and scaler; `revert` goes back.

    - `k`: rows, as a number (32) or as a share of the batch (0.25); or by name, the first pattern that matches
      counts, and None leaves a layer exact: `{"head": None, "*": 0.25}`.
    - `policy`: `"topk"`, `"weightedk"` or `"randk"`.
    - `decay`: what is kept of the memory from batch to batch; 0 remembers nothing.
    - `centre`: the mean of a batch's inputs goes through exactly, and rows are chosen and remembered less that mean;
      False is as in the paper.
    - `optimizer`: the paper's form, for SGD without momentum: what is remembered counts with the learning rate of its
      own time.
    - `grad_scaler`: the `torch.amp.GradScaler` of the training, if it has one.
    - `memory_dtype`: torch.bfloat16 halves the memory; fp32 by default.
    """
    if not isinstance(decay, int | float) or not 0 <= decay <= 1:
        raise SpecError(f"decay={decay!r}: give a number from 0 (no memory) to 1")
    wanted = k if isinstance(k, Mapping) else {"*": k}
    choices = {
        pattern: Choice(value, policy, centre) if value is not None else None for pattern, value in wanted.items()
    }
    RowMemory(decay or 1.0, memory_dtype)  # a SpecError now, not after some layers have changed
    candidates = _candidates(model)
    if not candidates:
        raise GradwireError(
            "the model has no torch.nn.Linear and no 1×1 convolution: there is nothing to convert (subclasses are left "
            "alone, so are layers whose forward was replaced, and lazy layers until a batch has gone through them)"
        )
    unused = sorted(p for p in choices if not any(_matches(names, p) for names, _ in candidates))
    if unused:
        near = ", ".join(names[0] or "the model itself" for names, _ in candidates[:8])
        raise SpecError(f"no layer has a name like {', '.join(map(repr, unused))}; there are: {near}")
    plan = [(layer, next((choices[p] for p in choices if _matches(names, p)), None)) for names, layer in candidates]
    scales = _scales([layer for _, layer in candidates], optimizer, grad_scaler)
    _back([layer for layer, choice in plan if choice is None])
    for layer, choice in plan:
        if choice is None:
            continue
        memory, layer_scales = RowMemory(decay, memory_dtype) if decay else None, scales[id(layer)]
        if memory and isinstance(layer, ChosenRows) and layer.memory:
            before, old = layer.memory, layer.scales
            same_form = (old.optimizer is None) == (layer_scales.optimizer is None)  # otherwise rows are in other units
            if same_form and before.inputs is not None and before.outputs is not None:
                memory.load(before.inputs, before.outputs)
        layer.__class__ = CONVERTED.get(type(layer), type(layer))
        layer.choose(choice, memory, layer_scales)  # type: ignore[operator]
    return model


def revert(model: nn.Module) -> nn.Module:
    """Give converted layers their exact weight gradients back; what they remember is dropped."""
    _back(list(model.modules()))
    return model


def converted(model: nn.Module) -> dict[str, ChosenRows]:
    """The layers of `model` that choose rows, by name: `.choice`, `.memory.bytes`."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, ChosenRows)}


def forget(model: nn.Module) -> None:
    """Empty the memories of all layers."""
    for layer in converted(model).values():
        if layer.memory:
            layer.memory.clear()


def _scales(
    layers: list[nn.Module], optimizer: torch.optim.Optimizer | None, grad_scaler: LossScaler | None
) -> dict[int, Scales]:
    """By id of the layer. What is not given stays as it was; new layers get what the first converted one has."""
    first = next((layer.scales for layer in layers if isinstance(layer, ChosenRows)), Scales())
    made: dict[tuple[int, int], Scales] = {}  # layers share them, and with them what is known of the scaler
    by_layer = {}
    for layer in layers:
        old = layer.scales if isinstance(layer, ChosenRows) else first
        wanted = optimizer or old.optimizer, grad_scaler or old.grad_scaler
        key = id(wanted[0]), id(wanted[1])
        if key not in made:
            made[key] = Scales(*wanted)
        by_layer[id(layer)] = made[key]
    return by_layer


def _back(layers: list[nn.Module]) -> None:
    for layer in layers:
        if isinstance(layer, ChosenRows) and "forward" in vars(layer):
            raise GradwireError(
                "the forward of a converted layer was replaced: put its own back before it is reverted, or convert "
                "with k=1.0 and decay=0, which is exact"
            )
        if isinstance(layer, ChosenRows) and type(layer) not in PLAIN:
            raise GradwireError(
                f"{type(layer).__name__} was made of a converted layer (by fully_shard, a parametrization or a class "
                "statement): revert before that is done, or convert with k=1.0 and decay=0, which is exact"
            )
    for layer in layers:
        if type(layer) in PLAIN:
            layer.__class__ = PLAIN[type(layer)]
            del layer.choice, layer.memory, layer.scales


def _matches(names: list[str], pattern: str) -> bool:
    return any(fnmatchcase(name, pattern) for name in names)


def _candidates(model: nn.Module) -> list[tuple[list[str], nn.Module]]:
    """Layers that can be converted or are, each once, with all their names."""
    layers_by_id: dict[int, tuple[list[str], nn.Module]] = {}
    for name, layer in model.named_modules(remove_duplicate=False):
        if (type(layer) in CONVERTED and _is_linear(layer)) or isinstance(layer, ChosenRows):
            layers_by_id.setdefault(id(layer), ([], layer))[0].append(name)
    return list(layers_by_id.values())


def _is_linear(layer: nn.Module) -> bool:
    if "forward" in vars(layer):  # somebody has put their own in its place
        return False
    if layer.weight.is_complex():  # type: ignore[operator]
        return False
    if isinstance(layer, nn.Linear):
        return True
    assert isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    padded = not isinstance(layer.padding, str) and any(layer.padding)  # "same" and "valid" are none here
    return set(layer.kernel_size) == {1} and not padded and layer.groups == 1
