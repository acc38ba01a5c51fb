"""Momentum before the exchange on the GPU: one launch for the velocities of all tensors of a message, one for masks.

`Velocity.push` and `Velocity.mask` (correct/momentum.py) do the same for one tensor, in some six launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gradwire.cuda_runtime import programs
from gradwire.cuda_runtime.launcher import Arguments
from gradwire.gpu.layout import DTYPES, pairs
from gradwire.gpu.workspace import host_bytes, make_room

PUSHED = 4096  # entries of a tile
PUSH = np.dtype([
    ("gradient", "u8"), ("parameter", "u8"), ("before", "u8"), ("velocity", "u8"), ("out", "u8"), ("count", "i8"),
    ("momentum", "f4"), ("weight_decay", "f4"), ("dtype", "i4"), ("of_parameter", "i4"), ("of_out", "i4"),
    ("nesterov", "i4"),
])  # fmt: skip
MASK = np.dtype([
    ("velocity", "u8"), ("values", "u8"), ("before", "u8"), ("after", "u8"), ("count", "i8"), ("decay", "f4"),
    ("dtype", "i4"),
])  # fmt: skip


@dataclass(frozen=True)
class PushTask:
    """A gradient, and the velocity that it adds to; all tensors are contiguous and on one device."""

    gradient: torch.Tensor
    before: torch.Tensor | None  # fp32; none in the first step
    velocity: torch.Tensor | None  # fp32; none without momentum
    momentum: float = 0.0
    nesterov: bool = False
    parameter: torch.Tensor | None = None
    weight_decay: float = 0.0
    out: torch.Tensor | None = None  # gets what is passed on, if that is another tensor than the velocity


@dataclass(frozen=True)
class MaskTask:
    """A velocity, and what tells where something of a tensor was sent."""

    velocity: torch.Tensor
    values: torch.Tensor
    before: torch.Tensor
    after: torch.Tensor
    decay: float


class DeviceMomentum:
    """The velocities of one device's messages, on the current stream of the calling thread."""

    def __init__(self, device: torch.device):
        self.device = device
        self._tables: dict[tuple[object, ...], _Table] = {}

    def push(self, tasks: Sequence[PushTask]) -> None:
        """Write the new velocities, and what is passed on in place of the gradients."""
        rows = [
            (t.gradient.data_ptr(), _address(t.parameter), _address(t.before), _address(t.velocity), _address(t.out),
             t.gradient.numel(), t.momentum, t.weight_decay, DTYPES[t.gradient.dtype], _dtype(t.parameter),
             _dtype(t.out), t.nesterov)
            for t in tasks
        ]  # fmt: skip
        self._launch("push_velocities", np.array(rows, PUSH))

    def mask(self, tasks: Sequence[MaskTask]) -> None:
        """Let velocities start again from zero where something was sent."""
        rows = [
            (t.velocity.data_ptr(), t.values.data_ptr(), t.before.data_ptr(), t.after.data_ptr(), t.velocity.numel(),
             t.decay, DTYPES[t.values.dtype])
            for t in tasks
        ]  # fmt: skip
        self._launch("mask_velocities", np.array(rows, MASK))

    def _launch(self, kernel: str, rows: np.ndarray) -> None:
        if not len(rows):
            return
        key = (kernel, rows["count"].tobytes())
        table = self._tables.get(key)
        if table is None:
            make_room(self._tables)
            table = self._tables[key] = _Table(rows, self.device)
        table.copy(rows)
        programs.kernel("momentum", kernel, self.device)(table.blocks, 256, table.arguments)


class _Table:
    """What a kernel is told of tensors of these sizes: addresses, which change, and tiles, which do not."""

    def __init__(self, rows: np.ndarray, device: torch.device):
        tiles = pairs(-(-rows["count"] // PUSHED))
        self.blocks, self._size = len(tiles), rows.nbytes
        self._rows = torch.empty(rows.nbytes, dtype=torch.uint8, device=device)
        self._tiles = torch.from_numpy(tiles.view(np.uint8).copy()).to(device)
        self._host = host_bytes(rows.nbytes, device)
        self._copied = torch.cuda.Event() if device.type == "cuda" else None
        self.arguments = Arguments(self._rows, self._tiles)

    def copy(self, rows: np.ndarray) -> None:
        """Copy the rows to the device, when the last ones are there."""
        if self._copied is not None:
            self._copied.synchronize()
        self._host.numpy()[:] = rows.view(np.uint8)
        self._rows.copy_(self._host, non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._rows.device))


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _dtype(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else DTYPES[tensor.dtype]
