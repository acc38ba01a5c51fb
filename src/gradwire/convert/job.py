"""One tensor on its way into a frame: what every converter is given."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .. import kernels


class NonFinite(Exception):
    """The gradient holds a NaN or an infinity: it has to travel as it is. The error memory is as it was before."""


@dataclass
class Job:
    gradient: torch.Tensor  # flat fp32, contiguous
    original: torch.Tensor  # the same in the dtype that the receiver gets back
    memory: torch.Tensor | None = None  # e, flat fp32
    memory_out: torch.Tensor | None = None  # where e goes; may be `memory` itself
    decay: float = 1.0
    seed: int = 0
    segments: tuple[int, ...] = ()  # lengths of the tensors that were laid end to end; () for one tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.original.dtype

    @property
    def count(self) -> int:
        return self.gradient.numel()

    @property
    def in_place(self) -> bool:
        """Whether updating the memory overwrites what it was."""
        return (
            self.memory is not None
            and self.memory_out is not None
            and self.memory.data_ptr() == self.memory_out.data_ptr()
        )

    def compensated(self) -> torch.Tensor:
        """u = g + decay·e."""
        return kernels.compensate(self.gradient, self.memory, self.decay)

    def require_finite(self) -> None:
        require_finite(self.gradient)

    def take_back(self, sent: torch.Tensor) -> None:
        """Undo e ← g + decay·e − sent on the entries that were sent, to fp32 rounding."""
        assert self.memory is not None
        part = self.memory[: sent.numel()]
        part.add_(sent).sub_(self.gradient[: sent.numel()]).div_(self.decay)

    def slice(self, start: int, stop: int) -> Job:
        def cut(t: torch.Tensor | None) -> torch.Tensor | None:
            return None if t is None else t[start:stop]

        memory, memory_out = cut(self.memory), cut(self.memory_out)
        part = slice(start, stop)
        return Job(self.gradient[part], self.original[part], memory, memory_out, self.decay, self.seed + start)


def require_finite(u: torch.Tensor) -> None:
    if not math.isfinite(kernels.absmax(u)):
        raise NonFinite


def limit_to(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp32 numbers in another dtype, those beyond its finite range at the end of it."""
    limit = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    return x.clamp(-limit, limit).to(dtype)


def combine(values: torch.Tensor, out: torch.Tensor, weight: float, accumulate: bool) -> None:
    """out = weight·values, or out += weight·values."""
    values = values.to(out.device)
    if weight != 1:
        values = values.to(out.dtype) * weight
    if accumulate:
        out += values
    else:
        out.copy_(values)
