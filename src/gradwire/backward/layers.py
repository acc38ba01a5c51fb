"""Layers whose weight gradient comes from K rows of the batch, in place of torch's own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from gradwire.backward.autograd import LinearFunction, PointwiseFunction, in_autocast
from gradwire.backward.row_choice import Choice
from gradwire.backward.row_memory import RowMemory
from gradwire.backward.row_scales import Scales
from gradwire.errors import GradwireError
from gradwire.torch_internals.modules import WatchedModule, never_compiled

MEMORIES = ("weight_memory_inputs", "weight_memory_outputs")


class ChosenRows(WatchedModule):
    """What converted layers share: the choice, the memory, and the memory's place in `state_dict`.

    The memory is no buffer: DistributedDataParallel would give every rank that of rank 0.
    """

    weight: Any  # a Parameter; old-style weight norm puts a tensor there
    choice: Choice
    memory: RowMemory | None
    scales: Scales

    def choose(self, choice: Choice, memory: RowMemory | None, scales: Scales | None = None) -> None:
        """Set how rows are chosen from now on, what remembers the others, and their factors."""
        self.choice, self.memory, self.scales = choice, memory, scales or Scales()

    @property
    def weight_memory_inputs(self) -> torch.Tensor | None:
        """What is remembered of the inputs, [slots, in]; None where nothing is."""
        return self.memory.inputs if self.memory else None

    @property
    def weight_memory_outputs(self) -> torch.Tensor | None:
        """What is remembered of the gradients of the outputs, [slots, out]; None where nothing is."""
        return self.memory.outputs if self.memory else None

    def _approximates(self, x: torch.Tensor) -> bool:
        """Exact, as ever, in eval mode, for inputs that are no rows (nested, sparse, meta, sharded by tensor
        parallelism) and while a graph is recorded.
        """
        if not self.training or not torch.is_grad_enabled():
            return False
        if x.is_nested or x.is_meta or x.layout != torch.strided or torch.jit.is_tracing():
            return False
        sharding = sys.modules.get("torch.distributed.tensor")  # not imported for this: it takes half a second
        return sharding is None or not isinstance(x, sharding.DTensor)

    def when_moved(self) -> None:
        """Let the memory follow the parameters."""
        # Any parameter: to look at the weight itself may compute it anew, as parametrizations do.
        parameter = next(self.parameters(), None)
        if self.memory and parameter is not None:
            self.memory.move(parameter.device)

    def when_replicated(self) -> None:
        """Refuse it where there is a memory."""
        if self.memory:
            raise GradwireError(
                "replicas of torch.nn.DataParallel would share one memory: use DistributedDataParallel, where every "
                "process has its own, or convert with decay=0, which needs none"
            )

    def when_saved(self, destination: dict[str, Any], prefix: str) -> None:
        """Add the memory to the state."""
        for name in MEMORIES:
            if getattr(self, name) is not None:
                destination[prefix + name] = getattr(self, name)

    def when_loaded(self, state: dict[str, Any], prefix: str, unexpected: list[str], errors: list[str]) -> None:
        """Load the memory. A state without one, such as that of the layer before it was converted, empties it."""
        keys = [prefix + name for name in MEMORIES]
        unexpected[:] = [key for key in unexpected if key not in keys]
        if not self.memory:
            return
        memories = [state[key] for key in keys if key in state]
        if not memories:
            return self.memory.clear()
        shapes = [tuple(memory.shape) for memory in memories]
        wanted = self.weight.shape[1], self.weight.shape[0]
        way_out = f"take {keys[0]} and {keys[1]} out of the state, which empties the memory"
        if shapes != [(*shapes[0][:1], size) for size in wanted]:
            errors.append(
                f"{prefix}weight: its row memory has the shapes {' and '.join(map(str, shapes))}, but the layer needs "
                f"as many rows of {wanted[0]} as rows of {wanted[1]}: {way_out}"
            )
        elif not all(memory.is_floating_point() and memory.isfinite().all() for memory in memories):
            errors.append(
                f"{prefix}weight: its row memory has entries that are not finite numbers, and every gradient would be "
                f"NaN: {way_out}"
            )
        else:
            self.memory.load(*(memory.to(self.weight.device) for memory in memories))

    def extra_repr(self) -> str:
        """Describe the layer, and how it chooses rows, for `print(model)`."""
        decay = self.memory.decay if self.memory else 0
        choice = f"k={self.choice.k}, policy={self.choice.policy}, decay={decay}, centre={self.choice.centre}"
        return f"{super().extra_repr()}, {choice}"


class Linear(ChosenRows, nn.Linear):
    """`torch.nn.Linear`, with the weight gradient from k rows; `decay=0` remembers nothing."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, device: Any = None, dtype: Any = None, *,
        k: int | float, policy: str = "topk", decay: float = 1.0, centre: bool = True,
        memory_dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        nn.Linear.__init__(self, in_features, out_features, bias, device, dtype)
        self.choose(Choice(k, policy, centre), RowMemory(decay, memory_dtype) if decay else None)

    # Inputs are called `input`, as torch calls them: they may be given by that name.
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Compute what `torch.nn.Linear` computes; only the backward pass differs."""
        if not self._approximates(input):
            return super().forward(input)
        weight = self.weight  # looked at once: parametrizations compute it anew each time
        if not weight.requires_grad:
            return functional.linear(input, weight, self.bias)
        return _linear(in_autocast(input), weight, self.bias, self.choice, self.memory, self.scales)


class _Pointwise(ChosenRows):
    stride: Any
    bias: Any
    _conv_forward: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self._approximates(input):
            exact: torch.Tensor = super().forward(input)
            return exact
        weight = self.weight
        if not weight.requires_grad or input.dim() != weight.dim():  # torch takes an image without a batch, too
            return self._conv_forward(input, weight, self.bias)
        return _pointwise(in_autocast(input), weight, self.bias, self.stride, self.choice, self.memory, self.scales)


class Conv1d(_Pointwise, nn.Conv1d):
    """`torch.nn.Conv1d` with a kernel of one entry, and its weight gradient from k rows."""

    pass


class Conv2d(_Pointwise, nn.Conv2d):
    """`torch.nn.Conv2d` with a kernel of one entry, and its weight gradient from k rows."""

    pass


class Conv3d(_Pointwise, nn.Conv3d):
    """`torch.nn.Conv3d` with a kernel of one entry, and its weight gradient from k rows."""

    pass


# The choice changes state that the compiler knows nothing of.
@never_compiled
def _linear(*args: Any) -> torch.Tensor:
    out: torch.Tensor = LinearFunction.apply(*args)
    return out


@never_compiled
def _pointwise(*args: Any) -> torch.Tensor:
    out: torch.Tensor = PointwiseFunction.apply(*args)
    return out
