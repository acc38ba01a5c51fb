"""Prediction of a matrix by a few outer products: what is left of it takes fewer bits.

The gradient of a layer's weights is a sum of outer products over the batch, and much of it lies in few directions. So
u ≈ Σ_t s_t·a_t·b_tᵀ with integers a and b is sent first, and the remainder is coded like any other tensor. PowerSGD
(arXiv 1905.13727) sends such a product alone and leaves the remainder to the error memory.

The directions come from a randomized range finder (Halko, Martinsson and Tropp, arXiv 0909.4061, algorithm 4.4) that
begins anew for every tensor: one pass over it, there and back, finds them, and another makes them good. A basis kept
from the last step would save one of them, but would have to be kept, saved, and agreed on. (To find them in some of the
rows, a quarter or a half, made frames of matrices with sixteen directions up to a third longer.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from gradwire import compress, kernels
from gradwire.convert.minifloat import round_step
from gradwire.convert.scale_classes import read_symbols, write_symbols
from gradwire.convert.tensor_view import BLOCKS, TensorView
from gradwire.errors import FrameError
from gradwire.frame.byte_fields import Reader, bfloat16, varint

MOST_TERMS = 32
SOUGHT = 16  # directions that are looked for
LARGEST = 127  # magnitude of a factor
SMALLEST_SIDE = 16  # rows or columns: a matrix with fewer has nothing to predict
LOOKED_AT = 32  # rows, and columns, by which the bits of a remainder are estimated
LADDER = (1, 2, 3, 4, 6, 8, 10, 12, 14, 16)  # numbers of terms that are compared
BEYOND = 0.25  # what a grid takes beyond the rate of Gaussian entries, up to a quarter of a bit
FIELDS = 30  # bytes: about what a term takes beside its factors
ORDINARY = (1e-50, 1e24)  # mean squares with which sums and products stay within the range of fp32
WEAKEST = 1e-6  # direction beside the strongest
CELL = 12.0  # a step that rounds evenly has an error of step²/12


@dataclass(frozen=True)
class LowRankFactors:
    """The terms of a prediction: p = Σ_t (s_t·a_t)·b_t, with integers a_t for rows and b_t for the entries of a row."""

    scales: tuple[float, ...]
    rows: torch.Tensor  # int8, R × r
    columns: torch.Tensor  # int8, r × C·K

    @property
    def rank(self) -> int:
        """The number of terms."""
        return len(self.scales)

    def prediction_of(self, first: int, rows: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the factors of these rows as kernels take them, s·a and b; None if there are no terms."""
        if not self.rank:
            return None
        scales = torch.tensor(self.scales, dtype=torch.float32, device="cpu")
        return self.rows[first : first + rows].float() * scales, self.columns

    @cached_property
    def fields(self) -> bytes:
        """The bytes of all terms."""
        parts = [bytes([self.rank])]
        for t, scale in enumerate(self.scales):
            numbers = torch.cat([self.rows[:, t], self.columns[t]]).numpy().astype(np.int64)
            most = max(1, int(np.abs(numbers).max()))
            symbols = (numbers + most).astype(np.uint8)
            coded = write_symbols(symbols, compress.Alphabet(2 * most + 1, most))
            parts += [bfloat16(scale), bytes([most]), varint(len(coded)), coded]
        return b"".join(parts)


def no_factors(view: TensorView) -> LowRankFactors:
    """Return a prediction without terms: zero."""
    rows = torch.empty((view.shape[0], 0), dtype=torch.int8, device="cpu")
    return LowRankFactors((), rows, torch.empty((0, view.width), dtype=torch.int8, device="cpu"))


