"""Rows of a batch: joined with what is remembered of them, scored, and some of them taken out again.

A layer has two sides, its inputs and the gradients of its outputs; row j of one and row j of the other make an outer
product. Both sides go through a kernel together, since a row that one of them cannot hold must not change the other.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["Side", "join_rows", "largest", "take_rows"]


class Side(NamedTuple):
    """One side of a layer, as the kernels take it: the rows of a batch, and what is remembered of earlier ones."""

    rows: torch.Tensor  # [count, columns]
    memory: torch.Tensor | None  # as many rows; None on both sides or on neither
    scale: float = 1.0  # of rows on their way into the memory
    gain: float = 1.0  # of rows on their way out of it
    most: float = float("inf")  # the largest norm that memory and taken rows can hold
    mean: torch.Tensor | None = None  # [columns], in the dtype of the rows; subtracted from each of them

    @property
    def is_cpu(self) -> bool:
        """Whether the rows are on the CPU."""
        return self.rows.is_cpu

    @property
    def device(self) -> torch.device:
        """The device of the rows."""
        return self.rows.device


def is_plain(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor's memory holds its values.

    Subclasses may have them elsewhere, and a negative view has other signs.
    """
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_neg()


def join_rows(inputs: Side, outputs: Side, keep: float) -> torch.Tensor:
    """Write memory ← keep·memory + scale·(rows − mean) on both sides; return the norms of the outer products, in fp64.

    A row with a norm above `most` on either side, or none at all (NaN), has the score NaN and changes no memory.
    A row that is zero on one side has no product and brings nothing to the other: inputs without a gradient (padding)
    would otherwise be multiplied with the gradients of other rows.
    """
    entering = [_centred(side, side.rows) for side in (inputs, outputs)]
    brings = (entering[0] != 0).any(1) & (entering[1] != 0).any(1)
    joined = [_joined(side, rows, brings, keep) for side, rows in zip((inputs, outputs), entering, strict=True)]
    norms = [torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64) for rows in joined]
    fits = (norms[0] <= inputs.most) & (norms[1] <= outputs.most)
    for side, rows in zip((inputs, outputs), joined, strict=True):
        if side.memory is not None:
            side.memory.copy_(torch.where(fits[:, None], rows, side.memory))
    return torch.where(fits, norms[0] * norms[1], torch.nan)


def largest(keys: torch.Tensor, count: int) -> torch.Tensor:
    """Return where the `count` largest keys are, ascending."""
    return keys.topk(count, sorted=False).indices.sort().values


def take_rows(
    inputs: Side, outputs: Side, chosen: torch.Tensor, total: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the chosen rows of both sides, times gain, in the dtype of their rows, and clear them in the memory.

    `chosen` is ascending. Where `total`, the sum of the scores, is NaN, all that is taken is NaN and nothing leaves the
    memory. Where the inputs have a mean there is room for one more row at the end of both, which the caller fills.
    """
    more = 0 if inputs.mean is None else 1
    taken = [side.rows.new_full((len(chosen) + more, side.rows.shape[1]), torch.nan) for side in (inputs, outputs)]
    if not total.isnan():
        for side, into in zip((inputs, outputs), taken, strict=True):
            into[: len(chosen)] = _taken(side, chosen)
    return taken[0], taken[1]


def _joined(side: Side, entering: torch.Tensor, brings: torch.Tensor, keep: float) -> torch.Tensor:
    """In the wider of fp32 and the dtype of the rows, whatever the memory is stored in."""
    rows = entering * (brings.to(entering.dtype) * side.scale)[:, None]  # times zero, so that a NaN is one still
    return rows if side.memory is None else side.memory.to(rows.dtype) * keep + rows


def _centred(side: Side, rows: torch.Tensor) -> torch.Tensor:
    wide = torch.promote_types(rows.dtype, torch.float32)
    return rows.to(wide) if side.mean is None else rows.to(wide) - side.mean.to(wide)


def _taken(side: Side, chosen: torch.Tensor) -> torch.Tensor:
    if side.memory is None:
        return _centred(side, side.rows[chosen])
    taken = side.memory[chosen].to(torch.promote_types(side.rows.dtype, torch.float32)) * side.gain
    side.memory[chosen] = 0
    return taken
