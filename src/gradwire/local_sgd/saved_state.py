"""The state of a LocalSGD as a checkpoint has it: read and checked as a whole, before anything is taken over."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gradwire.aggregate.messages.model_recipes import ModelRecipes
from gradwire.catalogue.saved_recipes import check_same_kind, check_saved_recipes
from gradwire.checkpoints.saved_values import MOST_STEPS, count_in
from gradwire.correct.saved_memories import SavedMemories, read_memories
from gradwire.errors import CheckpointError
from gradwire.local_sgd.common_parameters import CommonParameters

Tensors = Mapping[str, torch.Tensor]
LARGEST_SETTING = 1e9  # of an optimizer: learning rates and the like


@dataclass(frozen=True)
class SavedLocalSGD:
    """What was saved; its tensors may still be the caller's, and are to be copied."""

    memories: SavedMemories
    anchor: Tensors
    buffers: Tensors
    outer: dict[str, Any]  # a copy: torch would go on writing to the caller's tensors
    local_steps: int
    pending: int
    following: int  # the part whose turn is next
    unsent: list[int]  # steps of each part
    under_way: Mapping[str, Any] | None
    inside: bool


def read_state(
    state: Any, recipes: ModelRecipes, common: CommonParameters, buffers: Tensors, parts: Sequence[Sequence[str]]
) -> SavedLocalSGD:
    """Return a saved state; CheckpointError unless it fits these parameters, buffers, recipes, parts and optimizer."""
    anchor = common.tensors
    for key, own in (("anchor", anchor), ("buffers", buffers)):
        saved = state.get(key) if isinstance(state, Mapping) else None
        if not isinstance(saved, Mapping) or set(saved) != set(own):
            raise CheckpointError(f"not the state of a LocalSGD of this model: its {key!r} do not fit")
        for name, tensor in own.items():
            if not _is_like(saved[name], tensor):
                raise CheckpointError(f"not the state of a LocalSGD of this model: its {key!r} do not fit ({name})")
    for name, tensor in state["anchor"].items():  # buffers may hold infinities
        if not bool(torch.isfinite(tensor.to(anchor[name].dtype)).all()):
            raise CheckpointError(f"the common parameters {name!r} in this state are not finite: it is damaged")
    shapes = {name: tensor.shape for name, tensor in anchor.items()}
    memories = read_memories(state, set(anchor), shapes, torch.float32)
    if memories.shards:
        raise CheckpointError("not the state of a LocalSGD: it has error memories of shards")
    if memories.accelerated:
        raise CheckpointError("not the state of a LocalSGD: it has velocities, which are the optimizer's there")
    check_saved_recipes(state, recipes.by_pattern, memories.remembered, {})
    check_same_kind(state, recipes.by_pattern, recipes.sizes)
    inside = state.get("inside")
    if not isinstance(inside, bool):
        raise CheckpointError("not the state of a LocalSGD: it does not say whether it was saved in the block")
    pending = count_in(state, "pending")
    following, unsent = _read_parts(state.get("parts"), pending, len(parts))
    return SavedLocalSGD(
        memories, state["anchor"], state["buffers"], checked_outer(state.get("outer"), common.outer),
        count_in(state, "local_steps"), pending, following, unsent,
        _read_under_way(state.get("under_way"), anchor, parts), inside,
    )  # fmt: skip


def _read_parts(saved: Any, pending: int, parts: int) -> tuple[int, list[int]]:
    """Return the part whose turn is next, and the steps that each part has not sent.

    States of before there were parts have none. Between two rounds, where nothing is unsent, any number of parts fits.
    """
    if saved is None:
        saved = {"next": 0, "unsent": [pending]}
    damaged = CheckpointError("not the state of a LocalSGD: its 'parts' are damaged")
    if not isinstance(saved, Mapping) or not isinstance(saved.get("unsent"), list) or not saved["unsent"]:
        raise damaged
    unsent = saved["unsent"]
    if not all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n <= MOST_STEPS for n in unsent):
        raise damaged
    following = count_in(saved, "next")
    if following >= len(unsent):
        raise damaged
    if len(unsent) == parts:
        return following, list(unsent)
    if following or any(unsent):
        raise CheckpointError(
            f"this state was saved in the middle of a round with parts={len(unsent)}: build LocalSGD with as many"
        )
    return 0, [0] * parts


