"""fp16 and bf16: two bytes an entry, saturating where PyTorch's own hook overflows."""

from __future__ import annotations

import numpy as np
import torch

from gradwire.convert.blocks import combine, wide_blocks
from gradwire.convert.conversion import Conversion, Converter, limit_to, require_finite
from gradwire.errors import FrameError
from gradwire.frame.headers import CAST, DTYPES, Header

TARGETS = (torch.float16, torch.bfloat16)


class Cast(Converter):
    """Every entry in fp16 or bf16."""

    wire_id = CAST
    families = ("quantize",)
    elementwise = True

    def __init__(self, target: torch.dtype):
        self.target = target

    def encode(self, conversion: Conversion, out: torch.Tensor) -> int:
        """Write the payload and update the error memory, as `Converter.encode` promises."""
        conversion.require_finite()
        u = conversion.gradient
        if conversion.memory is not None:
            u = conversion.compensated()
            require_finite(u)  # a memory that is not would spoil the frame
        length = self.likely_length(conversion.original)
        out[0] = DTYPES.index(self.target)
        raw = out[1:length]
        for part in wide_blocks(conversion.count) if u.is_cpu else (slice(0, conversion.count),):
            sent = limit_to(u[part], self.target)
            if conversion.memory_out is not None:
                torch.sub(u[part], limit_to(sent.float(), conversion.dtype).float(), out=conversion.memory_out[part])
            raw[2 * part.start : 2 * part.stop] = sent.view(torch.uint8)
        return length

    def likely_length(self, tensor: torch.Tensor) -> int:
        """Return the length of the payload, which does not depend on the entries."""
        return 1 + 2 * tensor.numel()


def decode(header: Header, payload: np.ndarray, out: torch.Tensor, weight: float, accumulate: bool) -> None:
    """Write weight·decoded to `out`, or add it."""
    count = header.elements
    target = DTYPES[int(payload[0])] if len(payload) and payload[0] < len(DTYPES) else None
    always_stored = not count or not header.dtype.is_floating_point
    if target not in TARGETS or len(payload) != 1 + 2 * count or always_stored:
        raise FrameError("damaged cast frame")
    for part in wide_blocks(count):
        # Copied, since the payload may start at an odd address,
        # and limited once more: bf16 rounds the largest numbers of fp16 beyond its range.
        sent = torch.from_numpy(payload[1 + 2 * part.start : 1 + 2 * part.stop].copy()).view(target).float()
        combine(limit_to(sent, header.dtype), out[part], weight, accumulate)
