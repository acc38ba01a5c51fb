"""Which tensors of a message have an entry that is not zero, by one launch for all of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from gradwire.cuda_runtime import programs
from gradwire.cuda_runtime.launcher import Arguments
from gradwire.gpu.workspace import Workspace, host_bytes

SPAN = np.dtype([("at", "u8"), ("count", "i8"), ("itemsize", "i8")])


class NonzeroFinder:
    """Looks at tensors of one device, on the current stream of the calling thread."""

    def __init__(self, device: torch.device):
        self.device, self._space = device, Workspace(device)
        self._host = host_bytes(0, device)

    def find(self, tensors: Sequence[torch.Tensor]) -> list[bool]:
        """Return for each tensor (contiguous, fp32, fp16 or bf16) whether it has an entry that is not zero."""
        spans = np.array([(t.data_ptr(), t.numel(), t.element_size()) for t in tensors], dtype=SPAN)
        size = spans.nbytes
        if self._host.numel() < size:
            self._host = host_bytes(2 * size, self.device)
        self._host.numpy()[:size] = spans.view(np.uint8)
        room = self._space.room("spans", size + len(tensors))
        room[:size].copy_(self._host[:size], non_blocking=True)
        found = room[size : size + len(tensors)]
        programs.kernel("presence", "find_nonzero", self.device)(len(tensors), 256, Arguments(room, found))
        return [bool(flag) for flag in found.cpu().tolist()]
