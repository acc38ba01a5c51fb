"""Error memory of parameters of which different parts are sent to different ranks (FSDP).

One flat tensor for each parameter name, fp32 or bf16, twice: what counts, and what will count from the end of the
step on (`commit`), unless a gradient was not finite (`rollback`). It is on the device where gradients are coded.

A loss scale multiplies gradients, and with them what is not sent. Memory is stored as it came, beside the scale of
its step, and read times new scale over old, which loses nothing since scales are powers of two.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from gradwire.errors import GradwireError


class PartErrorMemory:
    """The error memory of sharded parameters, flat and by name.

    As in `ErrorMemory`, what is written in a step counts only after `commit`. One thread at a time may call it.
    """

    def __init__(self, dtype: torch.dtype = torch.float32):
        self.dtype = dtype
        self.scale = 1.0  # the loss scale of this step
        self._memory: dict[str, torch.Tensor] = {}
        self._scales: dict[str, float] = {}  # of the steps in which they were written
        self._spare: dict[str, torch.Tensor] = {}
        self._pending: dict[str, float] = {}  # parameters that have sent something in this step, and its scale

    def rescale(self, scale: float) -> None:
        """Follow the loss scale of this step."""
        self.scale = scale

    def at(
        self, name: str, part: slice, entries: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor, float]:
        """Return memory to read, memory to write and a factor for the first, of a part of a parameter.

        `entries` is the number of entries of the whole parameter; its memory moves to the device.
        """
        if name not in self._memory:
            self._memory[name] = torch.zeros(entries, dtype=self.dtype, device=device)
            self._scales[name] = self.scale
        memory = self._memory[name]
        if len(memory) != entries:
            raise GradwireError(f"error memory of {name!r} has {len(memory)} entries, its gradient {entries}")
        if memory.device != device:  # of a checkpoint, or of a recipe without kernels for that device
            memory = self._memory[name] = memory.to(device)
            if name in self._spare:
                self._spare[name] = self._spare[name].to(device)
        if name not in self._spare:
            self._spare[name] = memory.clone()  # parts with another recipe, without memory, stay as they are
        return memory[part], self._spare[name][part], self.scale / self._scales[name]

    def written(self, names: Iterable[str]) -> None:
        """Say that all parts of these parameters were written: they count from `commit` on."""
        self._pending |= {name: self.scale for name in names if name in self._spare}

    def commit(self) -> None:
        """End a step whose gradients were finite on all workers: what was written counts from now on."""
        for name, scale in self._pending.items():
            self._memory[name], self._spare[name] = self._spare[name], self._memory[name]
            self._scales[name] = scale
        self._pending.clear()

    def rollback(self) -> None:
        """End a step with a gradient that was not finite: memory stays what it was before the step."""
        self._pending.clear()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the memory of each parameter, flat, without a loss scale and in the host's memory."""
        return {name: (e / self._scales[name]).cpu() for name, e in self._memory.items()}

    def load(self, memory: dict[str, torch.Tensor]) -> None:
        """Take over copies of this memory, which has no loss scale, in place of all that there is."""
        self._memory = {name: e.detach().reshape(-1).to(self.dtype, copy=True) for name, e in memory.items()}
        self._scales = dict.fromkeys(memory, 1.0)
        self._spare.clear()
        self._pending.clear()
