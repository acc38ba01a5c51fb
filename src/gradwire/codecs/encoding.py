"""`Codec`: one tensor in, one frame out.

u = g + γe  ─►  convert  ─►  compress  ─►  frame          e ← u − decode(frame)
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import replace
from numbers import Integral, Real

import torch

from gradwire import kernels
from gradwire.convert import stored
from gradwire.convert.conversion import Conversion, Converter, NonFinite
from gradwire.errors import GradwireError
from gradwire.frame import headers

CONVERTIBLE = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

# A gradient that is not finite leaves its error memory as it was. Where memory is updated in place, tensors up to this
# size are searched for a NaN or an infinity before anything is written, so that the memory keeps its exact bits. For
# larger tensors that would cost a fifth of the time: their memory is changed and then restored, up to fp32 rounding.
CHECKED_AHEAD = 2**22


class Codec:
    """The stateless part of a recipe: one tensor in, one frame out. `str(codec)` is the spec that rebuilds it.

    The same tensor, seed and memory give the same bytes with any number of threads. Any number of threads may use one
    codec at once, each with tensors of its own.
    """

    def __init__(self, spec: str, converter: Converter):
        self.spec, self.converter = spec, converter

    def __str__(self) -> str:
        return self.spec

    def __repr__(self) -> str:
        return f"gradwire.codec({self.spec!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Codec) and self.spec == other.spec

    def __hash__(self) -> int:
        return hash(self.spec)

    @property
    def stochastic(self) -> bool:
        """Whether frames depend on the seed."""
        return self.converter.stochastic

    def runs_on(self, device: torch.device) -> bool:
        """Tell whether this device has kernels for this codec, so that a training leaves its gradients there.

        Where it has, the error memory is kept on the same device. Where it has not, a gradient is best copied to the
        CPU once: `encode_into` takes tensors of any device, but has to make that copy for every call, or runs on plain
        torch. For the CPU the answer is always yes.
        """
        return kernels.runs_on(device, self.converter.families)

    def max_frame_bytes(self, tensor: torch.Tensor) -> int:
        """Return how many bytes `encode_into` may write at most.

        That is room for the tensor as it is, or for five bytes an entry if it has segments; for a header; and for
        kernels that store more bytes at once than they need.
        """
        return tensor.numel() * max(5, tensor.dtype.itemsize) + 512 + 10 * tensor.dim()

    def encode(self, tensor: torch.Tensor, *, seed: int = 0) -> bytes:
        """Return the frame of a tensor of any shape, dtype and device."""
        tensor = _checked(tensor)
        out = torch.empty(self.max_frame_bytes(tensor), dtype=torch.uint8, device="cpu")
        return out[: self.encode_into(tensor, out, seed=seed)].numpy().tobytes()

    def encode_into(
        self,
        tensor: torch.Tensor,
        out: torch.Tensor,
        *,
        residual: torch.Tensor | None = None,
        residual_out: torch.Tensor | None = None,
        decay: float = 1.0,
        seed: int = 0,
        segments: Sequence[int] = (),
        part_of: int = 0,
    ) -> int:
        """Write the frame of `tensor + decay·residual` to the front of `out`, and return its length.

        The error memory (fp32, as large as the tensor) is updated in place, or the new one goes to `residual_out`.
        A tensor with a NaN or an infinity travels as it is, flagged, and leaves the memory as it was.
        `segments` says that the tensor consists of several small ones, laid end to end, which have these lengths.
        `part_of` is the number of entries of the whole tensor, if this is only a part of one: its step is then fitted
        to a smaller sample.
        """
        tensor = _checked(tensor)
        segments = _checked_segments(segments, tensor)
        _check_out(out, self.max_frame_bytes(tensor))
        if not isinstance(decay, Real) or not math.isfinite(decay) or decay < 0:
            raise GradwireError(f"decay must be a number from 0 on, usually up to 1, not {decay!r}")
        if not isinstance(seed, Integral):
            raise GradwireError(f"seed must be a whole number, not {seed!r}")
        if residual_out is None:
            residual_out = residual
        for memory in (residual, residual_out):
            _check_residual(memory, tensor)
        flat = tensor.reshape(-1).contiguous()
        gradient = flat.float() if tensor.dtype in CONVERTIBLE else None
        if gradient is None or not flat.numel():
            _keep(_flat(residual), _flat(residual_out))
            return _frame_of_stored(flat, tensor, out, 0)
        shape = tuple(tensor.shape)
        before, after = _flat(residual), _flat(residual_out)
        where_it_is = Conversion(gradient, flat, before, after, decay, seed, segments, shape, part_of)
        stays = kernels.takes(tensor.device, self.converter.families)
        conversion = where_it_is if stays else _on_cpu(where_it_is)
        converter = self.converter.for_tensor(shape, segments)
        try:
            if conversion.in_place and not converter.reads_ahead and (conversion.count <= CHECKED_AHEAD or not decay):
                conversion.require_finite()
            length = self._encode_finite(converter, conversion, tensor, out)
            if not stays and where_it_is.memory_out is not None and conversion.memory_out is not None:
                where_it_is.memory_out.copy_(conversion.memory_out)
            return length
        except NonFinite:
            if not where_it_is.in_place:
                _keep(where_it_is.memory, where_it_is.memory_out)
            finite = tensor.dtype == torch.float64 and bool(torch.isfinite(flat).all())
            return _frame_of_stored(flat, tensor, out, 0 if finite else headers.NONFINITE)

    def _encode_finite(
        self, converter: Converter, conversion: Conversion, tensor: torch.Tensor, out: torch.Tensor
    ) -> int:
        shape, dense = tuple(tensor.shape), tensor.numel() * tensor.dtype.itemsize
        if dense <= 32 and self.converter.stores_tiny:
            # Side information alone would take as much: send the few entries as they are.
            length = stored.Stored().encode(conversion, out[headers.header_length(shape, dense) :])
            return headers.seal(memoryview(out.numpy()), headers.STORED, tensor.dtype, shape, 0, length)
        start = headers.header_length(shape, converter.likely_length(tensor))
        length = converter.encode(conversion, out[start:])
        exact = headers.header_length(shape, length)
        if exact != start:
            frame = out.numpy()  # which moves bytes without torch's threads, and minds that both places overlap
            frame[exact : exact + length] = frame[start : start + length]
        flags = headers.SEGMENTED if conversion.segments and converter.lists_segments else 0
        return headers.seal(memoryview(out.numpy()), converter.wire_id, tensor.dtype, shape, flags, length)


def _on_cpu(conversion: Conversion) -> Conversion:
    """Return a copy whose tensors are on the CPU; if the memory is updated in place, so is that of the copy."""
    memory = None if conversion.memory is None else conversion.memory.cpu()
    memory_out = None
    if conversion.memory_out is not None:
        memory_out = memory if conversion.in_place else torch.empty(conversion.count, dtype=torch.float32, device="cpu")
    return replace(
        conversion,
        gradient=conversion.gradient.cpu(),
        original=conversion.original.cpu(),
        memory=memory,
        memory_out=memory_out,
    )


def _keep(memory: torch.Tensor | None, memory_out: torch.Tensor | None) -> None:
    """Copy the old memory to the new one, as nothing was quantized."""
    if memory_out is not None:
        memory_out.copy_(memory) if memory is not None else memory_out.zero_()


def _frame_of_stored(flat: torch.Tensor, tensor: torch.Tensor, out: torch.Tensor, flags: int) -> int:
    shape, length = tuple(tensor.shape), flat.numel() * flat.dtype.itemsize
    stored.store(flat, out[headers.header_length(shape, length) :])
    return headers.seal(memoryview(out.numpy()), headers.STORED, tensor.dtype, shape, flags, length)


def _checked(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise GradwireError(f"expected a torch.Tensor, got {type(tensor).__name__}")
    if tensor.layout != torch.strided:
        raise GradwireError(f"cannot encode layout {tensor.layout}: call .to_dense() first")
    if tensor.dtype not in headers.DTYPES:
        hint = ": encode torch.view_as_real(tensor)" if tensor.is_complex() else ""
        raise GradwireError(f"cannot encode {tensor.dtype}{hint}; supported: {', '.join(map(str, headers.DTYPES))}")
    if tensor.dim() > headers.MAX_RANK:
        raise GradwireError(f"a frame holds at most {headers.MAX_RANK} dimensions, not {tensor.dim()}: flatten first")
    if tensor.device.type == "meta":
        raise GradwireError("a tensor on the meta device has no values to encode")
    return tensor.detach().resolve_neg()


def _checked_segments(segments: Sequence[int], tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the lengths of the segments as ints, without segments that have no entries."""
    try:
        lengths = [operator.index(n) for n in segments]
    except TypeError:
        lengths = [-1]
    if lengths and (min(lengths) < 0 or sum(lengths) != tensor.numel()):
        raise GradwireError(f"segments must be lengths that add up to the {tensor.numel()} entries of the tensor")
    return tuple(n for n in lengths if n)


def _check_out(out: torch.Tensor, needed: int) -> None:
    if not isinstance(out, torch.Tensor):
        raise GradwireError(f"out must be a uint8 tensor, got {type(out).__name__}")
    if out.dtype != torch.uint8 or out.dim() != 1 or not out.is_contiguous() or out.device.type != "cpu":
        raise GradwireError("out must be a flat, contiguous uint8 tensor on the CPU")
    if out.numel() < needed:
        raise GradwireError(f"out has {out.numel()} bytes; codec.max_frame_bytes(tensor) asks for {needed}")


def _check_residual(memory: torch.Tensor | None, tensor: torch.Tensor) -> None:
    if memory is None:
        return
    if not isinstance(memory, torch.Tensor):
        raise GradwireError(f"residual must be a tensor, got {type(memory).__name__}")
    if memory.dtype != torch.float32 or memory.numel() != tensor.numel() or not memory.is_contiguous():
        raise GradwireError("residual must be a contiguous fp32 tensor with as many entries as the gradient")
    if memory.device != tensor.device:
        raise GradwireError(f"residual is on {memory.device}, the gradient on {tensor.device}")


def _flat(memory: torch.Tensor | None) -> torch.Tensor | None:
    return None if memory is None else memory.detach().reshape(-1)
