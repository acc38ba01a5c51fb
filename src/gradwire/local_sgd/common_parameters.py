"""The parameters that all ranks share under LocalSGD, and the outer optimizer that moves them (DiLoCo, 2311.08105)."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from gradwire.errors import SpecError, unknown_name

Outer = Callable[[list[torch.Tensor]], torch.optim.Optimizer]


def average(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    """Return an optimizer that moves parameters by the mean update as it is."""
    return torch.optim.SGD(parameters, lr=1.0)


def nesterov(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    """Return the outer optimizer that DiLoCo's authors recommend."""
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


NAMED: dict[str, Outer] = {"average": average, "nesterov": nesterov}


def outer_by_name(outer: Outer | str) -> Outer:
    """Return the maker of an outer optimizer, which may be given by its name; SpecError if it is neither."""
    if isinstance(outer, str):
        if outer not in NAMED:
            raise unknown_name("outer optimizer", outer, tuple(NAMED))
        return NAMED[outer]
    if not callable(outer):
        raise SpecError(f"outer must be {', '.join(NAMED)}, or a function from parameters to an optimizer: not {outer}")
    return outer


class CommonParameters:
    """The parameters of the last sync, in fp32 at least, and the state of the optimizer that moved them there.

    Every rank has them bit for bit: all begin with the same, and `move` is given the same means on all of them. It
    never looks at the model. The training's thread alone uses it; a round that fails has not called `move`.
    """

    def __init__(self, entries: Mapping[str, torch.Tensor], outer: Outer):
        self.tensors = {
            name: p.to(torch.promote_types(p.dtype, torch.float32), copy=True) for name, p in entries.items()
        }
        self.outer = outer(list(self.tensors.values()))
        if not isinstance(self.outer, torch.optim.Optimizer):
            raise SpecError(f"outer must return a torch.optim.Optimizer, not {type(self.outer).__name__}")

    def move(self, means: Mapping[str, torch.Tensor]) -> None:
        """Move these parameters by an outer step along the mean updates; all others stay where they are."""
        for name, mean in means.items():
            self.tensors[name].grad = -mean.to(self.tensors[name].dtype)
        try:
            self.outer.step()
        finally:
            for name in means:
                self.tensors[name].grad = None

    def take(self, name: str, entries: torch.Tensor) -> None:
        """Give a parameter other values, on all ranks alike; the optimizer's state stays."""
        self.tensors[name].copy_(entries)

    def outer_facts(self) -> Iterator[bytes]:
        """Yield bytes that differ where outer optimizers do, by their settings or by what they remember."""
        state = self.outer.state_dict()
        yield json.dumps([sorted(group.items()) for group in state["param_groups"]], default=str).encode()
        for number, values in sorted(state["state"].items()):
            for key, value in sorted(values.items()):
                yield f"{number} {key} ".encode()
                yield tensor_bytes(value) if isinstance(value, torch.Tensor) else repr(value).encode()

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the parameters, and of the optimizer's state."""
        return {
            "anchor": {name: a.detach().cpu().clone() for name, a in self.tensors.items()},
            "outer": copy.deepcopy(self.outer.state_dict()),
        }

    def load(self, tensors: Mapping[str, torch.Tensor], outer: dict[str, Any]) -> None:
        """Take over parameters and a state of the optimizer, which were checked."""
        for name, tensor in tensors.items():
            self.tensors[name].copy_(tensor)
        self.outer.load_state_dict(outer)


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor's entries, in row-major order."""
    return tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
