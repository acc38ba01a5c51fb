"""CUDA streams."""

from __future__ import annotations

import torch


def current_stream(device: int) -> int:
    """Return the address of the stream that is current on this GPU.

    Relies on `torch._C._cuda_getCurrentRawStream`, by which Triton launches its kernels in torch 2.8 to 2.15. Without
    it, torch.cuda.current_stream is asked, which takes as long as a launch.
    """
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    stream: int = raw(device) if raw is not None else torch.cuda.current_stream(device).cuda_stream
    return stream
