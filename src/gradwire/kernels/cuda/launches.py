"""Launches of programs in CUDA C++ on tensors, and what the kernels here share: entries in units of 1024 (units.h)."""

from __future__ import annotations

import struct

import torch

from gradwire.cuda_runtime import programs
from gradwire.cuda_runtime.launcher import Arguments

UNIT = 1024  # entries of a warp
WARPS, THREADS = 8, 256  # of a block
MOST_BLOCKS = 2112  # of kernels whose threads go through all entries in turn: sixteen for each unit of a large GPU


def flat(tensor: torch.Tensor) -> bool:
    """Tell whether kernels read a tensor as it is; of those that are given beside it, the same is expected."""
    return tensor.is_contiguous() and programs.can_run(tensor.device)


def flat_fp32(tensor: torch.Tensor) -> bool:
    """Tell whether kernels for fp32 read a tensor as it is."""
    return tensor.dtype == torch.float32 and flat(tensor)


class Launcher:
    """Starts the kernels of one program on the current stream of one device."""

    def __init__(self, program: str, device: torch.device):
        self.program, self.device = program, device

    def start(self, kernel: str, blocks: int, threads: int, *arguments: torch.Tensor | int | None) -> None:
        """Start a kernel with this many blocks of this many threads."""
        if not blocks:
            return
        launch = programs.kernel(self.program, kernel, self.device)
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                launch(blocks, threads, Arguments(*arguments))
        else:
            launch(blocks, threads, Arguments(*arguments))

    def for_each(self, count: int, kernel: str, *arguments: torch.Tensor | int | None) -> None:
        """Start a kernel whose threads go through `count` items in turn."""
        self.start(kernel, min(-(-count // THREADS), MOST_BLOCKS), THREADS, *arguments)

    def for_units(self, units: int, kernel: str, *arguments: torch.Tensor | int | None) -> None:
        """Start a kernel with a warp for each unit."""
        self.start(kernel, -(-units // WARPS), THREADS, *arguments)

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor for results."""
        return torch.empty(count, dtype=dtype, device=self.device)

    def zeros(self, count: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Return a tensor of zeros; numbers that kernels count and the host reads are int64."""
        return torch.zeros(count, dtype=dtype, device=self.device)

    def sum_up(self, counts: torch.Tensor, units: int, total: torch.Tensor) -> None:
        """Replace the number of entries of each unit by how many there are before it, and write their total."""
        Launcher("units", self.device).start("sum_up", 1, 1024, counts, units, total)


def fp32_bits(x: float) -> int:
    """Return a number as kernels take it: the bits of the nearest fp32 number."""
    return int(struct.unpack("<I", struct.pack("<f", x))[0])


def fp64_bits(x: float) -> int:
    """Return a number as kernels take it: the bits of an fp64 number."""
    return int(struct.unpack("<q", struct.pack("<d", x))[0])
