"""fp16 and bf16: two bytes an entry, saturating where PyTorch's own hook overflows."""

from __future__ import annotations

import numpy as np
import torch

from ..errors import FrameError
from ..wire import CAST, DTYPES, Header
from .job import Job, combine

TARGETS = (torch.float16, torch.bfloat16)


class Cast:
    wire_id = CAST

    def __init__(self, target: torch.dtype):
        self.target = target

    def encode(self, job: Job, out: torch.Tensor) -> int:
        job.require_finite()
        limit = torch.finfo(self.target).max
        u = job.compensated()
        sent = u.clamp(-limit, limit).to(self.target)
        if job.memory_out is not None:
            # The receiver sees the value in the tensor's own dtype.
            torch.sub(u, sent.to(job.dtype).float(), out=job.memory_out)
        length = 1 + 2 * job.count
        out[0] = DTYPES.index(self.target)
        out[1:length] = sent.cpu().view(torch.uint8)
        return length


def decode(header: Header, payload: np.ndarray, out: torch.Tensor, weight: float, accumulate: bool) -> None:
    count = header.elements
    target = DTYPES[int(payload[0])] if len(payload) and payload[0] < len(DTYPES) else None
    if target not in TARGETS or len(payload) != 1 + 2 * count:
        raise FrameError("damaged cast frame")
    # Copied: the payload may start at an odd address.
    combine(torch.from_numpy(payload[1:].copy()).view(target).to(header.dtype), out, weight, accumulate)
