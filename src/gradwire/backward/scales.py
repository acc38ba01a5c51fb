"""The two forms of the method, as factors of rows.

Rows enter the memory times √η (the paper's form: the memory then holds parts of steps) or as they are (the default:
parts of gradients, for any optimizer). Output gradients are also divided by the scale of a GradScaler, since that
changes while rows are remembered; the product is multiplied so that it is a gradient again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from ..errors import GradwireError, SpecError


class Factors(NamedTuple):
    inputs: float = 1.0
    outputs: float = 1.0
    product: float = 1.0


class Scaler(Protocol):
    def get_scale(self) -> float: ...


@dataclass
class Scales:
    """`optimizer` makes it the paper's form; `grad_scaler` is needed where one scales the loss."""

    optimizer: torch.optim.Optimizer | None = None
    grad_scaler: Scaler | None = None
    _seen: tuple[torch.Tensor, int, float] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.grad_scaler is not None and not hasattr(self.grad_scaler, "get_scale"):
            raise SpecError(f"grad_scaler must be a torch.amp.GradScaler, not {type(self.grad_scaler).__name__}")
        if self.optimizer is None:
            return
        if not isinstance(self.optimizer, torch.optim.SGD) or any(g["momentum"] for g in self.optimizer.param_groups):
            raise SpecError(
                f"optimizer={type(self.optimizer).__name__}: the paper's form folds the learning rate into what is "
                "remembered, which is right for torch.optim.SGD without momentum alone; leave optimizer= out: the "
                "other form works with every optimizer"
            )

    def factors(self, weight: torch.Tensor) -> Factors | None:
        """None where the learning rate is zero: such a step can apply nothing."""
        scale = self._scale()
        if self.optimizer is None:
            return Factors(outputs=1 / scale, product=scale)
        rate = self._rate(weight)
        return Factors(math.sqrt(rate), math.sqrt(rate) / scale, scale / rate) if rate else None

    def _rate(self, weight: torch.Tensor) -> float:
        assert self.optimizer is not None
        for group in self.optimizer.param_groups:
            if any(p is weight for p in group["params"]):
                return float(group["lr"])
        raise GradwireError(
            "a converted layer's weight is not in the optimizer that was given to gradwire.backward.convert: build the "
            "optimizer from the parameters of that model, or leave optimizer= out"
        )

    def _scale(self) -> float:
        """Asked for once after each update of the scale: on a GPU it costs waiting for the GPU."""
        if self.grad_scaler is None:
            return 1.0
        tensor = getattr(self.grad_scaler, "_scale", None)
        if tensor is None:
            return self.grad_scaler.get_scale()
        if self._seen is None or self._seen[0] is not tensor or self._seen[1] != tensor._version:
            self._seen = (tensor, tensor._version, self.grad_scaler.get_scale())
        return self._seen[2]
