"""One tensor on its way into a frame: what every converter is given."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import kernels


@dataclass
class Job:
    gradient: torch.Tensor  # flat fp32, contiguous
    dtype: torch.dtype  # of the tensor that the receiver gets back
    memory: torch.Tensor | None = None  # e, flat fp32
    memory_out: torch.Tensor | None = None  # where e goes; may be `memory` itself
    decay: float = 1.0
    seed: int = 0
    segments: tuple[int, ...] = ()  # lengths of the tensors that were laid end to end; () for one tensor

    @property
    def count(self) -> int:
        return self.gradient.numel()

    def compensated(self) -> torch.Tensor:
        """u = g + decay·e."""
        return kernels.compensate(self.gradient, self.memory, self.decay)

    def slice(self, start: int, stop: int) -> Job:
        def cut(t: torch.Tensor | None) -> torch.Tensor | None:
            return None if t is None else t[start:stop]

        memory, memory_out = cut(self.memory), cut(self.memory_out)
        return Job(self.gradient[start:stop], self.dtype, memory, memory_out, self.decay, self.seed + start)


def combine(values: torch.Tensor, out: torch.Tensor, weight: float, accumulate: bool) -> None:
    """out = weight·values, or out += weight·values."""
    values = values.to(out.device)
    if weight != 1:
        values = values.to(out.dtype) * weight
    if accumulate:
        out += values
    else:
        out.copy_(values)
