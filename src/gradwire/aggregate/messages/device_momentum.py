"""Momentum of all tensors of a message at once, where there are kernels for it; else of one after the other.

What is computed is what `WorkerMemories.accelerated` and `note_sent` do, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradwire import kernels
from gradwire.aggregate.messages.frame_coding import MemorySlot
from gradwire.aggregate.messages.tensor_parts import NamedTensors, TensorPart
from gradwire.correct.momentum import Factor
from gradwire.correct.worker_memories import WorkerMemories
from gradwire.cuda_runtime import programs
from gradwire.gpu.layout import DTYPES
from gradwire.gpu.momentum import DeviceMomentum, MaskTask, PushTask


class MomentumOfMessages:
    """Pushes and masks the velocities of one worker; called by the thread that encodes."""

    def __init__(self, memories: WorkerMemories):
        self.memories = memories
        self._devices: dict[torch.device, DeviceMomentum] = {}

    def accelerated(self, tensors: NamedTensors) -> list[torch.Tensor]:
        """Return for each gradient the velocity that it adds to, or the gradient where momentum is the optimizer's."""
        tasks = [self._push(name, tensor, in_place=False) for name, tensor in tensors]
        self._launch(tasks)
        return [
            _passed(task) if task is not None else self.memories.accelerated(name, tensor)
            for (name, tensor), task in zip(tensors, tasks, strict=True)
        ]

    def accelerate(self, tensors: NamedTensors) -> None:
        """Replace means by the velocities that they add to."""
        tasks = [self._push(name, tensor, in_place=True) for name, tensor in tensors]
        self._launch(tasks)
        for (name, tensor), task in zip(tensors, tasks, strict=True):
            if task is None:
                tensor.copy_(self.memories.accelerated(name, tensor))

    def note_sent(self, sent: Sequence[tuple[TensorPart, torch.Tensor, MemorySlot, float]]) -> None:
        """Mask the velocities where something was sent, of (part, values, memory, decay): see `sent_of`."""
        tasks: dict[torch.device, list[MaskTask]] = {}
        for part, values, slot, decay in sent:
            velocity = self.memories.velocity.pending(part.name) if self.memories.has_momentum(part.name) else None
            if velocity is None or not _fits(velocity, values.device):
                self.memories.note_sent(part.name, sent_of(values, slot, decay), part.lo)
                continue
            task = MaskTask(part.of(velocity), values, slot.before, slot.after, decay * slot.factor)
            tasks.setdefault(values.device, []).append(task)
        for device, of_device in tasks.items():
            self._on(device).mask(of_device)

    def _push(self, name: str, tensor: torch.Tensor, in_place: bool) -> PushTask | None:
        """Return what a kernel has to do for this tensor; None if it is done otherwise."""
        factor = self.memories.factor(name)
        if factor is None or not factor.momentum or not _fits(tensor, tensor.device):
            return None
        if factor.weight_decay and not _fits(factor.parameter, tensor.device):
            return None
        found = self.memories.velocity.buffers(name, tensor)
        return None if found is None else _task(tensor, *found, factor, in_place)

    def _launch(self, tasks: Sequence[PushTask | None]) -> None:
        by_device: dict[torch.device, list[PushTask]] = {}
        for task in tasks:
            if task is not None:
                by_device.setdefault(task.gradient.device, []).append(task)
        for device, of_device in by_device.items():
            self._on(device).push(of_device)

    def _on(self, device: torch.device) -> DeviceMomentum:
        if device not in self._devices:
            self._devices[device] = DeviceMomentum(device)
        return self._devices[device]


def sent_of(values: torch.Tensor, slot: MemorySlot, decay: float) -> torch.Tensor:
    """Return which entries were sent: those that the new error memory does not hold whole."""
    wanted = kernels.compensate(values.float(), slot.before, decay * slot.factor)
    return wanted.view(-1) != slot.after.view(-1)


def _task(
    gradient: torch.Tensor, before: torch.Tensor | None, velocity: torch.Tensor, factor: Factor, in_place: bool
) -> PushTask:
    out = gradient if in_place else torch.empty_like(velocity) if factor.nesterov else None
    parameter = factor.parameter.detach() if factor.weight_decay else None
    return PushTask(
        gradient, before, velocity, factor.momentum, factor.nesterov, parameter, factor.weight_decay, out
    )  # fmt: skip


def _passed(task: PushTask) -> torch.Tensor:
    passed = task.out if task.out is not None else task.velocity
    assert passed is not None
    return passed


def _fits(tensor: torch.Tensor, device: torch.device) -> bool:
    """Tell whether kernels can work on the tensor as it is."""
    return tensor.device == device and tensor.dtype in DTYPES and tensor.is_contiguous() and programs.can_run(device)
