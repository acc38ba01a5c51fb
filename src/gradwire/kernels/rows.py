"""The kernels of rows, by device: Triton on a GPU, native code on a CPU, otherwise the reference."""

from __future__ import annotations

import importlib
import importlib.util
import os
from functools import cache
from types import ModuleType

import torch

from .reference import rows as reference

__all__ = ["row_norms", "take_rows"]


def row_norms(rows: torch.Tensor, memory: torch.Tensor | None, keep: float, scale: float) -> torch.Tensor:
    return _kernels(rows, memory).row_norms(rows, memory, keep, scale)


def take_rows(
    rows: torch.Tensor, memory: torch.Tensor | None, keep: float, scale: float, gain: float,
    chosen: torch.Tensor, finite: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    return _kernels(rows, memory).take_rows(rows, memory, keep, scale, gain, chosen, finite)


take_rows.__doc__, row_norms.__doc__ = reference.take_rows.__doc__, reference.row_norms.__doc__


def _kernels(rows: torch.Tensor, memory: torch.Tensor | None) -> ModuleType:
    found = _of_device(rows.device.type)
    return found if found is not reference and found.can(rows, memory) else reference


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
