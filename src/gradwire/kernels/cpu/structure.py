"""The kernels of structured frames, by the native module, on all threads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from gradwire import _native
from gradwire.kernels.conditions import where
from gradwire.kernels.cpu.native_arguments import as_array, flat_fp32
from gradwire.kernels.reference.grid import Outliers
from gradwire.kernels.reference.structure import Energies, Factors, Prediction, Scales, Source, View

__all__ = [
    "add_and_measure", "add_prediction", "axis_energies", "gram", "merge_classes", "prepare", "project_columns",
    "project_rows", "quantize_classes", "rebuild", "rebuild_classes",
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


@where(flat_fp32)
def add_and_measure(x: torch.Tensor, prediction: Prediction, sign: float) -> Energies:
    """Predict and measure a few rows at a time."""
    left, right = prediction
    rows, places = np.zeros(len(left)), np.zeros(right.shape[1])
    _native.add_and_measure(as_array(x), as_array(left.contiguous().view(-1)), as_array(right.view(-1)), len(right),
                            sign, rows, places, torch.get_num_threads())  # fmt: skip
    return rows, places, places.sum(keepdims=True)


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
    x: torch.Tensor, step: float, shift: float, values: torch.Tensor, capacity: int, scales: Scales, base: int,
    classes: int, symbols: torch.Tensor, streams: torch.Tensor,
) -> tuple[Outliers, np.ndarray]:  # fmt: skip
    """Quantize a few rows at a time, and share their symbols out while they are in the caches."""
    counts = np.empty(classes * len(values), dtype=np.int64)
    positions = torch.empty(capacity, dtype=torch.int64, device="cpu")
    multiples = torch.empty(capacity, dtype=torch.int32, device="cpu")
    number = _native.quantize_classes(
        as_array(x), step, shift, as_array(values), *scales, base, classes, as_array(symbols), as_array(streams),
        counts, as_array(positions), as_array(multiples), torch.get_num_threads(),
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
def project_columns(x: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    """Return xᵀ·basis: in fp32, with the same bits on any number of threads."""
    out = np.empty(x.numel() // len(basis) * DIRECTIONS, dtype=np.float32)
    _native.project_columns(as_array(x), _padded(basis), out, torch.get_num_threads())
    return torch.from_numpy(out.reshape(-1, DIRECTIONS))[:, : basis.shape[1]]


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
