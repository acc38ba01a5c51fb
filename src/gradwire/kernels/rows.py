"""The kernels of rows, by device: Triton on a GPU, native code on a CPU, otherwise the reference."""

from __future__ import annotations

import importlib
import importlib.util
import os
from functools import cache
from types import ModuleType

import torch

from gradwire.kernels.reference import rows as reference
from gradwire.kernels.reference.rows import Side

__all__ = ["Side", "join_rows", "largest", "take_rows"]


def join_rows(inputs: Side, outputs: Side, keep: float) -> torch.Tensor:
    return _kernels(inputs, outputs).join_rows(inputs, outputs, keep)


def take_rows(
    inputs: Side, outputs: Side, chosen: torch.Tensor, total: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return _kernels(inputs, outputs).take_rows(inputs, outputs, chosen, total)


def largest(keys: torch.Tensor, count: int) -> torch.Tensor:
    return _of_device(keys.device.type).largest(keys, count)


for kernel in (join_rows, take_rows, largest):
    kernel.__doc__ = getattr(reference, kernel.__name__).__doc__


def _kernels(inputs: Side, outputs: Side) -> ModuleType:
    found = _of_device(inputs.rows.device.type)
    return found if found is not reference and found.can(inputs) and found.can(outputs) else reference


@cache
def _of_device(device: str) -> ModuleType:
    if device == "cuda" and importlib.util.find_spec("triton"):
        return importlib.import_module(".cuda.rows", __package__)
    if device == "cpu" and not os.environ.get("GRADWIRE_NO_NATIVE"):
        try:
            return importlib.import_module(".cpu.rows", __package__)
        except ImportError:  # gradwire.kernels has warned of it
            pass
    return reference
