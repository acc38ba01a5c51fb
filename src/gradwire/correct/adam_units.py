"""Gradients in units of Adam's own steps, so that an error of the codec is as large a step for every entry.

Adam moves an entry by about m / (√v + ε). A codec spreads its error evenly over a tensor, which is a large step where v
is small and none where it is large, and a memory hands on what was held back at the scale of another step. So gradients
are divided by √v + ε before the exchange and means are multiplied by it after it. v is made of means alone: it is the
same on all ranks, and costs no byte.

A unit is the power of two next to √v + ε. To multiply by it is exact, so that error memory is conserved, also when
units change, and v may differ in its last bits on unlike hardware. Units are relative to those of the tensor's median
entry, from which none is farther than `RANGE` powers: gradients stay near the size that they have.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence

import torch

from gradwire.errors import SpecError

RANGE = 8
ADAMS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam)
SCALED = (torch.float64, torch.float32, torch.bfloat16)  # fp16 gradients might overflow

Units = Mapping[str, torch.Tensor]  # exponents of two by parameter name: int8, of the parameter's shape


def check_adam(optimizer: torch.optim.Optimizer, parameters: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Raise SpecError unless the optimizer is one of torch's Adams, and trains some of these parameters."""
    if not isinstance(optimizer, ADAMS):
        raise SpecError(
            f"the recipe adam needs the second moments of torch.optim.Adam, AdamW, NAdam or RAdam, and "
            f"{type(optimizer).__name__} keeps none that it knows: use structured or co3 with this optimizer"
        )
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if parameters and not any(id(parameter) in held for _, parameter in parameters):
        raise SpecError(
            f"the optimizer holds none of the parameters that the recipe adam is for ({parameters[0][0]!r} and so on), "
            f"so that it would scale nothing: pass the optimizer of this model"
        )


def measure_units(optimizer: torch.optim.Optimizer, parameters: Iterable[tuple[str, torch.Tensor]]) -> Units:
    """Return the units of these parameters by the optimizer's second moments, of those that have some by now."""
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    units = {}
    for name, parameter in parameters:
        state = optimizer.state.get(parameter, {})
        moment, steps = state.get("exp_avg_sq"), state.get("step")
        group = groups.get(id(parameter))
        if group is None or not isinstance(moment, torch.Tensor) or moment.shape != parameter.shape or not steps:
            continue
        if parameter.dtype in SCALED and moment.numel():
            correction = math.sqrt(1 - float(group["betas"][1]) ** float(steps))
            units[name] = units_of(moment, correction, float(group["eps"]))
    return units


@torch.no_grad()
def units_of(moment: torch.Tensor, correction: float, epsilon: float) -> torch.Tensor:
    """Return the exponents of two next to 1 / (√v / correction + ε), relative to their median."""
    _, exponents = torch.frexp(moment.detach().float().sqrt().div_(correction).add_(epsilon))
    exponents = exponents.reshape(-1).neg_()  # in the order of the dimensions, whatever the memory format
    middle = exponents.median()  # an entry of the tensor: exact on every device
    return (exponents - middle).clamp_(-RANGE, RANGE).to(torch.int8).view(moment.shape)


def checksum(units: Units) -> int:
    """Return a checksum that tells the units of different ranks apart."""
    crc = 0
    for name, exponents in units.items():
        crc = zlib.crc32(name.encode(), crc)
        crc = zlib.crc32(exponents.contiguous().view(-1).cpu().numpy(), crc)
    return crc


def power_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """Return 2 to the power of these exponents, in bf16, which holds them exactly in two bytes each."""
    return ((exponents.to(torch.int16) + 127) << 7).view(torch.bfloat16)  # sign 0, mantissa 0


def exponents_of(factors: torch.Tensor) -> torch.Tensor:
    """Return the exponents of powers of two, within the range of units."""
    _, exponents = torch.frexp(factors)
    return (exponents - 1).clamp_(-RANGE, RANGE).to(torch.int8)
