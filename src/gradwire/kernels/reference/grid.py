"""The kernels of evenly spaced grids (ecq); docs/wire-format.md, codec 3."""

from __future__ import annotations

import numpy as np
import torch

from gradwire.errors import FrameError
from gradwire.kernels.reference.generator import uniform
from gradwire.kernels.reference.quantize import compensate, dequantize, inverse

__all__ = [
    "EXCESS_LIMIT", "GAP_LIMIT", "GRID_LIMIT", "GRID_SIZES", "Measured", "Outliers", "add_at", "grid_capacity",
    "grid_edges", "grid_measure", "grid_quantize", "grid_quantize_segments", "grid_rans", "grid_search", "outlier_bits",
    "pack_outliers", "running_sums", "unpack_outliers",
]  # fmt: skip

GRID_LIMIT = 1 << 24  # largest multiple: fp32 holds all integers up to it
GAP_LIMIT, EXCESS_LIMIT = 48, 24  # largest parameters of the codes

# Positions and signed multiples of the entries beyond the symbols' range, in order of position.
Outliers = tuple[torch.Tensor, torch.Tensor]


GRID_SIZES = (7, 15, 31, 63, 127)  # largest magnitudes of symbols that an encoder takes
NEARLY = 1.01  # more symbols are slower: they have to save more than this
LOGS = np.log2(np.maximum(np.arange((1 << 16) + 1), 1))

# Bits of the symbols with an ideal code and of the outliers; the latter alone; squared error; largest magnitude of a
# symbol; offsets of the magnitude 1 and of the others, in 1/256.
Measured = tuple[float, float, float, int, tuple[int, int]]


def grid_capacity(count: int, segmented: bool = False) -> int:
    """Return how many outliers a tensor may have: this bounds the length of its frame."""
    return count // 16 + (0 if segmented else 16)


def grid_multiples(u: torch.Tensor, step: float, shift: float, seed: int | None) -> torch.Tensor:
    """Return signed multiples of the step: ⌊|u|/step + shift⌋, or rounded up with the probability of what is left."""
    y = u * inverse(step)
    if seed is None:
        magnitude = torch.floor((y.abs() + shift).clamp(max=GRID_LIMIT))
    else:
        limited = y.abs().clamp(max=GRID_LIMIT)
        lower = torch.floor(limited)
        magnitude = lower + (uniform(u.numel(), seed, device=u.device) < limited - lower)
    return torch.where(y < 0, -magnitude, magnitude).int()


def grid_quantize(
    gradient: torch.Tensor, memory: torch.Tensor | None, memory_out: torch.Tensor | None, decay: float, step: float,
    shift: float, values: torch.Tensor, capacity: int, seed: int | None = None,
) -> tuple[torch.Tensor, Outliers]:  # fmt: skip
    """Return symbols of u = g + decay·e, one for each of 2M+1 `values`, and the first `capacity` multiples beyond ±M.

    Writes e ← u − value(symbol) into memory_out: for outliers, whose symbol is that of zero, u itself.
    """
    u, largest = compensate(gradient, memory, decay), len(values) // 2
    multiples = grid_multiples(u, step, shift, seed)
    positions = torch.nonzero(multiples.abs() > largest).flatten()[:capacity]
    outliers = (positions, multiples[positions])
    multiples = multiples.clamp(-largest, largest)
    multiples[positions] = 0
    symbols = (multiples + largest).to(torch.uint8)
    if memory_out is not None:
        torch.sub(u, dequantize(symbols, values), out=memory_out)
    return symbols, outliers


def grid_quantize_segments(
    gradient: torch.Tensor, memory: torch.Tensor | None, memory_out: torch.Tensor | None, decay: float,
    lengths: np.ndarray, steps: np.ndarray, shift: float, values: torch.Tensor,
) -> tuple[torch.Tensor, Outliers]:  # fmt: skip
    """Do `grid_quantize` to tensors that lie end to end, with a step and a row of values for each of them."""
    ends = np.cumsum(lengths).tolist()
    pieces, places, multiples = [], [], []
    for end, length, step, row in zip(ends, lengths.tolist(), steps.tolist(), values, strict=True):
        part = slice(end - length, end)
        old, new = (None if whole is None else whole[part] for whole in (memory, memory_out))
        capacity = grid_capacity(length, True)
        symbols, outliers = grid_quantize(gradient[part], old, new, decay, step, shift, row, capacity)
        pieces.append(symbols)
        places.append(outliers[0] + part.start)
        multiples.append(outliers[1])
    return torch.cat(pieces), (torch.cat(places), torch.cat(multiples))


