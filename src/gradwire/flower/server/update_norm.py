"""How long an update is: the Euclidean norm of its change, of parameters and of running statistics apart.

Running statistics of batch normalization follow the data and may change a thousand times as much as any parameter; in
one norm with these they would hide them. Integers, such as the counter of batches, are not measured, also after Flower
has made floats of them by averaging.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch

from gradwire.flower.shared.update import Tensors, is_statistic

PARAMETERS, RUNNING_STATISTICS = "parameters", "running statistics"
GROUPS = (PARAMETERS, RUNNING_STATISTICS)
COUNTERS = "*num_batches_tracked"


@dataclass(frozen=True)
class DeferredChange:
    """The change of a tensor that is not decoded yet: a bound of its norm, and a function that finds the norm out."""

    at_most: float
    measure: Callable[[], float]


class UpdateNorm:
    """The norm of one update, by group. What would take decoding is measured when somebody asks for it.

    `after` are tensors as the update leaves them, `deferred` the changes of others, `before` is the model without
    those tensors that do not count. It is used in the thread of the server app.
    """

    def __init__(self, after: Tensors, before: Tensors, deferred: Mapping[str, DeferredChange] | None = None):
        self._after = {name: tensor for name, tensor in after.items() if name in before}
        self._before = before
        self._deferred = {name: change for name, change in (deferred or {}).items() if name in before}
        self._changes: dict[str, float] = {}
        self._measured: dict[str, float] = {}

    def at_most(self, group: str) -> float:
        """Return a bound of the norm that takes no decoding."""
        return math.hypot(self._change(group), *(d.at_most for n, d in self._deferred.items() if _group(n) == group))

    def measured(self, group: str) -> float:
        """Return the norm. Raises a FrameError if a frame turns out to be forged."""
        if group not in self._measured:
            deferred = (d.measure() for name, d in self._deferred.items() if _group(name) == group)
            self._measured[group] = math.hypot(self._change(group), *deferred)
        return self._measured[group]

    def _change(self, group: str) -> float:
        """Return the norm of what is decoded already."""
        if group not in self._changes:
            after = {name: tensor for name, tensor in self._after.items() if _group(name) == group}
            self._changes[group] = math.hypot(*(_distance(t, self._before[name]) for name, t in after.items()))
        return self._changes[group]


def model_norms(model: Tensors) -> dict[str, float]:
    """Return the norm of a model's tensors by group, without infinities, such as those of a mask."""
    return {
        group: math.hypot(*(_finite_norm(t) for name, t in model.items() if _group(name) == group)) for group in GROUPS
    }


def counted(model: Tensors, integers: Collection[str]) -> dict[str, torch.Tensor]:
    """Return the tensors of a model whose changes are measured; `integers` are those that began as integers."""
    return {
        name: tensor
        for name, tensor in model.items()
        if tensor.is_floating_point() and name not in integers and not fnmatch.fnmatchcase(name, COUNTERS)
    }


def norm(tensor: torch.Tensor) -> float:
    """Return the Euclidean norm of a tensor, of infinities an infinity."""
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) if tensor.numel() else 0.0


def _finite_norm(tensor: torch.Tensor) -> float:
    length = norm(tensor)
    return length if math.isfinite(length) else norm(tensor[tensor.isfinite()])


def _distance(after: torch.Tensor, before: torch.Tensor) -> float:
    change = after.to(torch.promote_types(before.dtype, torch.float32)) - before
    if not math.isfinite(length := norm(change)):
        change[after == before] = 0  # ∞ − ∞ is NaN: entries such as those of a mask, which nobody changed
        length = norm(change)
    return length


def _group(name: str) -> str:
    return RUNNING_STATISTICS if is_statistic(name) else PARAMETERS
