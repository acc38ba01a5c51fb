"""The kernels of structured frames, by the native module, on all threads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from gradwire import _native
from gradwire.kernels.conditions import where
from gradwire.kernels.cpu.native_arguments import as_array, flat_fp32
from gradwire.kernels.reference.grid import Outliers
from gradwire.kernels.reference.structure import (
    RUN,
    RUNS,
    SEEN_WHOLE,
    Energies,
    Factors,
    Kept,
    Prediction,
    Scales,
    Source,
    View,
)

__all__ = [
    "add_prediction", "axis_energies", "gram", "measure_remainder", "merge_classes", "prepare", "project_both",
    "project_rows", "quantize_classes", "rebuild", "rebuild_classes", "sample_remainder",
]  # fmt: skip

DIRECTIONS = 16  # columns of a basis, as the native kernels want them
NO_FLOATS, NO_SIGNED = np.empty(0, dtype=np.float32), np.empty(0, dtype=np.int8)


def _flat(matrices: Sequence[torch.Tensor]) -> np.ndarray:
    return np.concatenate([m.numpy().reshape(-1) for m in matrices]) if matrices else NO_FLOATS


@where(flat_fp32)
def axis_energies(x: torch.Tensor, shape: View) -> Energies:
    """Add up squares in fp64, by sixteen groups of rows."""
    width = shape[1] * shape[2]
    rows, places = np.zeros(shape[0]), np.zeros(width)
    _native.axis_energies(as_array(x), rows[: -(-x.numel() // width)], places, torch.get_num_threads())
    view = places.reshape(shape[1:])
    return rows, view.sum(1), view.sum(0)


@where(flat_fp32)
def prepare(x: torch.Tensor, source: Source, shape: View, matrices: Sequence[torch.Tensor]) -> Energies:
    """Compensate, transform and measure a few rows at a time."""
    gradient, memory, decay = source
    width = shape[1] * shape[2]
    rows, places = np.zeros(shape[0]), np.zeros(width)
    _native.structure_prepare(
        as_array(gradient), as_array(memory), decay, _flat(matrices), [len(m) for m in matrices], as_array(x), rows,
        places, torch.get_num_threads(),
    )  # fmt: skip
    view = places.reshape(shape[1:])
    return rows, view.sum(1), view.sum(0)


@where(flat_fp32)
def add_prediction(x: torch.Tensor, prediction: Prediction, first: int, sign: float) -> None:
    """Add up outer products, in strips that stay in the first-level cache."""
    left, right = prediction
    rows = x.numel() // right.shape[1]
    part = left[first : first + rows].contiguous().view(-1)
    _native.add_prediction(as_array(x), as_array(part), as_array(right.view(-1)), len(right), sign,
                           torch.get_num_threads())  # fmt: skip


def _flat_factors(prediction: Prediction | None) -> tuple[np.ndarray, np.ndarray, int]:
    if prediction is None:
        return NO_FLOATS, NO_SIGNED, 0
    left, right = (as_array(side.contiguous().view(-1)) for side in prediction)
    return left, right, len(prediction[1])


@where(flat_fp32)
def measure_remainder(x: torch.Tensor, prediction: Prediction) -> Energies:
    """Predict and measure a few rows at a time, and keep nothing of them."""
    rows, places = np.zeros(len(prediction[0])), np.zeros(prediction[1].shape[1])
    _native.measure_remainder(as_array(x), *_flat_factors(prediction), rows, places, torch.get_num_threads())
    return rows, places, places.sum(keepdims=True)


@where(flat_fp32)
def sample_remainder(x: torch.Tensor, prediction: Prediction | None) -> torch.Tensor:
    """Predict the entries of the sample alone."""
    if x.numel() <= SEEN_WHOLE:  # the sample is all of it
        if prediction is None:
            return x
        rest = x.clone()
        add_prediction(rest, prediction, 0, -1.0)
        return rest
    out = np.empty(RUNS * RUN, dtype=np.float32)
    _native.sample_remainder(as_array(x), *_flat_factors(prediction), RUNS, RUN, out)
    return torch.from_numpy(out)


@where(flat_fp32)
def rebuild(
    out: torch.Tensor, symbols: torch.Tensor | None, values: torch.Tensor, outliers: tuple[torch.Tensor, torch.Tensor],
    prediction: Prediction | None, first: int, width: int, matrices: Sequence[torch.Tensor],
    source: Source | None = None,
) -> None:  # fmt: skip
    """Make values in one pass, a few rows at a time."""
    left, right, rank = NO_FLOATS, NO_SIGNED, 0
    if prediction is not None:
        rank = len(prediction[1])
        left = as_array(prediction[0][first : first + -(-out.numel() // width)].contiguous().view(-1))
        right = as_array(prediction[1].view(-1))
    gradient, decay = (source[:2], source[2]) if source is not None else ((None, None), 0.0)
    _native.structure_rebuild(
        as_array(symbols), _table(values), len(values), as_array(out), width, as_array(outliers[0]),
        as_array(outliers[1]), left, right, rank,
        _flat(matrices), [len(matrix) for matrix in matrices], *map(as_array, gradient), decay,
        torch.get_num_threads(),
    )  # fmt: skip


def _table(values: torch.Tensor) -> np.ndarray:
    table = np.zeros(256, dtype=np.float32)
    table[: len(values)] = as_array(values)
    return table


@where(flat_fp32)
def quantize_classes(
    x: torch.Tensor, prediction: Prediction | None, step: float, shift: float, values: torch.Tensor, capacity: int,
    scales: Scales, base: int, classes: int, symbols: torch.Tensor, streams: torch.Tensor, kept: Kept | None = None,
) -> tuple[Outliers, np.ndarray]:  # fmt: skip
    """Quantize a few rows at a time, share their symbols out, and rebuild them while they are in the caches."""
    counts = np.empty(classes * len(values), dtype=np.int64)
    positions = torch.empty(capacity, dtype=torch.int64, device="cpu")
    multiples = torch.empty(capacity, dtype=torch.int32, device="cpu")
    memory_out, source, matrices, offset = kept or (None, None, (), 0.0)
    gradient, memory, decay = source or (None, None, 0.0)
    number = _native.quantize_classes(
        as_array(x), *_flat_factors(prediction), step, shift, as_array(values), *scales, base, classes,
        as_array(symbols), as_array(streams), counts, as_array(positions), as_array(multiples), offset,
        as_array(memory_out), as_array(gradient), as_array(memory), decay, _flat(matrices), [len(m) for m in matrices],
        torch.get_num_threads(),
    )  # fmt: skip
    return (positions[:number], multiples[:number]), counts.reshape(classes, len(values))


@where(flat_fp32)
def rebuild_classes(
    out: torch.Tensor, streams: np.ndarray | None, zeros: np.ndarray, scales: Scales, base: int, values: torch.Tensor,
    outliers: tuple[torch.Tensor, torch.Tensor], factors: Factors, matrices: Sequence[torch.Tensor], weight: float,
    accumulate: bool,
) -> bool:  # fmt: skip
    """Put a few rows together from their classes, and make their values while they are in the caches."""
    rows, columns, terms = factors
    _native.rebuild_classes(
        streams, zeros, *scales, base, _table(values), len(values), as_array(out), as_array(outliers[0]),
        as_array(outliers[1]), np.array(terms, dtype=np.float32), as_array(rows.view(-1)), as_array(columns.view(-1)),
        _flat(matrices), [len(matrix) for matrix in matrices], weight, accumulate, torch.get_num_threads(),
    )  # fmt: skip
    return True


def _padded(basis: torch.Tensor) -> np.ndarray:
    if basis.shape[1] == DIRECTIONS and basis.is_contiguous():
        return basis.numpy().reshape(-1)
    wide = np.zeros((len(basis), DIRECTIONS), dtype=np.float32)
    wide[:, : basis.shape[1]] = basis.numpy()
    return wide.reshape(-1)


@where(flat_fp32)
def project_rows(x: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    """Return x·basis: in fp32, with the same bits on any number of threads."""
    out = np.empty(x.numel() // len(basis) * DIRECTIONS, dtype=np.float32)
    _native.project_rows(as_array(x), _padded(basis), out, torch.get_num_threads())
    return torch.from_numpy(out.reshape(-1, DIRECTIONS))[:, : basis.shape[1]]


@where(flat_fp32)
def project_both(x: torch.Tensor, basis: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Go through x once, eight rows at a time; with the same bits on any number of threads."""
    rows, width = x.numel() // len(basis), len(basis)
    left, right = np.empty(rows * DIRECTIONS, dtype=np.float32), np.empty(width * DIRECTIONS, dtype=np.float32)
    _native.project_both(as_array(x), _padded(basis), left, right, torch.get_num_threads())
    both = (torch.from_numpy(side.reshape(-1, DIRECTIONS))[:, : basis.shape[1]] for side in (left, right))
    return next(both), next(both)


@where(flat_fp32)
def gram(a: torch.Tensor, b: torch.Tensor) -> np.ndarray:
    """Return aᵀ·b."""
    out = np.empty(DIRECTIONS * DIRECTIONS)
    _native.gram(_padded(a), _padded(b), out)
    return out.reshape(DIRECTIONS, DIRECTIONS)[: a.shape[1], : b.shape[1]]


def merge_classes(
    streams: np.ndarray, positions: np.ndarray, zeros: np.ndarray, scales: Scales, base: int, first: int, count: int
) -> torch.Tensor:
    """Put rows together from the streams of all classes."""
    symbols = np.empty(count, dtype=np.uint8)
    _native.merge_classes(streams, positions, zeros, *scales, base, first, symbols)
    return torch.from_numpy(symbols)
