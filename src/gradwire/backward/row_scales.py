"""The two forms of the method, as factors of rows.

Rows enter the memory times √η (the paper's form: the memory then holds parts of steps) or as they are (the default:
parts of gradients, for any optimizer). Output gradients are also divided by the scale of a GradScaler, since that
changes while rows are remembered. Chosen rows are multiplied so that their product is a gradient again, and each is
as large as it came: in fp16, rows times √η would lose digits, and rows divided by η would not fit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from gradwire.errors import GradwireError, SpecError
from gradwire.torch_internals.modules import scale_of
from gradwire.torch_internals.tensors import changes_of

SMALLEST_RATE = torch.finfo(torch.float32).tiny


class Factors(NamedTuple):
    """Of rows on their way into the memory, and of chosen rows on their way out of it."""

    inputs: float = 1.0
    outputs: float = 1.0
    chosen_inputs: float = 1.0
    chosen_outputs: float = 1.0


class LossScaler(Protocol):
    """What is asked of a torch.amp.GradScaler."""

    def get_scale(self) -> float:
        """Return the factor by which the loss, and with it every gradient, is multiplied."""
        ...


@dataclass
class Scales:
    """What rows are multiplied with, by the optimizer's learning rate and the scale of the loss.

    An `optimizer` makes it the paper's form; `grad_scaler` is needed where one scales the loss. Layers of a model share
    one object.
    """

    optimizer: torch.optim.Optimizer | None = None
    grad_scaler: LossScaler | None = None
    _seen: tuple[torch.Tensor, int, float] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.grad_scaler is not None and not hasattr(self.grad_scaler, "get_scale"):
            raise SpecError(f"grad_scaler must be a torch.amp.GradScaler, not {type(self.grad_scaler).__name__}")
        if self.optimizer is None:
            return
        if not isinstance(self.optimizer, torch.optim.SGD) or any(g["momentum"] for g in self.optimizer.param_groups):
            raise self._refusal()

    def _refusal(self) -> SpecError:
        return SpecError(
            f"optimizer={type(self.optimizer).__name__}: the paper's form folds the learning rate into what is "
            "remembered, which is right for torch.optim.SGD without momentum alone; leave optimizer= out (if it was "
            "given before, call gradwire.backward.revert(model) first): the other form works with every optimizer"
        )

    def __deepcopy__(self, memo: object) -> Scales:
        """The same for a copied model: a copy of the optimizer or scaler would stay at what they are now, unnoticed."""
        return self

    def factors(self, weight: torch.Tensor) -> Factors | None:
        """None where the learning rate is zero, or so small that fp32 has no √η: such a step can apply nothing."""
        scale = self._scale()
        if self.optimizer is None:
            return Factors(outputs=1 / scale, chosen_outputs=scale)
        rate = self._rate(weight)
        if rate < SMALLEST_RATE:
            return None
        root = math.sqrt(rate)
        return Factors(root, root / scale, 1 / root, scale / root)

    def _rate(self, weight: torch.Tensor) -> float:
        assert self.optimizer is not None
        for group in self.optimizer.param_groups:
            if any(p is weight for p in group["params"]):
                if group["momentum"]:  # since then: a loaded state, another group
                    raise self._refusal()
                return float(group["lr"])
        raise GradwireError(
            "a converted layer's weight is not in the optimizer that was given to gradwire.backward.convert: build the "
            "optimizer from the parameters of that model (convert a copy again with its own), or revert and leave "
            "optimizer= out, as FSDP2 needs it, whose optimizers have shards, and weights that are computed (pruning, "
            "weight norm)"
        )

    def _scale(self) -> float:
        """Asked for once after each update of the scale: on a GPU it costs waiting for the GPU."""
        if self.grad_scaler is None:
            return 1.0
        tensor = scale_of(self.grad_scaler)
        if tensor is None:
            return self.grad_scaler.get_scale()
        if self._seen is None or self._seen[0] is not tensor or self._seen[1] != changes_of(tensor):
            self._seen = (tensor, changes_of(tensor), self.grad_scaler.get_scale())
        return self._seen[2]