def most_terms(view: TensorView) -> int:
    """Return how many terms a frame of this tensor may have."""
    if view.kind == BLOCKS:
        return 0
    return min(MOST_TERMS, view.count // 8 // (view.shape[0] + view.width))


def fit_factors(
    x: torch.Tensor, view: TensorView, energies: kernels.Energies, distortion: float, limit: int
) -> LowRankFactors:
    """Return the terms that save more bits than they cost, at a squared error of `distortion` for the whole tensor.

    `energies` are those of the rows of x and of the places in a row.
    """
    sought = min(SOUGHT, limit, most_terms(view), view.shape[0] // 2, view.width // 2)
    if sought < 1 or min(view.shape[0], view.width) < SMALLEST_SIDE:
        return no_factors(view)
    mean = float(energies[0].sum()) / view.count
    if not mean * view.count > distortion or not ORDINARY[0] < mean < ORDINARY[1]:
        return no_factors(view)
    left, strengths, right = _directions(x, view, min(SOUGHT, view.shape[0], view.width))
    cell = math.sqrt(CELL * distortion / view.count)
    rank = _best_rank(energies[:2], (left, strengths, right), sought, view.count, distortion)
    return _rounded(left[:, :rank], strengths[:rank], right[:rank], cell) if rank else no_factors(view)


def _directions(x: torch.Tensor, view: TensorView, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return left directions, strengths and right directions: x ≈ left · diag(strengths) · right."""
    # Random signs are as good as Gaussian numbers, and the same everywhere.
    rng = np.random.Generator(np.random.Philox(0))
    basis = torch.from_numpy(rng.integers(0, 2, (view.width, number), dtype=np.int8) * np.float32(2) - np.float32(1))
    _, back = kernels.project_both(x, basis)
    basis = kernels.project_rows(_flat(back), _as_fp32(_whitening(kernels.gram(back, back))[0]))
    left, back = kernels.project_both(x, basis)
    # With an orthonormal basis left · turn of what the rows span, x ≈ (left · turn) · (back · turn)ᵀ.
    turn, _ = _whitening(kernels.gram(left, left))
    whitening, strengths = _whitening(turn.T @ kernels.gram(back, back) @ turn)
    right = kernels.project_rows(_flat(back), _as_fp32(turn @ whitening))
    left = kernels.project_rows(_flat(left), _as_fp32(turn @ (whitening * strengths)))
    return left.numpy(), strengths, right.numpy().T


def _whitening(products: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return what turns columns with these products into an orthonormal basis of what they span, and their strengths.

    The strongest direction comes first. Directions weaker than the rounding of fp32 are left out, as zeros. This takes
    a hundredth of the time of a QR or a singular value decomposition of the columns.
    """
    values, vectors = np.linalg.eigh(products)
    values, vectors = values[::-1], vectors[:, ::-1]
    strengths = np.sqrt(np.maximum(values, 0.0))
    used = strengths > WEAKEST * strengths[0]
    return vectors * np.where(used, 1 / np.where(used, strengths, 1.0), 0.0), np.where(used, strengths, 0.0)


def _flat(columns: torch.Tensor) -> torch.Tensor:
    return columns.reshape(-1)


def _as_fp32(turn: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(turn.astype(np.float32))


def _best_rank(
    energies: tuple[np.ndarray, ...], directions: tuple[np.ndarray, np.ndarray, np.ndarray], sought: int, count: int,
    distortion: float,
) -> int:  # fmt: skip
    """Return the number of terms with which terms and remainder take the fewest bits, by an estimate.

    The energies that rows and columns have left are known for every number of terms, without making the remainder.
    """
    left, strengths, right = directions
    cell = math.sqrt(CELL * distortion / count)
    rows, columns = (np.linspace(0, len(energy) - 1, LOOKED_AT).astype(np.int64) for energy in energies)
    taken = strengths[:sought] ** 2
    of_rows = energies[0][rows, None] - np.cumsum(left[rows, :sought] ** 2 * taken, 1)
    of_columns = energies[1][columns, None] - np.cumsum(right[:sought, columns].T ** 2 * taken, 1)
    rest = float(energies[0].sum()) - np.cumsum(taken)
    best, fewest = 0, _bits(energies[0][rows], energies[1][columns], float(energies[0].sum()), distortion, count)
    spent = 0.0
    for rank in range(1, sought + 1):
        for energy in energies:
            spread = strengths[rank - 1] / math.sqrt(len(energy)) / cell  # of the factors, in steps
            spent += len(energy) * (0.5 * math.log2(1 + CELL * spread**2) + 0.15)
        spent += 8 * FIELDS
        if spent >= fewest:
            break
        if rank in LADDER or rank == sought:
            bits = spent + _bits(of_rows[:, rank - 1], of_columns[:, rank - 1], rest[rank - 1], distortion, count)
            if bits < fewest:
                best, fewest = rank, bits
    return best


def _bits(rows: np.ndarray, columns: np.ndarray, energy: float, distortion: float, count: int) -> float:
    """Return about the bits of entries whose variances are products of these of some rows and of some columns.

    That is the rate of Gaussian entries, by reverse water-filling, and what a grid takes beyond it.
    """
    if energy <= distortion:
        return 0.0
    shape = np.maximum(rows, 0.0)[:, None] * np.maximum(columns, 0.0)
    mean = shape.mean()
    if not mean > 0:
        return 0.0
    variance = np.sort(shape.ravel()) * (energy / count / mean)
    # Where the k smallest variances are below the level, the others have an error of just the level.
    below = np.concatenate([[0.0], np.cumsum(variance)[:-1]])
    levels = (len(variance) * (distortion / count) - below) / np.arange(len(variance), 0, -1)
    level = float(levels[np.argmax(levels <= variance)])
    excess = np.log2(np.maximum(variance / max(level, 1e-300), 1.0)) / 2
    return count * float((excess + BEYOND * np.minimum(excess, 1.0)).mean())


def _rounded(left: np.ndarray, strengths: np.ndarray, right: np.ndarray, cell: float) -> LowRankFactors:
    """Return integer factors. Both sides of a term have the step with which they add about as much error as entries."""
    rows, columns, scales = [], [], []
    for t, strength in enumerate(strengths):
        a, b = strength * left[:, t], strength * right[t]
        step = max(cell, float(max(np.abs(a).max(), np.abs(b).max())) / LARGEST)
        scale = round_step(step * step / strength)
        step = math.sqrt(scale * strength)  # with which the rounded scale is exact
        rows.append(np.clip(np.rint(a / step), -LARGEST, LARGEST))
        columns.append(np.clip(np.rint(b / step), -LARGEST, LARGEST))
        scales.append(scale)
    return LowRankFactors(
        tuple(scales),
        torch.from_numpy(np.ascontiguousarray(np.stack(rows, 1).astype(np.int8))),
        torch.from_numpy(np.stack(columns).astype(np.int8)),
    )


def read_factors(reader: Reader, view: TensorView) -> LowRankFactors:
    """Read the terms of a prediction."""
    rank = reader.byte()
    if rank > most_terms(view):
        raise FrameError("invalid rank")
    if not rank:
        return no_factors(view)
    side, scales = view.shape[0] + view.width, []
    numbers = np.empty((rank, side), dtype=np.int8)
    for t in range(rank):
        scales.append(reader.bfloat16())
        most = reader.byte()
        if not 2.0**-126 <= scales[-1] <= 2.0**126 or not 1 <= most <= LARGEST:
            raise FrameError("invalid factors")
        symbols = read_symbols(reader, compress.Alphabet(2 * most + 1, most), side)
        numbers[t] = symbols.astype(np.int16) - most
    factors = torch.from_numpy(numbers)
    return LowRankFactors(
        tuple(scales), factors[:, : view.shape[0]].t().contiguous(), factors[:, view.shape[0] :].contiguous()
    )
