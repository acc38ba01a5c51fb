"""Error feedback with decay (the "correct" of CO3): u = g + γe is sent as ĝ, and e ← u − ĝ.

Memory is fp32 (or bf16, memory_dtype.py), kept by parameter name (DDP rebuilds its buckets after the first step), and
provisional within a step: `commit` when all workers' gradients were finite, `rollback` when one was not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from gradwire.checkpoints.saved_values import tensors_in
from gradwire.errors import CheckpointError, GradwireError


class ErrorMemory:
    """The error memory of one worker: what each parameter's frames have left out so far, in fp32 or bf16.

    Within a step, memory is read from one buffer and written to another, which counts only after `commit`: a step in
    which some worker's gradient was not finite is undone by `rollback`. One thread at a time may call it; between two
    steps any thread may.
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype
        self.memory: dict[str, torch.Tensor] = {}
        self._spare: dict[str, torch.Tensor] = {}
        self._pending: set[str] = set()

    def buffers(self, name: str, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (memory to read, memory to write) of a parameter; the second counts only after `commit`."""
        if name not in self.memory:
            self.memory[name] = torch.zeros(gradient.shape, dtype=self.dtype, device=gradient.device)
        memory = self.memory[name]
        if memory.device != gradient.device:  # of a checkpoint, or of a recipe without kernels for that device
            memory = self.memory[name] = memory.to(gradient.device)
            self._spare.pop(name, None)
        if memory.shape != gradient.shape:
            raise GradwireError(
                f"error memory of {name!r} has shape {tuple(memory.shape)}, its gradient {tuple(gradient.shape)}"
            )
        if name not in self._spare:
            self._spare[name] = memory.clone()  # of some tensors only a part is ever sent by this rank
        self._pending.add(name)
        return memory, self._spare[name]

    def keep(self, name: str, lo: int, hi: int) -> None:
        """Leave the entries lo … hi as they are in this step, in which other entries of the parameter may be sent."""
        if name in self.memory:
            before, after = self.buffers(name, self.memory[name])
            after.view(-1)[lo:hi].copy_(before.view(-1)[lo:hi])

    def forget(self, name: str) -> torch.Tensor | None:
        """Return the memory of a parameter, which has none from now on."""
        self._spare.pop(name, None)
        return self.memory.pop(name, None)

    def replace(self, name: str, memory: torch.Tensor) -> None:
        """Give a parameter another memory, between two steps."""
        self._spare.pop(name, None)
        self.memory[name] = memory

    def add(self, name: str, memory: torch.Tensor, times: float) -> None:
        """Add `times` this memory to that of a parameter, between two steps."""
        present = self.memory.setdefault(name, torch.zeros(memory.shape, dtype=self.dtype, device="cpu"))
        present.add_(memory, alpha=times)

    def rescale(self, factor: float) -> None:
        """Multiply all memory: gradients are this many times larger from now on, because a loss scale changed."""
        for memory in self.memory.values():
            memory.mul_(factor)

    def commit(self) -> None:
        """End a step whose gradients were finite on all workers: what was written counts from now on."""
        for name in self._pending:
            self.memory[name], self._spare[name] = self._spare[name], self.memory[name]
        self._pending.clear()

    def rollback(self) -> None:
        """End a step with a gradient that was not finite: memory stays what it was before the step."""
        self._pending.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return copies of all memory, by parameter name, under the key "memory"."""
        return {"memory": {name: e.clone() for name, e in self.memory.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over copies of a state's memory in place of all that there is; CheckpointError if it is no such state.

        Shapes are compared when memories are used, since it is not known here which parameters there are.
        """
        if not isinstance(state, Mapping) or "memory" not in state:
            raise CheckpointError("not the state of an error memory: expected {'memory': {name: tensor}}")
        self.load(tensors_in(state, "memory", dtype=self.dtype))

    def load(self, memory: Mapping[str, torch.Tensor]) -> None:
        """Take over these memories, which nobody else writes to, in place of all that there are."""
        self.memory = dict(memory)
        self._spare.clear()
        self._pending.clear()
