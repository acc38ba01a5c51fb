"""Tensors as the exchange wants them: contiguous and on the CPU, where the native kernels are.

Most are, and are averaged in place. Others are copied, and get their means back at the end of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from gradwire.aggregate.messages.tensor_parts import Named, Part


class HostCopies:
    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}  # of this step, by name, as the exchange has them
        self._originals: dict[str, torch.Tensor] = {}  # of those that were copied
        self._pinned: dict[str, torch.Tensor] = {}
        self._stream: torch.cuda.Stream | None = None

    def submitted(self, tensors: Named) -> torch.cuda.Event | None:
        """In the training's thread: a mark behind which the tensors are what they should be."""
        device = next((t.device for _, t in tensors if t.is_cuda), None)
        if device is None:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        return event

    def staged(self, parts: Sequence[Part], ready: torch.cuda.Event | None) -> list[Part]:
        return [replace(part, tensor=self._staged(part.name, part.tensor, ready)) for part in parts]

    def _staged(self, name: str, tensor: torch.Tensor, ready: torch.cuda.Event | None) -> torch.Tensor:
        if name not in self.tensors:
            tensor = tensor.detach()
            own = tensor
            if tensor.is_cuda:
                own = self._from_gpu(name, tensor, ready)
            elif not tensor.is_contiguous():
                own = tensor.contiguous()
            if own is not tensor:
                self._originals[name] = tensor
            self.tensors[name] = own
        return self.tensors[name]

    def _from_gpu(self, name: str, tensor: torch.Tensor, ready: torch.cuda.Event | None) -> torch.Tensor:
        own = self._pinned.get(name)
        if own is None or own.shape != tensor.shape or own.dtype != tensor.dtype:
            own = self._pinned[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        if self._stream is None:
            self._stream = torch.cuda.Stream(tensor.device)
        with torch.cuda.stream(self._stream):
            if ready is not None:
                self._stream.wait_event(ready)
            own.copy_(tensor, non_blocking=True)
        self._stream.synchronize()
        return own

    def put_back(self) -> None:
        with torch.cuda.stream(self._stream):  # of no effect where there is none
            for name, original in self._originals.items():
                original.copy_(self.tensors[name], non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()

    def clear(self) -> None:
        self.tensors.clear()
        self._originals.clear()
