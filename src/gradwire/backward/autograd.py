"""Mem-AOP-GD (arXiv 2110.09164): the weight gradient of a linear layer from K of its M outer products.

With inputs X, output gradients D and the memories mX, mD of earlier batches, row by row of the batch:

1. A = √decay·mX + X and B = √decay·mD + D (what entered, and what is left of it; scales.py has the factors);
2. choose K rows by ‖A_j‖·‖B_j‖ (choice.py);
3. the gradient is the sum of their outer products, Σ B_jᵀA_j;
4. the memory keeps the other rows of A and B, and zero in place of the chosen ones.

Gradients of bias and input are exact.

Not in the paper:
- The mean x̄ of the inputs that have a gradient goes through exactly, as one more outer product, (ΣD_j)ᵀx̄, and the rest
  is done for X − x̄. What inputs have in common would otherwise add up in the memory, and cross terms between rows of a
  slot, which cancel out for inputs around zero, would be steps along x̄ that are M/K times too long.
- A row that is zero on one side, such as padding, enters neither: it has no product, but would make cross terms, too.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from gradwire import kernels
from gradwire.backward.row_choice import Choice
from gradwire.backward.row_memory import RowMemory
from gradwire.backward.row_scales import Factors, Scales
from gradwire.errors import GradwireError, SpecError


def weight_gradient(
    inputs: torch.Tensor, outputs: torch.Tensor, choice: Choice, memory: RowMemory | None, factors: Factors | None,
    sums: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return the gradient of the weight, out × in, and take the memory on by one batch.

    `inputs` are [rows, in], `outputs` the gradients of the outputs, [rows, out]; `sums` are those of the columns of
    `outputs`, where they are known already. Without `factors` the step applies nothing, and neither does this.
    """
    inputs, outputs = inputs.contiguous(), outputs.contiguous()
    rows = inputs.shape[0]
    count = choice.count(rows)
    if factors is None or not count:
        return outputs.new_zeros(outputs.shape[1], inputs.shape[1])
    if count == rows and (memory is None or memory.inputs is None):  # nothing is or will be remembered
        return outputs.t() @ inputs
    mean = mean_input(inputs, outputs) if choice.centre else None
    if memory is None:
        keep, a, b = 1.0, _side(inputs, mean), _side(outputs)
    else:
        keep, (old_inputs, old_outputs) = math.sqrt(memory.decay), memory.slots(inputs, outputs)
        a = _side(inputs, mean, old_inputs, factors.inputs, factors.chosen_inputs)
        b = _side(outputs, None, old_outputs, factors.outputs, factors.chosen_outputs)
    scores = kernels.join_rows(a, b, keep)
    of_inputs, of_outputs = kernels.take_rows(a, b, choice.pick(scores), scores.sum())
    if mean is not None:
        of_inputs[-1] = mean
        of_outputs[-1] = outputs.sum(0) if sums is None else sums
    return of_outputs.t() @ of_inputs


