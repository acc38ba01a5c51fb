"""How gradients are averaged, beside the recipe: the options that `attach` and `DataParallel` share."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import Protocol

import torch

from gradwire.aggregate.exchanges.gradient_exchange import ALL_GATHER, SCATTER_REDUCE
from gradwire.correct.memory_dtype import memory_dtype
from gradwire.errors import SpecError, unknown_name

HIERARCHICAL = "hierarchical"
LONGEST_TIMEOUT = 10**9  # seconds: torch counts nanoseconds in 64 bits
AGGREGATIONS = ("auto", ALL_GATHER, SCATTER_REDUCE, HIERARCHICAL)


class Scaler(Protocol):
    """What is asked of a torch.amp.GradScaler."""

    def get_scale(self) -> float:
        """Return the factor by which the loss, and with it every gradient, is multiplied."""
        ...


@dataclass(frozen=True)
class Options:
    """The options of an attachment; values that make no sense are a SpecError."""

    optimizer: torch.optim.Optimizer | None = None
    grad_scaler: Scaler | None = None
    aggregate: str = "auto"
    timeout: float | None = None  # seconds
    aggregator: str | None = None  # host:port
    aggregator_fallback: bool = False  # whether to go on without it
    memory: str = "fp32"  # how error memory is kept

    def __post_init__(self) -> None:
        if self.aggregate not in AGGREGATIONS:
            raise unknown_name("aggregation", self.aggregate, AGGREGATIONS)
        if self.aggregator_fallback and self.aggregator is None:
            raise SpecError("aggregator_fallback goes with aggregator='host:port', which is missing")
        memory_dtype(self.memory)
        if self.memory != "fp32" and self.aggregate == "hierarchical":
            raise SpecError("aggregate='hierarchical' adds up error memories of a host: use memory='fp32' with it")
        if self.timeout is not None and not (isinstance(self.timeout, Real) and 0 < self.timeout <= LONGEST_TIMEOUT):
            raise SpecError(f"timeout must be a number of seconds above 0, and up to 10**9, not {self.timeout!r}")
        if self.grad_scaler is not None and not hasattr(self.grad_scaler, "get_scale"):
            raise SpecError(f"grad_scaler must be a torch.amp.GradScaler, not {type(self.grad_scaler).__name__}")
        if self.optimizer is not None and not hasattr(self.optimizer, "param_groups"):
            raise SpecError(f"optimizer must be a torch.optim.Optimizer, not {type(self.optimizer).__name__}")
