"""`decode`: one frame in, one tensor out. It needs nothing but the frame.

`DECODERS` lists the decoder of every codec number that docs/wire-format.md gives out.
"""

from __future__ import annotations

from numbers import Real

import numpy as np
import torch

from gradwire.convert import cast, ecq, homomorphic, levels, minifloat, sketch, sparse, stored, structured
from gradwire.errors import FrameError, GradwireError
from gradwire.frame import headers

DECODERS = {
    headers.STORED: stored.decode,
    headers.MINIFLOAT: minifloat.decode,
    headers.CAST: cast.decode,
    headers.GRID: ecq.decode,
    headers.LEVELS: levels.decode,
    headers.SPARSE: sparse.decode,
    headers.SKETCH: sketch.decode,
    headers.HOMOMORPHIC: homomorphic.decode,
    headers.STRUCTURED: structured.decode,
}
SEGMENTED_CODECS = (headers.MINIFLOAT, headers.GRID, headers.LEVELS)
assert sorted(DECODERS) == list(range(len(DECODERS))), "every codec number on the wire has a decoder"
DEFAULT_LIMIT = 2**28  # elements; decode allows more if the frame has a byte for every ELEMENTS_PER_BYTE of them
ELEMENTS_PER_BYTE = 4096
Bytes = bytes | bytearray | memoryview | np.ndarray | torch.Tensor


def as_bytes(frame: Bytes) -> np.ndarray:
    """Return a flat uint8 array over the same bytes."""
    if isinstance(frame, torch.Tensor):
        if frame.dtype != torch.uint8:
            raise FrameError(f"a frame is bytes or a uint8 tensor, not {frame.dtype}")
        return frame.detach().reshape(-1).contiguous().cpu().numpy()
    if not isinstance(frame, (bytes, bytearray, memoryview, np.ndarray)):
        raise FrameError(f"a frame is bytes or a uint8 tensor, not {type(frame).__name__}")
    if isinstance(frame, (memoryview, np.ndarray)):
        frame = np.ascontiguousarray(frame)
    return np.frombuffer(frame, dtype=np.uint8)


def decode(
    frame: Bytes,
    *,
    out: torch.Tensor | None = None,
    max_elements: int | None = None,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Return the tensor of a frame, in its shape and dtype; it is written to `out` if that is given.

    Otherwise it is on the CPU, unless `device` is another: torch's default device has no say in it.
    `max_elements` limits what an untrusted frame can make us allocate. By default it is 2²⁸, or 4096
    elements for each byte of the frame, whichever is more.
    """
    data = as_bytes(frame)
    header, payload = open_frame(data)
    if max_elements is None:
        max_elements = max(DEFAULT_LIMIT, ELEMENTS_PER_BYTE * len(data))
    elif not isinstance(max_elements, Real) or not max_elements >= 0:
        raise GradwireError(f"max_elements is a number of elements, such as 10**8, not {max_elements!r}")
    if out is None:
        if header.elements > max_elements:
            raise FrameError(f"frame declares {header.elements} elements; the limit is max_elements={max_elements}")
        out = _allocate(header, payload, torch.device("cpu") if device is None else _usable(device))
    elif not isinstance(out, torch.Tensor) or out.layout != torch.strided or out.device.type == "meta" or out.is_neg():
        raise GradwireError("out must be an ordinary dense tensor")
    elif any(stride == 0 and size > 1 for stride, size in zip(out.stride(), out.shape, strict=True)):
        raise GradwireError("out is an expanded tensor, whose entries share memory: clone it first")
    elif out.shape != header.shape or out.dtype != header.dtype:
        raise FrameError(f"out is {out.dtype} of shape {tuple(out.shape)}, the frame {header.dtype} of {header.shape}")
    decode_payload(header, payload, out)
    return out


def _usable(device: torch.device | str) -> torch.device:
    """Return the device that a tensor is to be on. GradwireError if this torch can put no values there."""
    try:
        found = torch.empty(0, dtype=torch.uint8, device=device).device
    except (RuntimeError, TypeError, AssertionError) as error:  # torch raises the last without CUDA
        raise GradwireError(f"device={device!r} cannot be used: {str(error).splitlines()[0]}") from error
    if found.type == "meta":
        raise GradwireError("device='meta' cannot be used: a tensor there has no values")
    return found


def _allocate(header: headers.Header, payload: np.ndarray, device: torch.device) -> torch.Tensor:
    if header.codec == headers.STORED and len(payload) != header.elements * header.dtype.itemsize:
        raise FrameError("wrong length of a stored tensor")
    try:
        return torch.empty(header.shape, dtype=header.dtype, device=device)
    except (RuntimeError, MemoryError) as error:
        raise FrameError(f"no memory for a frame of {header.elements} elements") from error


def open_frame(data: np.ndarray) -> tuple[headers.Header, np.ndarray]:
    """Return header and payload of a frame whose checksum is right and whose codec is known."""
    view = memoryview(data)
    header = headers.read_header(view)
    return header, payload_of(header, view)


def payload_of(header: headers.Header, frame: memoryview) -> np.ndarray:
    """Return the payload of a frame whose header was read, if the checksum is right and the codec known."""
    headers.verify(header, frame)
    if header.codec not in DECODERS:
        raise FrameError(f"unknown codec {header.codec} in frame")
    if header.flags & headers.SEGMENTED and header.codec not in SEGMENTED_CODECS:
        raise FrameError("a frame of this codec has no segments")
    return np.frombuffer(frame, dtype=np.uint8)[header.length :]


def bound(header: headers.Header, payload: np.ndarray) -> float | None:
    """Return a magnitude that no entry exceeds, or None if that takes decoding the symbols."""
    return minifloat.bound(header, payload) if header.codec == headers.MINIFLOAT else None


def nonzero_positions(frame: Bytes) -> torch.Tensor:
    """Return where the tensor of a frame is not zero (flat, ascending, int64); of sparse frames without making it."""
    header, payload = open_frame(as_bytes(frame))
    if header.codec == headers.SPARSE and header.elements:
        return sparse.nonzero_positions(header, payload)
    return decode(frame).reshape(-1).nonzero().view(-1)


def decode_onto(header: headers.Header, payload: np.ndarray, out: torch.Tensor, onto: torch.Tensor) -> torch.Tensor:
    """Write onto + decoded to `out`, both contiguous fp32 tensors of the frame's size."""
    if header.codec != headers.MINIFLOAT or not minifloat.decode_onto(header, payload, out.view(-1), onto.view(-1)):
        out.copy_(onto)
        decode_payload(header, payload, out, accumulate=True)
    return out


def decode_payload(
    header: headers.Header, payload: np.ndarray, out: torch.Tensor, weight: float = 1.0, accumulate: bool = False
) -> None:
    """Write weight·decoded to `out`, or add it; `out` may have another shape and float dtype, and be on any device."""
    out = out.detach()
    flat = out.contiguous().view(-1)  # a view, or a copy of an `out` that is not contiguous
    DECODERS[header.codec](header, payload, flat, weight, accumulate)
    if not out.is_contiguous():
        out.copy_(flat.view(out.shape))