def mean_input(inputs: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
    """Return the mean of the inputs that have a gradient.

    Padding has none: with it in the mean, the other rows would keep a mean that they share.
    """
    wide = torch.promote_types(inputs.dtype, torch.float32)
    weights = torch.linalg.vector_norm(outputs, dim=1, dtype=wide).sign_()  # 0 or 1
    weights.div_(weights.sum().clamp_min_(1.0))
    return torch.matmul(weights.to(inputs.dtype), inputs)  # in half precision only nearly the mean, which is as good


def _side(
    rows: torch.Tensor, mean: torch.Tensor | None = None, memory: torch.Tensor | None = None, scale: float = 1.0,
    gain: float = 1.0,
) -> kernels.Side:  # fmt: skip
    """A row that its own dtype or the memory's cannot hold counts as not finite."""
    most = torch.finfo(rows.dtype).max
    if memory is not None:
        most = min(most / gain, torch.finfo(memory.dtype).max)
    return kernels.Side(rows, memory, scale, gain, most, mean)


class LinearFunction(torch.autograd.Function):
    """`functional.linear` whose weight gradient is that of the chosen rows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *how: Any) -> torch.Tensor:
        """Compute the layer's outputs exactly; `how` is (choice, memory, scales) for the backward pass."""
        if weight.is_complex():
            raise GradwireError("rows are chosen for real layers, not for complex ones: use torch.nn.functional.linear")
        return functional.linear(x, *_kept(ctx, x, weight, bias, how))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the exact gradients of input and bias, and the weight gradient of the chosen rows."""
        x, cast = ctx.saved_tensors
        choice, memory, scales = ctx.how
        count = math.prod(x.shape[:-1])  # a layer may have no inputs, of which -1 would make nothing
        rows, of_rows = x.reshape(count, x.shape[-1]), gradient.reshape(count, gradient.shape[-1])
        of_input = of_weight = of_bias = sums = None
        if ctx.needs_input_grad[0]:
            of_input = (of_rows @ cast).reshape(x.shape)
        if ctx.needs_input_grad[2]:
            sums = of_rows.sum(0)
            of_bias = sums.to(ctx.bias_dtype)
        if ctx.needs_input_grad[1]:
            of_weight = weight_gradient(rows, of_rows, choice, memory, scales.factors(ctx.weight), sums)
            of_weight = of_weight.to(ctx.weight.dtype)
        return of_input, of_weight, of_bias, None, None, None


class PointwiseFunction(torch.autograd.Function):
    """A convolution with a kernel of one entry: the rows are batch × places."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, stride: tuple[int, ...], *how: Any
    ) -> torch.Tensor:
        """Compute the convolution exactly; `how` is (choice, memory, scales) for the backward pass."""
        ctx.stride = stride
        return _convolve(x, *_kept(ctx, x, weight, bias, how), stride)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the exact gradients of input and bias, and the weight gradient of the chosen rows."""
        x, cast = ctx.saved_tensors
        choice, memory, scales = ctx.how
        places = cast.dim() - 2
        of_weight = None
        wanted = [ctx.needs_input_grad[0], False, ctx.needs_input_grad[2]]
        of_input, _, of_bias = torch.ops.aten.convolution_backward(
            gradient, x, cast, [len(cast)], ctx.stride, [0] * places, [1] * places, False, [0] * places, 1, wanted
        )
        if ctx.needs_input_grad[1]:
            seen = x[(..., *(slice(None, None, step) for step in ctx.stride))]
            rows, of_rows = _rows(seen), _rows(gradient)
            of_weight = weight_gradient(rows, of_rows, choice, memory, scales.factors(ctx.weight), of_bias)
            of_weight = of_weight.to(ctx.weight.dtype).reshape(ctx.weight.shape)
            if ctx.weight.stride()[:2] == of_weight.stride()[:2]:  # the others are of dimensions of one entry
                of_weight = of_weight.as_strided(ctx.weight.shape, ctx.weight.stride())  # channels_last: for DDP
        if of_bias is not None:
            of_bias = of_bias.to(ctx.bias_dtype)
        return of_input, of_weight, of_bias, None, None, None, None


def _kept(
    ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, how: tuple[Any, ...]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight and bias as the layer gets them; what both functions need in the backward pass is kept."""
    cast = in_autocast(weight)
    ctx.save_for_backward(x, cast)
    ctx.weight, ctx.how = weight, how
    ctx.bias_dtype = None if bias is None else bias.dtype
    return cast, None if bias is None else in_autocast(bias)


def _convolve(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, stride: tuple[int, ...]
) -> torch.Tensor:
    none, one = [0] * len(stride), [1] * len(stride)
    return torch.convolution(x, weight, bias, stride, none, one, False, none, 1)


def _rows(images: torch.Tensor) -> torch.Tensor:
    """[batch, channels, …] as [batch × places, channels]; a view where channels come last in memory."""
    return images.movedim(1, -1).reshape(-1, images.shape[1])


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, k: int | float, policy: str = "topk",
    centre: bool = True, memory: RowMemory | None = None,
) -> torch.Tensor:  # fmt: skip
    """`torch.nn.functional.linear`, with the gradient of `weight` from k rows: `memory` keeps the rest, if given."""
    if memory is not None and not isinstance(memory, RowMemory):
        raise SpecError(f"memory must be a gradwire.backward.RowMemory or None, not {memory!r}")
    out: torch.Tensor = LinearFunction.apply(in_autocast(x), weight, bias, Choice(k, policy, centre), memory, Scales())
    return out


def in_autocast(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor as autocast would give it to the layer.

    An input is cast before it is kept for the backward pass, which then keeps less.
    """
    device = x.device.type
    if not torch.is_autocast_enabled(device) or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(device))