def grid_rans(
    gradient: torch.Tensor, memory: torch.Tensor | None, memory_out: torch.Tensor | None, decay: float, step: float,
    shift: float, values: torch.Tensor, offset: float | None, capacity: int, frequencies: np.ndarray, precision: int,
    lane_bits: int, chunks: int, out: torch.Tensor,
) -> tuple[list[int], int, Outliers] | None:  # fmt: skip
    """Do `grid_quantize` and rANS in one pass: lengths of the chunks in `out`, how many entries they hold, outliers.

    They hold less than all where the kernel stopped before a NaN or an infinity. With an `offset` of the multiples
    beyond ±M, e ← u − value is written for outliers too. None says that this device has no such kernel: the caller then
    quantizes and encodes one after the other.
    """
    return None


# ── what a grid comes to ──────────────────────────────────────────────────────────────────────────


def grid_edges(x: np.ndarray, step: float, shift: float) -> tuple[np.ndarray, np.ndarray]:
    """Return where the cells of the magnitudes 1, 2, … 128 begin in a sorted sample: upwards, and downwards."""
    with np.errstate(over="ignore"):  # an edge beyond the range of fp32 is infinite, and has nothing above it
        j = np.arange(1, GRID_SIZES[-1] + 2, dtype=np.float32)
        edges = (j - np.float32(shift)) * np.float32(step)
    return np.searchsorted(x, edges), np.searchsorted(x, -edges, side="right")


def _log(i: np.ndarray | int) -> np.ndarray:
    """log₂ of integers: beyond the table, of their leading bits."""
    i = np.asarray(i)
    shift = np.maximum(np.frexp(i - 1)[1] - 16, 0)
    return np.asarray(LOGS[i >> shift] + shift)


def _sum(*terms: np.ndarray | float) -> float:
    """From the first to the last, one by one: every kernel rounds alike."""
    return float(np.cumsum(np.concatenate([np.atleast_1d(t) for t in terms]))[-1])


def grid_measure(
    x: np.ndarray, first: np.ndarray, second: np.ndarray, zeros: int, step: float, shift: float
) -> Measured | None:
    """Return rate and error of a grid on a sorted sample and `zeros` more entries that are zero.

    `first` and `second` are running sums of x and x², from 0. None if too many entries are outliers.
    """
    above, below = grid_edges(x, step, shift)
    count, ends = len(x) + zeros, len(x) - int(above[-1]) + int(below[-1])
    if ends > grid_capacity(count):
        return None
    j, step = np.arange(1, GRID_SIZES[-1] + 1), float(np.float32(step))
    positive, negative = np.diff(above), -np.diff(below)
    both = positive + negative
    sum1 = np.diff(first[above]) - -np.diff(first[below])
    sum2 = np.diff(second[above]) + -np.diff(second[below])
    excess = sum1 / step - j * both  # how far the entries of each cell are above their multiple
    offsets = _offset(float(excess[0]), int(both[0])), _offset(_sum(0.0, excess[1:]), int(both[1:].sum()))
    r = (j + np.where(j == 1, *offsets) / 256) * step
    inner = second[above[0]] - second[below[0]]
    error = _sum(inner, (sum2 - 2 * r * sum1) + r * r * both, ends * step * step / 12)
    sizes = []
    for largest in GRID_SIZES:
        outside = int(both[largest:].sum()) + ends
        if outside > grid_capacity(count):
            continue
        p, n = positive[:largest], negative[:largest]
        rest = count - int(both[:largest].sum())
        spent = _sum(p * _log(p) + n * _log(n), rest * _log(rest))
        apart = outlier_bits(both[largest:], ends, outside, count)
        sizes.append((float(count * _log(count) - spent) + apart, apart, largest))
        if not outside:
            break
    limit = NEARLY * min((bits for bits, *_ in sizes), default=0.0)
    for bits, apart, largest in sizes:
        if bits <= limit:
            return bits, apart, max(error, 0.0), largest, offsets
    return None


