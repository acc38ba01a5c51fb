"""Count-sketches (Charikar, Chen, Farach-Colton 2002): cells that entries are added to, and estimates from them."""

from __future__ import annotations

import numpy as np
import torch

from gradwire.kernels.reference.generator import uniform
from gradwire.kernels.reference.sparse import select

__all__ = ["sketch_cells", "sketch_estimates", "sketch_largest"]

BLOCK = 1 << 20  # entries hashed at a time by an encoder
PART = 1 << 13  # and by a decoder, which must not take much memory
MASK = (1 << 64) - 1


def hashed(
    row: int, seed: int, columns: int, start: int, stop: int, device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (column, sign) in this row of the entries start … stop−1; there are at most 2²³ columns."""
    h = (uniform(stop - start, (seed + row) & MASK, start, device) * 2**24).long()
    return (h >> 1) * columns >> 23, 1 - 2 * (h & 1)


def sketch_cells(u: torch.Tensor, rows: int, columns: int, seed: int) -> torch.Tensor:
    """Add every entry, with a hashed sign, to one hashed cell of each row; returns rows × columns sums in fp64.

    Entries are added in order, those of each block to zero, and the sums of the blocks to those of the ones before.
    """
    cells = np.zeros((rows, columns))
    for start in range(0, u.numel(), BLOCK):
        part = u[start : start + BLOCK].double()
        for row in range(rows):
            column, sign = hashed(row, seed, columns, start, start + len(part), u.device)
            cells[row] += np.bincount(column.cpu().numpy(), (part * sign).cpu().numpy(), minlength=columns)
    return torch.from_numpy(cells).to(u.device)


def sketch_estimates(
    cells: np.ndarray, count: int, seed: int, start: int = 0, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the median over the rows of sign·cell for the entries start … start+count−1, in fp32.

    `cells` (rows × columns) are fp32 or fp16 numbers at any address, such as in a frame. The estimates are written to
    `out`, if it is given: contiguous fp32, in the host's memory.
    """
    rows, columns = cells.shape
    out = torch.empty(count, dtype=torch.float32, device="cpu") if out is None else out
    for first in range(0, count, PART):
        last = min(count, first + PART)
        estimates = []
        for row in range(rows):
            column, sign = hashed(row, seed, columns, start + first, start + last)
            estimates.append(torch.from_numpy(cells[row][column.numpy()].astype(np.float32)) * sign)
        out[first:last] = torch.stack(estimates).median(dim=0).values
    return out


def sketch_largest(cells: np.ndarray, count: int, kept: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `kept` of `count` estimates with the largest magnitudes: their positions (int64, ascending), and they.

    Among equal magnitudes the lowest positions come first. Zeros are left out, so that there may be fewer.
    """
    positions = torch.empty(0, dtype=torch.int64, device="cpu")
    values = torch.empty(0, dtype=torch.float32, device="cpu")
    for first in range(0, count, PART):
        last = min(count, first + PART)
        values = torch.cat([values, sketch_estimates(cells, last - first, seed, first)])
        positions = torch.cat([positions, torch.arange(first, last, device="cpu")])
        if last == count or len(values) > 2 * max(kept, PART):
            _, best, values = select(values, None, None, 1.0, kept)
            positions = positions[best]
    return positions, values
