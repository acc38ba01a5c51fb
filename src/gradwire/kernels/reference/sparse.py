"""Sparse codecs: which entries are sent, and entries put back in their places; any device."""

from __future__ import annotations

import numpy as np
import torch

__all__ = ["Selection", "largest_of_chunks", "mean_magnitude", "replace", "scatter", "select"]

LOOKED_AT_TOGETHER = 1 << 20  # entries, by `largest_of_chunks`
Selection = tuple[int, torch.Tensor, torch.Tensor]  # see `select`


def select(
    gradient: torch.Tensor, memory: torch.Tensor | None, memory_out: torch.Tensor | None, decay: float,
    count: int | None, low: int = 1, one_sign: bool = False,
) -> Selection:  # fmt: skip
    """Select the `count` largest magnitudes of u = g + decay·e: their positions (int64, ascending) and the u there.

    With `one_sign` they are chosen among the positive entries and among the negative ones, and the choice with the
    larger mean magnitude counts, the positive one of equals. Only entries whose magnitude has a bit pattern of `low`
    or more are looked at; a count of None takes all of them. Among equal magnitudes the lowest positions come first.
    Writes u to memory_out, for the caller to subtract what is sent. The first number returned is how many entries
    were written: less than all, and nothing is chosen, if u holds a NaN or an infinity.
    """
    u = gradient if memory is None else gradient + memory * decay
    if not bool(torch.isfinite(u).all()):
        return 0, torch.empty(0, dtype=torch.int64, device=u.device), u[:0]
    if memory_out is not None:
        memory_out.copy_(u)
    bits = u.abs().view(torch.int32)
    big = bits >= max(1, low)  # zeros are never sent
    if not one_sign:
        return u.numel(), *_largest(u, bits, big, count)
    above, below = _largest(u, bits, big & (u > 0), count), _largest(u, bits, big & (u < 0), count)
    return u.numel(), *(above if mean_magnitude(above[1]) >= mean_magnitude(below[1]) else below)


def _largest(
    u: torch.Tensor, bits: torch.Tensor, among: torch.Tensor, count: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    positions = torch.nonzero(among).flatten()
    if count is not None and count < positions.numel():
        magnitudes = bits[positions]
        order = torch.sort(magnitudes, descending=True, stable=True).indices  # stable: the lowest positions first
        positions = positions[order[:count]].sort().values
    return positions, u[positions]


def largest_of_chunks(u: torch.Tensor, chunk: int, count: int) -> torch.Tensor:
    """Return the positions (int64, ascending) of the `count` largest magnitudes of every `chunk` consecutive entries.

    Zeros are never among them, and of equal magnitudes those at the lowest positions come first. The last chunk may be
    shorter. At most a million entries are looked at together, so that little memory is taken.
    """
    at_once = max(1, LOOKED_AT_TOGETHER // chunk) * chunk
    found = [
        start + _largest_of_rows(u[start : start + at_once], chunk, count) for start in range(0, u.numel(), at_once)
    ]
    return torch.cat(found) if found else torch.empty(0, dtype=torch.int64, device=u.device)


def _largest_of_rows(u: torch.Tensor, chunk: int, count: int) -> torch.Tensor:
    whole = u.numel() // chunk * chunk
    found = []
    for start, entries, length in ((0, u[:whole], chunk), (whole, u[whole:], u.numel() - whole)):
        if entries.numel():
            # Magnitude first, then the lowest position: no two keys are equal.
            bits = entries.abs().view(torch.int32).view(-1, length).long()
            keys = bits * length + torch.arange(length - 1, -1, -1, device=u.device)
            best = keys.topk(min(count, length), dim=1, sorted=False).values
            columns = (length - 1 - best % length).masked_fill(best < length, length)  # of zeros: beyond the row
            columns = columns.sort(dim=1).values
            rows = torch.arange(start, start + entries.numel(), length, device=u.device)[:, None]
            found.append((rows + columns)[columns < length])
    return torch.cat(found)


def mean_magnitude(values: torch.Tensor) -> float:
    """Return the mean of |x| in fp64, by eight sums of every eighth entry, so that it is the same on every machine.

    It is 0 for an empty tensor.
    """
    if not values.numel():
        return 0.0
    magnitudes = np.zeros((-(-values.numel() // 8), 8))
    magnitudes.reshape(-1)[: values.numel()] = values.abs().double().cpu().numpy()
    sums = np.add.accumulate(magnitudes, axis=0)[-1]
    return float(np.add.accumulate(sums)[-1]) / values.numel()


def scatter(out: torch.Tensor, positions: torch.Tensor, values: torch.Tensor, accumulate: bool) -> None:
    """Write values at these positions and zeros elsewhere, or add the values; one value may stand for all.

    Positions are ascending and below the length of out.
    """
    if not accumulate:
        out.zero_()
    positions, values = positions.to(out.device), values.to(out.device, out.dtype)
    out[positions] = out[positions] + values if accumulate else values.expand(positions.shape)


def replace(out: torch.Tensor, positions: torch.Tensor, values: torch.Tensor) -> None:
    """Write values at these positions, and leave the others as they are; one value may stand for all.

    Positions are ascending and below the length of out.
    """
    positions = positions.to(out.device)
    out[positions] = values.to(out.device, out.dtype).expand(positions.shape)