def running_sums(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the running sums of x and of x² in fp64, from 0 on, each term added to the sum before it."""
    wide = x.astype(np.float64)
    first, second = np.zeros(len(wide) + 1), np.zeros(len(wide) + 1)
    with np.errstate(invalid="ignore"):  # infinities of both signs
        np.cumsum(wide, out=first[1:])
    np.cumsum(wide * wide, out=second[1:])
    return first, second


def grid_search(
    x: np.ndarray, first: np.ndarray, second: np.ndarray, zeros: int, energy: float, error: float
) -> tuple[float, float, Measured] | None:
    """Return step, shift and measure of the grid with the fewest bits at this squared error of a sorted sample.

    None says that this machine has no such kernel: the caller then searches by `grid_measure`, grid after grid.
    """
    return None


def _offset(excess: float, count: int) -> int:
    return min(max(round(256 * excess / count), -128), 127) if count else 0


def outlier_bits(cells: np.ndarray, ends: int, number: int, count: int) -> float:
    """Return about how many bits the outliers in these cells, and the `ends` beyond them, take."""
    if not number:
        return 0.0
    excess = np.append(np.arange(len(cells)), len(cells) + 32)  # a guess at those beyond
    cells = np.append(cells, ends)
    b = max(0, int(cells @ excess // number).bit_length() - 1)
    codes = int(cells @ (2 * np.frexp((excess >> b) + 1)[1] - 1 + b))
    return float(number * (_log(count) - _log(number) + 2.5)) + codes


# ── the list of outliers ──────────────────────────────────────────────────────────────────────────


def add_at(x: torch.Tensor, positions: torch.Tensor, values: torch.Tensor) -> None:
    """Add values to x at these positions, of which none comes twice."""
    x[positions.to(x.device)] += values.to(x.device).to(x.dtype)


def pack_outliers(gaps: np.ndarray, negative: np.ndarray, excesses: np.ndarray, a: int, b: int) -> bytes:
    """Encode outliers: Rice codes of the gaps, signs, exponential Golomb codes of the excesses; lowest bits first."""
    value = position = 0
    parts = []
    for gap, sign, excess in zip(gaps.tolist(), negative.tolist(), excesses.tolist(), strict=True):
        head = (excess >> b) + 1
        size = head.bit_length() - 1
        for bits, number in (
            ((gap >> a) + 1, 1 << (gap >> a)), (a, gap & (1 << a) - 1), (1, int(sign)),
            (size + 1, 1 << size), (size, head & (1 << size) - 1), (b, excess & (1 << b) - 1),
        ):  # fmt: skip
            value |= number << position
            position += bits
        whole = position // 8
        parts.append((value & (1 << 8 * whole) - 1).to_bytes(whole, "little"))
        value, position = value >> 8 * whole, position % 8
    return b"".join(parts) + (value.to_bytes(1, "little") if position else b"")


def unpack_outliers(
    data: memoryview, count: int, elements: int, largest: int, a: int, b: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return (positions below `elements`, signed multiples with magnitudes `largest`+1 … 2²⁴)."""
    string = "".join(f"{byte:08b}"[::-1] for byte in bytes(data)) + "1"  # the last 1 ends every run of zeros
    end, at, position = len(string) - 1, 0, -1
    positions, multiples = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int32)

    def bits(size: int) -> int:
        nonlocal at
        at += size
        if at > end:
            raise FrameError("damaged outliers")
        return int(string[at - size : at][::-1] or "0", 2)

    def zeros() -> int:
        nonlocal at
        start, at = at, string.index("1", at) + 1
        if at > end:
            raise FrameError("damaged outliers")
        return at - 1 - start

    for i in range(count):
        position += 1 + (zeros() << a) + bits(a)
        negative = bits(1)
        size = zeros()
        if size > EXCESS_LIMIT or position >= elements:
            raise FrameError("damaged outliers")
        magnitude = largest + 1 + ((((1 << size) | bits(size)) - 1) << b) + bits(b)
        if magnitude > GRID_LIMIT:
            raise FrameError("damaged outliers")
        positions[i], multiples[i] = position, -magnitude if negative else magnitude
    if end - at > 7 or "1" in string[at:end]:
        raise FrameError("damaged outliers")
    return positions, multiples
