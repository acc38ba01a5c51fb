"""The kernels of structured frames: transforms of kernels, classes of entries, low ranks; wire-format.md, codec 8.

Tensors are looked at as rows × columns × coefficients, flat and row-major. `shape` is that view, (R, C, K); the last
row may be cut off where the tensor ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from gradwire.kernels.reference.generator import mix
from gradwire.kernels.reference.grid import Outliers, grid_quantize
from gradwire.kernels.reference.quantize import FLOAT_MAX, compensate, dequantize

__all__ = [
    "Energies",
    "Kept",
    "Prediction",
    "Source",
    "add_prediction",
    "axis_energies",
    "class_counts",
    "entry_classes",
    "gram",
    "measure_remainder",
    "merge_classes",
    "prepare",
    "project_both",
    "project_rows",
    "quantize_classes",
    "rebuild",
    "rebuild_classes",
    "remainder",
    "sample_remainder",
    "split_classes",
    "transform_kernels",
]  # fmt: skip

RUNS, RUN, SEEN_WHOLE = 1024, 16, 1 << 16  # of a sample, how many of its entries lie together, and when there is none

View = tuple[int, int, int]
Prediction = tuple[torch.Tensor, torch.Tensor]  # fp32, R × r, and int8, r × C·K
Factors = tuple[torch.Tensor, torch.Tensor, tuple[float, ...]]
Energies = tuple[np.ndarray, np.ndarray, np.ndarray]  # of rows, columns and coefficients
Source = tuple[torch.Tensor, torch.Tensor | None, float]  # gradient, error memory and decay
Scales = tuple[np.ndarray, np.ndarray, np.ndarray]  # of rows, columns and coefficients, int16


class Kept(NamedTuple):
    """What `quantize_classes` does besides: it writes what symbols and outliers leave out to an error memory.

    That is the source less what `rebuild` makes of them. Without a source, x is what they are taken from, and there are
    no matrices.
    """

    memory_out: torch.Tensor  # may be the memory of the source
    source: Source | None
    matrices: Sequence[torch.Tensor]
    offset: float  # of the values of outliers from their multiples, in steps


def transform_kernels(x: torch.Tensor, matrices: Sequence[torch.Tensor], inverse: bool) -> None:
    """Transform each kernel of `x` in place, along one axis after the other: y_k = Σ_m D(k,m)·x_m, or back.

    There is a square matrix D for each axis. Sums are made from the first term to the last, each operation rounded.
    """
    inner = int(np.prod([len(matrix) for matrix in matrices]))
    for matrix in matrices:
        size = len(matrix)
        inner //= size
        view = x.view(-1, size, inner)
        rows = matrix if inverse else matrix.t()  # rows[m] has what entry m adds to each result
        total = rows[0].view(1, size, 1) * view[:, :1]
        for m in range(1, size):
            total = total + rows[m].view(1, size, 1) * view[:, m : m + 1]
        view.copy_(total)


def axis_energies(x: torch.Tensor, shape: View) -> Energies:
    """Return the sums of squares of every row, column and coefficient. Fits may differ in the last bits."""
    rows, columns, coefficients = shape
    squares = np.zeros(rows * columns * coefficients)
    squares[: x.numel()] = np.square(x.numpy().astype(np.float64))
    view = squares.reshape(shape)
    return view.sum((1, 2)), view.sum((0, 2)), view.sum((0, 1))


def prepare(x: torch.Tensor, source: Source, shape: View, matrices: Sequence[torch.Tensor]) -> Energies:
    """Write u = g + decay·e, with its kernels transformed, to x, and return the energies of the result."""
    x.copy_(compensate(*source))
    transform_kernels(x, matrices, False)
    return axis_energies(x, shape)


def entry_classes(scales: Scales, base: int, classes: int, first: int, count: int) -> np.ndarray:
    """Return the classes of the entries first … first+count−1."""
    rows, columns, coefficients = scales
    index = np.arange(first, first + count)
    row, rest = np.divmod(index, len(columns) * len(coefficients))
    column, coefficient = np.divmod(rest, len(coefficients))
    total = rows[row].astype(np.int64) + columns[column] + coefficients[coefficient] - base
    result: np.ndarray = np.clip(total, 0, classes - 1).astype(np.uint8)
    return result


def class_counts(scales: Scales, base: int, classes: int, count: int) -> np.ndarray:
    """Return how many of the first `count` entries each class has."""
    rows, columns, coefficients = scales
    width = len(columns) * len(coefficients)
    whole, left = divmod(count, width)
    pattern = (columns.astype(np.int64)[:, None] + coefficients[None, :]).ravel()
    times = np.bincount(pattern, minlength=int(pattern.max()) + 1)
    number, total = np.bincount(rows[:whole], minlength=int(rows.max()) + 1), np.zeros(classes, dtype=np.int64)
    for scale in np.flatnonzero(number):
        np.add.at(total, np.clip(np.arange(len(times)) + scale - base, 0, classes - 1), times * number[scale])
    if left:
        np.add.at(total, np.clip(pattern[:left] + int(rows[whole]) - base, 0, classes - 1), 1)
    return total


def split_classes(symbols: torch.Tensor, scales: Scales, base: int, counts: np.ndarray) -> np.ndarray:
    """Return the symbols of class 0, then those of class 1, and so on; each in the order of the tensor."""
    array = symbols.numpy()
    entries = entry_classes(scales, base, len(counts), 0, len(array))
    return np.concatenate([array[entries == t] for t in range(len(counts))])


def merge_classes(
    streams: np.ndarray, positions: np.ndarray, zeros: np.ndarray, scales: Scales, base: int, first: int, count: int
) -> torch.Tensor:
    """Undo `split_classes` for the entries first … first+count−1, which begin a row; return their symbols.

    `positions` has the place in `streams` of the next symbol of each class, and is moved on. Added to each symbol is
    its class's number in `zeros`, which makes one alphabet of those of all classes.
    """
    entries = entry_classes(scales, base, len(positions), first, count)
    symbols = np.empty(count, dtype=np.uint8)
    for t in range(len(positions)):
        of_class = entries == t
        number = int(of_class.sum())
        symbols[of_class] = streams[positions[t] : positions[t] + number] + np.uint8(zeros[t])
        positions[t] += number
    return torch.from_numpy(symbols)


def add_prediction(x: torch.Tensor, prediction: Prediction, first: int, sign: float) -> None:
    """Add sign·p to rows `first`, first+1, … in place: p = Σ_t left[i, t]·right[t, q], from the first term on.

    p is made by itself, from 0 on, and added as one number.
    """
    left, right = prediction
    rows = x.view(-1, right.shape[1])
    part = left[first : first + len(rows)]
    total = torch.zeros_like(rows)
    for t in range(len(right)):
        total += part[:, t : t + 1] * right[t].float()
    rows += sign * total


def measure_remainder(x: torch.Tensor, prediction: Prediction) -> Energies:
    """Return the energies of x less a prediction, of rows × places × 1."""
    return axis_energies(remainder(x, prediction), (len(prediction[0]), prediction[1].shape[1], 1))


def sample_remainder(x: torch.Tensor, prediction: Prediction | None) -> torch.Tensor:
    """Return what is left of x at sampled entries: runs of 16, one that begins in each of 1024 equal strata.

    Short runs, since neighbours have like scales; and places that are hashed, as those of `sample`. Of up to 2¹⁶
    entries all are returned.
    """
    rest, n = remainder(x, prediction), x.numel()
    if n <= SEEN_WHOLE:
        return rest
    run, stratum = torch.arange(RUNS, dtype=torch.int64, device="cpu"), n // RUNS
    start = (run * stratum + mix(run) % stratum).clamp(max=n - RUN)
    return rest[(start[:, None] + torch.arange(RUN, device="cpu")).flatten()]


def remainder(x: torch.Tensor, prediction: Prediction | None) -> torch.Tensor:
    """Return x less a prediction."""
    if prediction is None:
        return x
    rest = x.clone()
    add_prediction(rest, prediction, 0, -1.0)
    return rest


def rebuild(
    out: torch.Tensor, symbols: torch.Tensor | None, values: torch.Tensor, outliers: tuple[torch.Tensor, torch.Tensor],
    prediction: Prediction | None, first: int, width: int, matrices: Sequence[torch.Tensor],
    source: Source | None = None,
) -> None:  # fmt: skip
    """Write what rows `first`, first+1, … stand for to `out`: values of symbols, outliers, prediction, transform.

    No symbols are those of zero everywhere. `outliers` are positions within `out`, ascending, and values to be added.
    Results are limited to the finite range, none is −0, and 0 takes the place of what is no number. With a `source`, u
    minus that is written instead; `out` may be its memory.
    """
    if source is not None:
        values_of_rows = torch.empty_like(out)
        rebuild(values_of_rows, symbols, values, outliers, prediction, first, width, matrices)
        torch.sub(compensate(*source), values_of_rows, out=out)
        return
    out.zero_() if symbols is None else out.copy_(dequantize(symbols, values))
    if len(outliers[0]):
        out[outliers[0]] += outliers[1]
    if prediction is not None:
        add_prediction(out, prediction, first, 1.0)
    transform_kernels(out, matrices, True)
    out += 0.0
    out.nan_to_num_(nan=0.0, posinf=FLOAT_MAX, neginf=-FLOAT_MAX)


def quantize_classes(
    x: torch.Tensor, prediction: Prediction | None, step: float, shift: float, values: torch.Tensor, capacity: int,
    scales: Scales, base: int, classes: int, symbols: torch.Tensor, streams: torch.Tensor, kept: Kept | None = None,
) -> tuple[Outliers, np.ndarray]:  # fmt: skip
    """Write the symbols of x less a prediction, as `grid_quantize` makes them, to `symbols`; by class to `streams`.

    Returns the outliers, and for each class a row of counts, one for each of the `values`. With `kept`, what they leave
    out goes to an error memory.
    """
    found, outliers = grid_quantize(remainder(x, prediction), None, None, 0.0, step, shift, values, capacity)
    symbols.copy_(found)
    entries = entry_classes(scales, base, classes, 0, len(symbols))
    streams.copy_(torch.from_numpy(split_classes(symbols, scales, base, np.bincount(entries, minlength=classes))))
    counts = np.bincount(entries.astype(np.int64) * len(values) + symbols.numpy(), minlength=classes * len(values))
    if kept is not None:
        magnitudes = (outliers[1].abs().float() + kept.offset) * torch.tensor(step, dtype=torch.float32, device="cpu")
        apart = outliers[0], torch.where(outliers[1] < 0, -magnitudes, magnitudes).clamp(-FLOAT_MAX, FLOAT_MAX)
        width = len(scales[1]) * len(scales[2])
        source = kept.source or (x, None, 0.0)
        rebuild(kept.memory_out, symbols, values, apart, prediction, 0, width, kept.matrices, source)
    return outliers, counts.reshape(classes, len(values))


def rebuild_classes(
    out: torch.Tensor, streams: np.ndarray | None, zeros: np.ndarray, scales: Scales, base: int, values: torch.Tensor,
    outliers: tuple[torch.Tensor, torch.Tensor], factors: Factors, matrices: Sequence[torch.Tensor], weight: float,
    accumulate: bool,
) -> bool:  # fmt: skip
    """Write weight·value of all entries to `out`, or add it, from the symbols class by class; as `rebuild` does.

    `factors` are those of rows (R × r, int8), those of columns (r × C·K, int8) and the scale of each term. True if it
    is done: False says that this device has no such kernel, and the caller goes block by block.
    """
    return False


def gram(a: torch.Tensor, b: torch.Tensor) -> np.ndarray:
    """Return aᵀ·b in fp64, for two sets of a few columns. A fit, as `project_rows`."""
    products: np.ndarray = np.einsum("ni,nj->ij", a.numpy().astype(np.float64), b.numpy().astype(np.float64))
    return products


def project_rows(x: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    """Return x·basis, for x of len(basis) columns. A fit: bits may differ between kernels, not between threads."""
    return torch.from_numpy((x.view(-1, len(basis)).double() @ basis.double()).float().numpy())


def project_both(x: torch.Tensor, basis: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return y = x·basis and xᵀ·y, for x of len(basis) columns. A fit, as `project_rows`."""
    rows = x.view(-1, len(basis)).double()
    left = rows @ basis.double()
    return torch.from_numpy(left.float().numpy()), torch.from_numpy((rows.t() @ left).float().numpy())
