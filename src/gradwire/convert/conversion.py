"""`Converter`, which every lossy method is, and `Conversion`, which it is given: one tensor on its way into a frame."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch

from gradwire import kernels

SHORTEST_RUN = 32  # entries of a sample that lie together, of a part of a tensor


class NonFinite(Exception):
    """The gradient holds a NaN or an infinity: it has to travel as it is. The error memory is as it was before."""


class Converter(ABC):
    """A lossy method: it turns a tensor into payload bytes, and the error memory into what the payload leaves out.

    A converter has parameters but no state, so that any number of threads may share it. It knows neither frames nor
    devices: `Codec.encode_into` hands it tensors that are all on one device, where its kernels can work.
    """

    wire_id: int  # the codec number of the frame, which names the function that decodes the payload
    stochastic = False  # whether frames depend on the seed
    # The families of kernels that `encode` calls with its tensors. They decide where a tensor is converted: on its own
    # device if all of them can work there, otherwise in a copy on the CPU (`takes` in kernels/dispatch.py).
    families: tuple[str, ...]
    elementwise = False  # whether every entry is coded without regard to the others
    lists_segments = False  # whether the payload tells the segments apart; otherwise they are coded as one tensor
    joins = False  # whether segments of many entries cost less time than frames of their own, and hardly any bytes
    selects = False  # whether a few entries of the whole tensor are sent, so that it had better not be cut
    sums = False  # whether what workers send can be added up on its way (aggregate/sums/sum_exchange.py)
    by_rows = False  # whether the shape counts, so that a tensor is cut between its rows if at all
    reads_ahead = False  # whether a NaN or an infinity anywhere is found before any of the memory is written
    stores_tiny = False  # whether tensors of up to 32 bytes are stored, since side information would take as much

    def for_tensor(self, shape: tuple[int, ...], segments: tuple[int, ...]) -> Converter:
        """Return the converter for a tensor of this shape, or for segments of these lengths: this one, or another.

        A converter that does better with some tensors than with others leaves the latter to one of another codec.
        """
        return self

    def likely_length(self, tensor: torch.Tensor) -> int:
        """Return a guess at the payload's length: if the header is shorter or longer then, the payload is moved."""
        return max(1, tensor.nbytes // 16)

    @abstractmethod
    def encode(self, conversion: Conversion, out: torch.Tensor) -> int:
        """Write the payload to the front of `out` and e ← u − decoded to conversion.memory_out; return its length.

        If the gradient holds a NaN or an infinity, NonFinite is raised, and the memory is what it was before (up to
        fp32 rounding, if it is updated in place).
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
    shape: tuple[int, ...] = ()  # of the tensor, before it was laid flat
    part_of: int = 0  # the number of entries of the tensor that this is a part of; 0: it is a tensor by itself

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tensor that the receiver gets back."""
        return self.original.dtype

    @property
    def count(self) -> int:
        """The number of entries."""
        return self.gradient.numel()

    @property
    def run_length(self) -> int:
        """How many entries of the sample lie together: of a part of a tensor, its share of those, or enough."""
        return max(SHORTEST_RUN, kernels.RUN * self.count // self.part_of) if self.part_of else kernels.RUN

    @property
    def in_place(self) -> bool:
        """Whether the new memory is written over the old one."""
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
    """Return the tensor as an array for the coders: a view of the same memory, or a copy if it is on another device."""
    return tensor.cpu().numpy()


def limit_to(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert fp32 numbers to another dtype; those beyond its finite range become ± its largest number."""
    limit = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    return x.clamp(-limit, limit).to(dtype)
