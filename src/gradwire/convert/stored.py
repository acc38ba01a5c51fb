"""The tensor as it is: the codec `none`, and the pass-through of what cannot be quantized."""

from __future__ import annotations

import numpy as np
import torch

from gradwire.convert.blocks import combine, wide_blocks
from gradwire.convert.conversion import Conversion, Converter, limit_to, require_finite
from gradwire.errors import FrameError
from gradwire.frame.headers import STORED, Header


class Stored(Converter):
    """Every entry as it is."""

    wire_id = STORED
    families = ("quantize",)
    elementwise = True

    def encode(self, conversion: Conversion, out: torch.Tensor) -> int:
        """Write the payload and update the error memory, as `Converter.encode` promises."""
        conversion.require_finite()
        if conversion.memory is None:
            if conversion.memory_out is not None:
                conversion.memory_out.zero_()
            return store(conversion.original, out)
        u = conversion.compensated()
        require_finite(u)  # a memory that is not would spoil the frame
        sent = limit_to(u, conversion.dtype)
        if conversion.memory_out is not None:
            torch.sub(u, sent.float(), out=conversion.memory_out)
        return store(sent, out)

    def likely_length(self, tensor: torch.Tensor) -> int:
        """Return the length of the payload: that of the tensor."""
        return tensor.nbytes


def store(flat: torch.Tensor, out: torch.Tensor) -> int:
    """Copy the bytes of a flat tensor to the front of `out`, and return their number."""
    if not flat.numel():
        return 0
    raw = flat.contiguous().as_strided(flat.shape, (1,)).view(torch.uint8)  # one entry may have any stride
    out[: len(raw)] = raw
    return len(raw)


def decode(header: Header, payload: np.ndarray, out: torch.Tensor, weight: float, accumulate: bool) -> None:
    """Write weight·stored to `out`, or add it."""
    if len(payload) != header.elements * header.dtype.itemsize:
        raise FrameError("wrong length of a stored tensor")
    if not header.elements:
        return
    if header.dtype is torch.bool and int(payload.max()) > 1:
        raise FrameError("damaged bool tensor")
    if out.is_cpu and out.dtype == header.dtype and weight == 1 and not accumulate:
        out.view(torch.uint8).numpy()[:] = payload
        return
    size = header.dtype.itemsize
    for part in wide_blocks(header.elements):
        # Copied: the payload may start at an odd address.
        values = torch.from_numpy(payload[part.start * size : part.stop * size].copy()).view(header.dtype)
        combine(values, out[part], weight, accumulate)
