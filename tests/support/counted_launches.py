"""The GPU's kernels on the CPU, within a context, and which of them were launched how often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gradwire.cuda_runtime import programs
from gradwire.cuda_runtime.launcher import Arguments
from support.cuda_on_cpu import CudaOnCpu


class Counting(CudaOnCpu):
    """Counts launches, so that a test knows who did the work."""

    def __init__(self) -> None:
        self.launches: Counter[str] = Counter()

    def kernel(self, program: Any, name: str, device: torch.device) -> Any:
        """Return a kernel that counts."""
        launch = super().kernel(program, name, device)

        def counted(blocks: int, threads: int, arguments: Arguments) -> None:
            self.launches[name] += 1
            launch(blocks, threads, arguments)

        return counted


@contextmanager
def on_device() -> Iterator[Counter[str]]:
    """Within the context this rank takes the host's memory for a GPU's."""
    backend = Counting()
    before = programs.use_backend(backend)
    try:
        yield backend.launches
    finally:
        programs.use_backend(before)
