"""The kernels of quantizers with a few levels in each bucket (BinGrad, ORQ, QSGD, …).

`starts` holds where each bucket begins, and the number of entries last. Sums are in fp64 in an order that is written
down, so that every backend finds the same levels to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import torch

from gradwire.kernels.reference.generator import uniform
from gradwire.kernels.reference.quantize import compensate, histogram

__all__ = ["LANES", "assign_levels", "bucket_stats", "search_levels", "spread_levels"]

BLOCK = 1 << 13  # entries whose levels are looked up at a time
LANES = 16  # partial sums of `bucket_stats`: entry i of a bucket goes to sum i mod 16


def bucket_stats(gradient: torch.Tensor, memory: torch.Tensor | None, decay: float, starts: np.ndarray) -> np.ndarray:
    """Return (min, max, Σ|u|, Σu, Σu²) of every bucket, as fp64."""
    u = compensate(gradient, memory, decay).cpu().numpy()
    out = np.empty((len(starts) - 1, 5))
    for row, (start, stop) in zip(out, pairwise(starts), strict=True):
        x = u[start:stop].astype(np.float64)
        row[:] = x.min(), x.max(), _sum(np.abs(x)), _sum(x), _sum(x * x)
    return out


def _sum(x: np.ndarray) -> float:
    """Sixteen partial sums, each in order, then these in order."""
    padded = np.zeros(-(-len(x) // LANES) * LANES)
    padded[: len(x)] = x
    lanes = np.cumsum(padded.reshape(-1, LANES), axis=0)[-1]
    return float(np.cumsum(lanes)[-1])


def search_levels(
    gradient: torch.Tensor, memory: torch.Tensor | None, decay: float, starts: np.ndarray,
    limits: np.ndarray | None, levels: int, method: str,
) -> np.ndarray:  # fmt: skip
    """Return the best levels of every bucket as fp32, `limits` (fp32) cutting off its magnitudes first.

    `greedy`, `polished` and `exact` (ORQ) and `two` (BinGrad-b) give all levels in ascending order, `pair` (BinGrad-pb)
    gives b. A bucket with no more entries than levels has its own entries as levels, the last of them repeated.
    """
    u = compensate(gradient, memory, decay).cpu().numpy()
    search = SEARCHES[method]
    out = np.empty((len(starts) - 1, 1 if method == "pair" else levels), dtype=np.float32)
    for i, row in enumerate(out):
        x = u[starts[i] : starts[i + 1]]
        if limits is not None:
            x = np.clip(x, -limits[i], limits[i])
        if method == "pair":
            x = np.abs(x)
        if method not in ("greedy", "polished") or len(x) <= levels:
            x = np.sort(x)
        if method != "pair" and len(x) <= levels:
            row[:] = np.append(x, np.repeat(x[-1], levels - len(x)))
        else:
            row[:] = search(x.astype(np.float64), levels)
    return out + np.float32(0)  # no −0


def _prefix(x: np.ndarray) -> np.ndarray:
    """Sums of the first 0, 1, 2, … entries, each added in turn."""
    return np.concatenate([[0.0], np.cumsum(x)])


def orq_greedy(x: np.ndarray, levels: int) -> np.ndarray:
    """ORQ's greedy search (arXiv 2002.11082): the middle level between two others, then both halves."""
    chosen = np.full(levels, x.min())
    chosen[-1] = x.max()
    span = levels - 1
    while span > 1:
        for left in range(0, levels - 1, span):
            chosen[left + span // 2] = _best_between(x, chosen[left], chosen[left + span])
        span //= 2
    return chosen


def _best_between(x: np.ndarray, low: float, high: float) -> float:
    """The best level between two others.

    The expected error is convex and piecewise linear in b, with its kinks at the entries; its slope changes sign where
    #{v < b} = n − Σ(v − lo)/(hi − lo). So b is an entry, and this is its rank. The sum is over the entries of [lo, hi)
    in the bucket's own order, so that nobody needs to sort.
    """
    inside = (x >= low) & (x < high)
    n = int(inside.sum())
    if not n:
        return low
    below = n - (_sum(np.where(inside, x, 0.0)) - n * low) / (high - low)
    rank = int(min(max(np.ceil(below) - 1, 0), n - 1))
    return float(np.partition(x[inside], rank)[rank])


def orq_polished(x: np.ndarray, levels: int) -> np.ndarray:
    """Return the greedy levels, each inner one solved once more between its neighbours: those of even number first."""
    chosen = orq_greedy(x, levels)
    for first in (2, 1):
        for k in range(first, levels - 1, 2):
            chosen[k] = _best_between(x, chosen[k - 1], chosen[k + 1])
    return chosen


def orq_exact(x: np.ndarray, levels: int) -> np.ndarray:
    """Return the levels with the least expected error of all, by dynamic programming over the sorted entries.

    least[t][j] = min over i of least[t−1][i] + cost(i, j). The cost of one interval satisfies the quadrangle
    inequality, so the best i grows with j, and halving the range of j takes O(n log n) for each level (the idea of
    QUIVER, NeurIPS 2024, which does it in O(n)).
    """
    w = x - x[0]
    sums, squares = _prefix(w), _prefix(w * w)
    last = len(x) - 1

    def cost(i: np.ndarray, j: int) -> np.ndarray:
        """Σ(w_j − v)(v − w_i) over the entries from i to j."""
        inner = (w[j] + w[i]) * (sums[j + 1] - sums[i]) - (j - i + 1) * (w[i] * w[j])
        return np.asarray(inner - (squares[j + 1] - squares[i]))

    least = np.array([cost(np.zeros(1, dtype=np.int64), j)[0] for j in range(len(x))])
    choices = []
    for layer in range(levels - 2):
        best, choice = np.full(len(x), np.inf), np.zeros(len(x), dtype=np.int64)
        # Of the last layer only its last entry matters.
        ranges = [(last if layer == levels - 3 else 0, last, 0, last)]
        while ranges:
            low, high, first, end = ranges.pop()
            if low > high:
                continue
            j = (low + high) // 2
            i = np.arange(first, min(end, j) + 1)
            errors = least[i] + cost(i, j)
            at = int(np.argmin(errors))  # the first of equals
            best[j], choice[j] = errors[at], first + at
            ranges += [(low, j - 1, first, choice[j]), (j + 1, high, choice[j], end)]
        least = best
        choices.append(choice)
    index = [last]
    for choice in reversed(choices):
        index.append(int(choice[index[-1]]))
    return x[[0, *reversed(index)]]


def bingrad_two(x: np.ndarray, levels: int = 2) -> np.ndarray:
    """BinGrad-b: the two levels with the least squared error, the means of both sides of one threshold.

    Splitting the sorted entries after c of them leaves Σv² − (Σ_{<}v)²/c − (Σ_{≥}v)²/(n−c).
    """
    sums, n = _prefix(x), len(x)
    c = np.arange(1, n, dtype=np.float64)
    left, right = sums[1:-1], sums[-1] - sums[1:-1]
    best = int(np.argmax(left * left / c + right * right / (n - c))) + 1  # the first of equals
    if x[0] == x[-1]:
        return x[:2]
    return np.array([sums[best] / best, (sums[-1] - sums[best]) / (n - best)])


def bingrad_pair(x: np.ndarray, levels: int = 2) -> np.ndarray:
    """BinGrad-pb: b = (1/n)·Σ_{|v| ≥ b} |v| for sorted magnitudes: b falls where the right side jumps below it."""
    n, sums = len(x), _prefix(x)
    means = (sums[-1] - sums[:-1]) / n
    c = int(np.argmax(means <= x))  # the first; the last entry always is
    return np.array([max(means[c], x[c - 1]) if c else means[c]])


SEARCHES = {
    "greedy": orq_greedy, "polished": orq_polished, "exact": orq_exact, "two": bingrad_two, "pair": bingrad_pair
}  # fmt: skip


def assign_levels(
    gradient: torch.Tensor, memory: torch.Tensor | None, memory_out: torch.Tensor | None, decay: float,
    values: torch.Tensor, starts: np.ndarray, seed: int | None,
) -> tuple[torch.Tensor, np.ndarray]:  # fmt: skip
    """Return symbols of u = g + decay·e and their counts, and write e ← u − value into memory_out.

    `values` (buckets × levels, ascending) is what the receiver gets. Stochastic with a seed, to nearest without.
    """
    u = compensate(gradient, memory, decay)
    levels, values, bucket = values.shape[1], values.to(u.device), _bucket_of(starts).to(u.device)
    if seed is None:
        middles = ((values[:, :-1].double() + values[:, 1:].double()) / 2).float()
        symbols = _count_below(u, middles, bucket)
    else:
        lower = _count_below(u, values[:, 1:-1], bucket)
        low, high = values[bucket, lower], values[bucket, lower + 1]
        symbols = lower + (uniform(u.numel(), seed, device=u.device) * (high - low) < u - low)
    if memory_out is not None:
        torch.sub(u, values[bucket, symbols], out=memory_out)
    symbols = symbols.to(torch.uint8)
    return symbols, histogram(symbols, levels)


def _bucket_of(starts: np.ndarray) -> torch.Tensor:
    sizes = torch.from_numpy(np.diff(starts))
    return torch.arange(len(sizes), device="cpu").repeat_interleave(sizes)


def _count_below(u: torch.Tensor, thresholds: torch.Tensor, bucket: torch.Tensor) -> torch.Tensor:
    count = torch.zeros(u.numel(), dtype=torch.int64, device=u.device)
    for column in thresholds.unbind(1):
        count += u >= column[bucket]
    return count


def spread_levels(
    symbols: np.ndarray, values: torch.Tensor, starts: np.ndarray, out: torch.Tensor, accumulate: bool
) -> None:
    """Write the value of every symbol to `out`, or add it.

    Entries are taken block by block: the number of its bucket takes eight bytes, twice as much as an fp32 entry.
    """
    for block, buckets, cut in blocks_of(starts):
        decoded = values[buckets][_bucket_of(cut), torch.from_numpy(symbols[block]).long()].to(out.device)
        if accumulate:
            out[block] += decoded
        else:
            out[block] = decoded


def blocks_of(starts: np.ndarray) -> Iterator[tuple[slice, slice, np.ndarray]]:
    """Yield blocks of the entries, the buckets that have entries in it, and where they start and end in it."""
    for first in range(0, int(starts[-1]), BLOCK):
        last = min(int(starts[-1]), first + BLOCK)
        low, high = np.searchsorted(starts, first, side="right") - 1, np.searchsorted(starts, last)
        yield slice(first, last), slice(low, high), np.clip(starts[low : high + 1], first, last) - first