def _read_under_way(saved: Any, anchor: Tensors, parts: Sequence[Sequence[str]]) -> Mapping[str, Any] | None:
    """Return what is left to be done with an exchange, as it was saved."""
    if saved is None:
        return None
    damaged = CheckpointError("not the state of a LocalSGD of this model and these parts: 'under_way' does not fit")
    if not isinstance(saved, Mapping):
        raise damaged
    part, due, start = count_in(saved, "part"), count_in(saved, "due"), saved.get("start")
    if part >= len(parts) or not isinstance(start, Mapping) or set(start) not in (set(), set(parts[part])):
        raise damaged
    if not all(_is_like(t, anchor[name]) and bool(torch.isfinite(t).all()) for name, t in start.items()):
        raise damaged
    if not all(isinstance(saved.get(key), bool) for key in ("diverged", "moves")) or (saved["diverged"] and start):
        raise damaged
    names = saved.get("buffers")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise damaged
    return {**saved, "part": part, "due": due}


def _is_like(saved: Any, own: torch.Tensor) -> bool:
    return (
        isinstance(saved, torch.Tensor)
        and saved.layout == torch.strided
        and not saved.is_meta
        and saved.is_floating_point()
        and saved.shape == own.shape
    )


def checked_outer(saved: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return a copy of a saved state of this optimizer; CheckpointError if it is not of one with these parameters.

    torch takes over whatever a state holds, and would fail in the next step, or compute nonsense.
    """
    own = optimizer.state_dict()
    error = CheckpointError("the state of the outer optimizer does not fit: build LocalSGD with the same `outer`")
    if not isinstance(saved, Mapping) or not isinstance(saved.get("state"), Mapping):
        raise error
    groups = saved.get("param_groups")
    if not isinstance(groups, list) or len(groups) != len(own["param_groups"]):
        raise error
    filled = []
    for group, present in zip(groups, own["param_groups"], strict=True):
        if not isinstance(group, Mapping) or not set(group) <= set(present):
            raise error
        numbers = group.get("params")
        if (
            not isinstance(numbers, list)
            or not all(isinstance(n, int) for n in numbers)
            or numbers != present["params"]
        ):
            raise error
        if not all(_is_setting(group[key], present[key]) for key in group if key != "params"):
            raise error
        filled.append({**present, **group})  # versions of torch differ in what a group holds
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, values in saved["state"].items():
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < len(parameters):
            raise error
        if not isinstance(values, Mapping) or not all(
            _is_value(key, v, parameters[number]) for key, v in values.items()
        ):
            raise error
    state = {
        number: {
            key: v.detach().contiguous().clone() if isinstance(v, torch.Tensor) else v for key, v in values.items()
        }
        for number, values in saved["state"].items()
    }
    return {"state": state, "param_groups": copy.deepcopy(filled)}


def _is_setting(saved: Any, present: Any) -> bool:
    """Tell whether a setting of an optimizer may have this value: a number where there is one now, and so on."""
    if saved is None or present is None:  # a choice that is left to torch, such as `foreach`
        return all(value is None or isinstance(value, bool) for value in (saved, present))
    if isinstance(present, bool) or isinstance(saved, bool):
        return type(saved) is type(present)
    if isinstance(present, int | float):
        return isinstance(saved, int | float) and 0 <= saved <= LARGEST_SETTING
    return type(saved) is type(present)


def _is_value(key: Any, saved: Any, parameter: torch.Tensor) -> bool:
    """Tell whether an optimizer may remember this of a parameter: its steps, or a tensor of the parameter's shape."""
    if not isinstance(key, str) or saved is None:
        return isinstance(key, str)
    if isinstance(saved, torch.Tensor):
        shape = torch.Size([]) if key == "step" else parameter.shape
        fits = saved.layout == torch.strided and not saved.is_meta and saved.is_floating_point()
        return fits and saved.shape == shape and bool(torch.isfinite(saved.to(parameter.dtype)).all())
    return key == "step" and isinstance(saved, int | float) and 0 <= saved <= MOST_STEPS
