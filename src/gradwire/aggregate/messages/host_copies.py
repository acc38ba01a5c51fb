"""Tensors as the exchange wants them: contiguous, and on a device that has kernels for their codec.

Most are already, and are averaged in place. Others are copied to the CPU, where there are kernels for every codec, and
get their means back at the end of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch

from gradwire import gpu
from gradwire.aggregate.messages.model_recipes import ModelRecipes
from gradwire.aggregate.messages.tensor_parts import NamedTensors, TensorPart


class HostCopies:
    """The tensors of one step, by name, as the exchange has them.

    `mark_ready` is called by the training's thread when it hands tensors over; everything else by the thread that runs
    the exchange. Copies from a GPU go to pinned memory, which is kept for the next step, on a stream of their own.
    """

    def __init__(self, recipes: ModelRecipes) -> None:
        self._recipes = recipes
        self.tensors: dict[str, torch.Tensor] = {}  # of this step
        self._originals: dict[str, torch.Tensor] = {}  # of those that were copied
        self._pinned: dict[str, torch.Tensor] = {}
        self._stream: torch.cuda.Stream | None = None
        self._staying: dict[tuple[str, torch.device, torch.dtype, int], bool] = {}
        self._resident: torch.device | None = None  # a GPU on which tensors are averaged where they are

    def mark_ready(self, tensors: NamedTensors) -> list[torch.cuda.Event]:
        """Return events behind which the tensors hold their values; none if none of them is on a GPU."""
        device = next((t.device for _, t in tensors if t.is_cuda), None)
        return [] if device is None else [torch.cuda.current_stream(device).record_event()]

    def of_parts(self, parts: list[TensorPart], ready: Sequence[torch.cuda.Event]) -> list[TensorPart]:
        """Return the same parts of the tensors that the exchange works on, when all of `ready` have come."""
        copies = [self._copy_of(part, ready) for part in parts]
        if all(part.tensor is copy for part, copy in zip(parts, copies, strict=True)):
            return parts  # the list itself, of which more may be known
        return [replace(part, tensor=copy) for part, copy in zip(parts, copies, strict=True)]

    def _copy_of(self, part: TensorPart, ready: Sequence[torch.cuda.Event]) -> torch.Tensor:
        name = part.name
        if name not in self.tensors:
            tensor = part.tensor.detach() if part.tensor.requires_grad else part.tensor
            copy = tensor
            if not (tensor.is_cpu or self._stays(part, tensor)):
                copy = self._from_gpu(name, tensor, ready) if tensor.is_cuda else tensor.cpu()
            elif tensor.is_cuda:  # this thread's stream does the work where the tensor is
                self._resident = tensor.device
                for event in ready:
                    torch.cuda.current_stream(tensor.device).wait_event(event)
            if not copy.is_contiguous():
                copy = copy.contiguous()
            if copy is not tensor:
                self._originals[name] = tensor
            self.tensors[name] = copy
        return self.tensors[name]

    def _stays(self, part: TensorPart, tensor: torch.Tensor) -> bool:
        """Tell whether there are kernels for the tensor where it is."""
        key = part.name, tensor.device, tensor.dtype, self._recipes.generation
        if key not in self._staying:
            codec = self._recipes.of_part(part).codec
            takes = gpu.can_encode(codec.converter, tensor.dtype, tensor.device)
            self._staying[key] = takes or codec.runs_on(tensor.device)
        return self._staying[key]

    def _from_gpu(self, name: str, tensor: torch.Tensor, ready: Sequence[torch.cuda.Event]) -> torch.Tensor:
        copy = self._pinned.get(name)
        if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
            copy = self._pinned[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        if self._stream is None:
            self._stream = torch.cuda.Stream(tensor.device)
        with torch.cuda.stream(self._stream):
            for event in ready:
                self._stream.wait_event(event)
            copy.copy_(tensor, non_blocking=True)
        self._stream.synchronize()
        return copy

    def put_back(self, wait: bool) -> torch.cuda.Stream | None:
        """Copy the means to the tensors that copies were made of.

        Those on a GPU are waited for, unless the stream is returned that makes them.
        """
        for name, original in self._originals.items():
            copy = self.tensors[name]  # if on a GPU, this thread's stream may not have come so far that it is the mean
            with torch.cuda.stream(self._stream) if self._stream is not None and copy.is_cpu else nullcontext():
                original.copy_(copy, non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()
        if self._resident is None:
            return None
        stream = torch.cuda.current_stream(self._resident)
        if wait:
            stream.synchronize()
            return None
        return stream

    def clear(self) -> None:
        """Forget the tensors of this step."""
        self.tensors.clear()
        self._originals.clear()
