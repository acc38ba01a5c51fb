"""What every converter is, and what it is given: one tensor on its way into a frame."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch

from gradwire import kernels


class NonFinite(Exception):
    """The gradient holds a NaN or an infinity: it has to travel as it is. The error memory is as it was before."""


class Converter(ABC):
    """A lossy method: it turns a tensor into payload bytes, and the error memory into what the payload leaves out.

    A converter has parameters but no state, so that any number of threads may share it. It knows neither frames nor
    devices: the tensors of a conversion are where its `families` of kernels run, or on the CPU.
    """

    wire_id: int  # of the function that decodes the payload
    stochastic = False  # frames depend on the seed
    families: tuple[
        str, ...
    ]  # of the kernels that its tensors go to: where they run, it takes them (kernels/dispatch.py)
    elementwise = False  # every entry is coded for itself, whatever the others are
    lists_segments = False  # the payload tells the segments apart; otherwise they are coded as one tensor
    selects = False  # a few entries of the whole tensor are sent, so that it had better not be cut
    sums = False  # what workers send can be added up on its way (aggregate/sums/sum_exchange.py)
    stores_tiny = False  # has more side information than a tensor of 32 bytes is worth

    @abstractmethod
    def encode(self, conversion: Conversion, out: torch.Tensor) -> int:
        """Write the payload to the front of `out` and e ← u − decoded to conversion.memory_out; returns its length.

        Raises NonFinite, before any memory is changed, where the gradient holds a NaN or an infinity.
        """


@dataclass
class Conversion:
    """One tensor on its way into a frame: the gradient, its error memory, and how to treat them.

    All tensors are flat, contiguous and on one device. A converter writes to `memory_out` alone.
    """

    gradient: torch.Tensor  # flat fp32, contiguous
    original: torch.Tensor  # the same in the dtype that the receiver gets back
    memory: torch.Tensor | None = None  # e, flat fp32
    memory_out: torch.Tensor | None = None  # where e goes; may be `memory` itself
    decay: float = 1.0
    seed: int = 0
    segments: tuple[int, ...] = ()  # lengths of the tensors that were laid end to end; () for one tensor

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tensor that the receiver gets back."""
        return self.original.dtype

    @property
    def count(self) -> int:
        """The number of entries."""
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
        """Return u = g + decay·e, limited to the finite range of fp32."""
        return kernels.compensate(self.gradient, self.memory, self.decay)

    def require_finite(self) -> None:
        """Raise NonFinite if the gradient holds a NaN or an infinity."""
        require_finite(self.gradient)

    def take_back(self, sent: torch.Tensor) -> None:
        """Undo e ← g + decay·e − sent on the entries that were sent, to fp32 rounding."""
        assert self.memory is not None
        part = self.memory[: sent.numel()]
        part.add_(sent.to(part.device)).sub_(self.gradient[: sent.numel()]).div_(self.decay)

    def slice(self, start: int, stop: int) -> Conversion:
        """Return the conversion of the entries start … stop−1, which share their memory with these."""

        def cut(t: torch.Tensor | None) -> torch.Tensor | None:
            return None if t is None else t[start:stop]

        memory, memory_out = cut(self.memory), cut(self.memory_out)
        part = slice(start, stop)
        return Conversion(self.gradient[part], self.original[part], memory, memory_out, self.decay, self.seed + start)


def require_finite(u: torch.Tensor) -> None:
    """Raise NonFinite if the tensor holds a NaN or an infinity."""
    if not math.isfinite(kernels.absmax(u)):
        raise NonFinite


def in_host_memory(tensor: torch.Tensor) -> np.ndarray:
    """Return the tensor as an array, as the coders take symbols: the same memory, or a copy where it is elsewhere."""
    return tensor.cpu().numpy()


def limit_to(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return fp32 numbers in another dtype, those beyond its finite range as its largest number."""
    limit = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    return x.clamp(-limit, limit).to(dtype)


def combine(values: torch.Tensor, out: torch.Tensor, weight: float, accumulate: bool) -> None:
    """Write weight·values to `out`, or add it, wherever `out` is."""
    values = values.to(out.device)
    if weight != 1:
        values = values.to(out.dtype) * weight
    if accumulate:
        out += values
    else:
        out.copy_(values)
