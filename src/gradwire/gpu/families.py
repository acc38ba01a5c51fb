"""What a family of converters tells the encoder of a message: which pieces its frames have, and its launches.

To bring another family to the GPU, write a file with a `Family` here and sources/<family>.cu, and list it in
`FAMILIES` of encoder.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from gradwire.convert.conversion import Converter
from gradwire.cuda_runtime import programs
from gradwire.cuda_runtime.launcher import Arguments
from gradwire.frame.byte_fields import varint
from gradwire.gpu.structures import PART, SAMPLE

RAW, RANS = 0, 3
ONE = b"\x80\x3f"  # as bf16: the step of tensors that are zero everywhere
SOME_BLOCKS = 528  # four for each of 132 multiprocessors
GENNORM, HISTOGRAM = 1, 2  # bits of the models that may be used


@dataclass
class TensorTask:
    """One tensor on its way into a frame; all tensors are contiguous and on the device."""

    gradient: torch.Tensor
    before: torch.Tensor | None = None  # its error memory, fp32
    after: torch.Tensor | None = None  # where the new one goes
    factor: float = 1.0  # by which the memory is multiplied, beside the decay


@dataclass
class FrameTask:
    """One frame: a tensor, or several small ones laid end to end."""

    converter: Converter
    tensors: Sequence[TensorTask]
    shape: tuple[int, ...]
    decay: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Find the number of entries of each tensor, and of all of them, and the dtype, which is that of the frame."""
        self.dtype = self.tensors[0].gradient.dtype
        self.lengths = tuple([t.gradient.numel() for t in self.tensors])
        self.count = sum(self.lengths)


@dataclass
class StreamPlan:
    """Symbols that are coded together: all those of the frame, in order, unless the family says otherwise."""

    alphabet: int
    zero: int  # the symbol whose frequency is not sent
    coder: int = RANS
    models: int = HISTOGRAM
    most: int | None = None  # the most symbols that it can have, if that is not the number of entries


@dataclass
class Bytes:
    """A piece of a frame that is bytes: of a template, at whose `steps` tensors state their steps, or of a kernel.

    A kernel's piece has room for `most` bytes; the kernel writes them and their number (`Piece.length`).
    """

    template: bytes = b""
    steps: Sequence[int] = ()  # offsets in the template, one for each tensor
    most: int = 0


@dataclass
class FramePieces:
    """The pieces of a frame in their order. A number is the stream of that number, and ~number its length as varint."""

    wire_id: int
    flags: int
    pieces: list[Bytes | int]
    streams: list[StreamPlan]
    own: list[int] = field(default_factory=list)  # bytes of scratch for each tensor


def stated_steps(front: bytes, tensors: Sequence[TensorTask]) -> Bytes:
    """Return side information with a step for each tensor, which kernels fill in; of several tensors also the lengths.

    `front` stands before them. This is how codecs 1 and 3 state their segments (docs/wire-format.md).
    """
    side, steps, several = bytearray(front), [], len(tensors) > 1
    if several:
        side += varint(len(tensors))
    for tensor in tensors:
        if several:
            side += varint(tensor.gradient.numel())
        steps.append(len(side))
        side += ONE
    return Bytes(bytes(side), steps)


class Batch:
    """The tensors of one family in a message: what its kernels are launched for, in every message anew."""

    def __init__(
        self, device: torch.device, job: torch.Tensor, parts: torch.Tensor, tiles: torch.Tensor, groups: torch.Tensor,
        most: int, longest: int, launches: programs.Launches,
    ):  # fmt: skip
        self.device, self._launches = device, launches
        self.part_count, self.tile_count, self.group_count = len(parts) // 8, len(tiles) // 8, len(groups) // 8
        self.most, self.longest = most, longest  # entries of the largest tensor, and of the longest frame
        self.on_parts, self.on_tiles = Arguments(job, parts), Arguments(job, tiles)
        self._on_all_tiles = Arguments(job, tiles, self.tile_count)
        self.on_groups = Arguments(job, groups)
        self.job, self.tiles, self.groups = job, tiles, groups  # for launches with more arguments than these

    def launch_parts(self, program: str, kernel: str, threads: int = 256, each: int = 1) -> None:
        """Add a kernel with a block, or several, for each part of the tensors' samples."""
        self._launches.add(program, kernel, each * self.part_count, threads, self.on_parts)

    def launch_tiles(self, program: str, kernel: str, threads: int = 256, each: int = 1) -> None:
        """Add a kernel with a block, or several, for each tile of the tensors."""
        self._launches.add(program, kernel, each * self.tile_count, threads, self.on_tiles)

    def launch_groups(self, program: str, kernel: str, threads: int = 256) -> None:
        """Add a kernel with one block for each group of eight tiles, for work that is not on all entries."""
        self._launches.add(program, kernel, self.group_count, threads, self.on_groups)

    def launch_on_all_tiles(self, program: str, kernel: str, threads: int = 256) -> None:
        """Add a kernel with some blocks that go through all tiles in turn, whose number is its last argument."""
        self._launches.add(program, kernel, min(self.tile_count, SOME_BLOCKS), threads, self._on_all_tiles)


class Unpack(NamedTuple):
    """A kernel of a family that works on the frames of all ranks; it leaves those of other families alone."""

    program: str
    kernel: str
    threads: int
    several: bool  # blocks for each frame, or one


class Family(ABC):
    """Converters that share their kernels."""

    combines = ("combine", "combine")  # program and kernel that make the mean of the frames of all ranks
    unpacks: tuple[Unpack, ...] = ()  # kernels that come before it, for all frames of all ranks

    def alike(self, converter: Converter, count: int) -> Hashable:
        """Return what layouts of messages depend on beside shapes: the same for converters that may share a layout."""
        return id(converter)

    def told(self, task: FrameTask) -> int:
        """Return 64 bits that kernels are told with each tensor of the task, in every message (`Tensor.seed`)."""
        return task.seed

    def parts(self, count: int) -> int:
        """Return how many blocks look at the sample of a tensor with so many entries."""
        return -(-min(count, SAMPLE) // PART)

    def arrival(self, converter: Converter, lengths: Sequence[int]) -> np.ndarray | None:
        """Return what kernels have to know of a frame with tensors of these lengths to decode it, as bytes."""
        return None

    @abstractmethod
    def takes(self, converter: Converter) -> bool:
        """Tell whether there are kernels for this converter."""

    @abstractmethod
    def pieces(self, task: FrameTask) -> FramePieces:
        """Return what frames of this task consist of. It depends on the converter, the shapes and the dtype alone."""

    @abstractmethod
    def format(self, converter: Converter) -> np.ndarray:
        """Return what the kernels have to know about the converter, as bytes."""

    def room_to_decode(self, converter: Converter, count: int) -> tuple[int, int]:
        """Return how many entries a frame may send, and the bytes of scratch that decoding it takes."""
        return count, 0

    @abstractmethod
    def convert(self, batch: Batch) -> None:
        """Add the kernels that write symbols, their counts, the bytes of pieces and the new error memory."""
