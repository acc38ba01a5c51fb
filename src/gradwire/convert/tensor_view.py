"""How a structured frame looks at a tensor: as blocks, as a matrix, or as kernels (docs/wire-format.md, codec 8)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from gradwire.errors import FrameError
from gradwire.frame.byte_fields import Reader

BLOCKS, MATRIX, KERNELS = range(3)
LOG_BLOCKS = range(4, 13)
MOST_ON_AXIS, MOST_IN_KERNEL = 16, 4096
# A matrix of fewer rows must not be wider, since decoders work row by row; nor may a narrow one have more rows, since
# they keep the scale of each.
FEW_ROWS, WIDE = 64, 1 << 16
NARROW, MANY_ROWS = 16, 1 << 16


@dataclass(frozen=True)
class TensorView:
    """A tensor of `count` entries as rows × columns × coefficients; the last row of blocks may be cut off."""

    kind: int
    count: int
    shape: tuple[int, int, int]
    axes: tuple[int, ...] = ()  # of a kernel

    @property
    def width(self) -> int:
        """The number of entries of a row."""
        return self.shape[1] * self.shape[2]

    @property
    def fields(self) -> bytes:
        """The first bytes of the payload."""
        return bytes([self.kind] + [self.shape[1].bit_length() - 1] * (self.kind == BLOCKS))

    @property
    def matrices(self) -> list[torch.Tensor]:
        """The transform along each axis of a kernel; none where there is no transform."""
        return [cosine_matrix(n) for n in self.axes]


def as_blocks(count: int, log_block: int) -> TensorView:
    """Return the view as blocks of 2^log_block entries."""
    block = 1 << log_block
    return TensorView(BLOCKS, count, (-(-count // block), block, 1))


def as_matrix(shape: tuple[int, ...]) -> TensorView | None:
    """Return the view as a matrix, or None if the shape has none."""
    count = math.prod(shape)
    if len(shape) < 2 or not _is_a_matrix(shape[0], count // max(1, shape[0])):
        return None
    return TensorView(MATRIX, count, (shape[0], count // shape[0], 1))


def as_kernels(shape: tuple[int, ...]) -> TensorView | None:
    """Return the view as kernels, or None if the shape has none."""
    count, axes = math.prod(shape), shape[2:]
    size = math.prod(axes)
    if len(shape) < 3 or not 2 <= size <= MOST_IN_KERNEL or max(axes) > MOST_ON_AXIS:
        return None
    if not _is_a_matrix(shape[0], count // max(1, shape[0])):
        return None
    return TensorView(KERNELS, count, (shape[0], shape[1], size), axes)


def _is_a_matrix(rows: int, width: int) -> bool:
    if not rows or not width:
        return False
    return (rows >= FEW_ROWS or width <= WIDE) and (width >= NARROW or rows <= MANY_ROWS)


def read_view(reader: Reader, shape: tuple[int, ...]) -> TensorView:
    """Read the view of a tensor of this shape."""
    kind = reader.byte()
    if kind == BLOCKS:
        log_block = reader.byte()
        if log_block not in LOG_BLOCKS:
            raise FrameError("invalid length of a block")
        return as_blocks(math.prod(shape), log_block)
    view = as_matrix(shape) if kind == MATRIX else as_kernels(shape) if kind == KERNELS else None
    if view is None:
        raise FrameError("invalid view of a tensor")
    return view


@lru_cache(maxsize=64)
def cosine_matrix(size: int) -> torch.Tensor:
    """Return the orthonormal cosine transform of `size` entries: D(k,m), each the nearest fp32."""
    k, m = np.arange(size)[:, None], np.arange(size)[None, :]
    # The angle is a multiple of π/2n: taken modulo a turn it stays small, and its cosine exact to the last bit of fp64.
    # Only that of a quarter turn is not: it is 0, and the fp64 next to π/2 has a cosine of 6e−17.
    turns = (k * (2 * m + 1)) % (4 * size)
    cosines = np.where(turns % (2 * size) == size, 0.0, np.cos(np.pi * turns / (2 * size)))
    matrix = cosines * np.sqrt(np.where(k == 0, 1.0, 2.0) / size)
    return torch.from_numpy(matrix.astype(np.float32))
