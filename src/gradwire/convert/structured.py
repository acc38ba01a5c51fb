"""Structure first, then a grid: what a tensor's shape says of its entries is taken out before they are quantized.

Three things are used (docs/structure.md has the measurements). Kernels of convolutions are smooth, so they get a cosine
transform each. Matrices are nearly of low rank, so a few outer products predict them. And the scale of an entry is that
of its row times that of its column, so entries are coded by classes. All of it keeps the squared error: u − ĝ is as
large as it would be on the grid alone, and takes fewer bits.

encode: u ─► transform ─► minus prediction ─► grid ─► symbols by class ─► bytes, with the way back for the error memory
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from gradwire import kernels
from gradwire.convert.blocks import BLOCK, WIDEST, combine
from gradwire.convert.class_streams import KEPT, ReadStreams, WrittenStreams, read_streams
from gradwire.convert.conversion import Conversion, Converter, in_host_memory, limit_to
from gradwire.convert.ecq import Ecq, Points, read_points, table
from gradwire.convert.grid_search import Curve, MeasuredGrid
from gradwire.convert.low_rank import MOST_TERMS, LowRankFactors, fit_factors, no_factors, read_factors
from gradwire.convert.minifloat import write
from gradwire.convert.outliers import Outliers, read_outliers, write_outliers
from gradwire.convert.scale_classes import fit_classes, one_class, read_classes
from gradwire.convert.segments import read_step
from gradwire.convert.tensor_view import BLOCKS, TensorView, as_blocks, as_kernels, as_matrix, read_view
from gradwire.errors import FrameError
from gradwire.frame.byte_fields import Reader, bfloat16, varint
from gradwire.frame.headers import STRUCTURED, Header

DEFAULT_NMSE = 0.03
FEWEST_IN_BLOCKS = 4096  # entries: shorter vectors are grid frames
LOG_BLOCKS = (4, 5, 6, 7)  # that an encoder tries
CLEARLY_SMOOTH = 0.02  # bits an entry that a transform has to save
FIRM = 0.5  # part of a sample's energy that its grid has to keep, if that of the tensor has to
FEW_OUTLIERS = 1 / 4096  # part of the entries
LOOKED_AT = 1 << 18  # entries by which blocks are chosen
SCALE_BITS = 2.5  # of a block: about what telling it costs
CACHED = 1 << 20  # entries that are rebuilt at a time
LIMITED = float(torch.finfo(torch.float32).max) ** 2 / 2  # energy: an infinity has become the largest number by then
REDUNDANT = 1e-9  # a prediction as exact as this leaves nothing


@dataclass(frozen=True)
class _Content:
    """All that makes the values of a structured tensor: an encoder has it in hand, and a decoder reads it."""

    view: TensorView
    factors: LowRankFactors
    points: Points
    largest: int  # magnitude of a symbol
    outliers: Outliers
    dtype: torch.dtype

    def write_values(
        self, symbols: torch.Tensor | None, rows: _Rows, out: torch.Tensor, source: kernels.Source | None = None
    ) -> None:
        """Write the values of these rows to `out`, as fp32 numbers, not yet rounded to the tensor's dtype.

        With a source, what it has beyond these values is written instead.
        """
        start, stop = np.searchsorted(self.outliers[0], (rows.entries.start, rows.entries.stop))
        positions = torch.from_numpy(self.outliers[0][start:stop] - rows.entries.start)
        apart = self.points.of(torch.from_numpy(self.outliers[1][start:stop]))
        prediction = self.factors.prediction_of(rows.first, -(-out.numel() // self.view.width))
        kernels.rebuild(
            out, symbols, table(self.points, max(1, self.largest)), (positions, apart), prediction, 0, self.view.width,
            self.view.matrices, source,
        )  # fmt: skip

    def write_all(self, streams: ReadStreams | None, out: torch.Tensor, weight: float, accumulate: bool) -> bool:
        """Write weight·values of the whole tensor as `write_values` does, or add them; False if no kernel does it."""
        classes, symbols, zeros = one_class(self.view), None, np.zeros(1, dtype=np.uint8)
        if streams is not None:
            classes, symbols, zeros = streams.classes, streams.symbols, streams.zeros
        return kernels.rebuild_classes(
            out, symbols, zeros, classes.small_scales, classes.base, table(self.points, max(1, self.largest)),
            (torch.from_numpy(self.outliers[0]), self.points.of(torch.from_numpy(self.outliers[1]))),
            (self.factors.rows, self.factors.columns, self.factors.scales), self.view.matrices, weight, accumulate,
        )  # fmt: skip


@dataclass(frozen=True)
class _Rows:
    """Some rows of a view that are made together: the first one, and their entries."""

    first: int
    entries: slice


def _row_blocks(view: TensorView, entries: int) -> list[_Rows]:
    """Return all rows, about so many entries at a time."""
    together = max(1, entries // view.width)
    return [
        _Rows(first, slice(first * view.width, min(view.count, (first + together) * view.width)))
        for first in range(0, view.shape[0], together)
    ]


class Structured(Converter):
    """A grid on what transform and prediction leave, at the relative squared error `nmse`.

    `transform`, `classes` and `rank` switch the parts off, which is for experiments: 0 is no prediction.
    """

    wire_id = STRUCTURED
    families = ("quantize", "grid", "structure")
    lists_segments = stores_tiny = True
    by_rows = reads_ahead = True

    def __init__(
        self, nmse: float = DEFAULT_NMSE, rank: int = MOST_TERMS, transform: bool = True, classes: bool = True
    ):
        self.nmse, self.rank, self.transform, self.classes = nmse, rank, transform, classes
        self._grid = Ecq(None, nmse)

    def for_tensor(self, shape: tuple[int, ...], segments: tuple[int, ...]) -> Converter:
        """Return what encodes a tensor of this shape: a plain grid, where there is no structure to speak of."""
        flat = sum(size > 1 for size in shape) < 2
        return self._grid if segments or (flat and math.prod(shape) < FEWEST_IN_BLOCKS) else self

    # ── encoding ──

    def encode(self, conversion: Conversion, out: torch.Tensor) -> int:
        """Write the payload and update the error memory, as `Converter.encode` promises."""
        view, x, places = self._prepared(conversion)
        energy = float(places[0].sum())
        if not energy < LIMITED:
            conversion.require_finite()
        distortion = self.nmse * energy
        factors = fit_factors(x, view, places, distortion, self.rank)
        if (prediction := factors.prediction_of(0, view.shape[0])) is not None:
            places = kernels.measure_remainder(x, prediction)
        energies = _by_axis(view, places)
        left = float(energies[0].sum())
        head = view.fields + factors.fields
        if left <= distortion * (1 + REDUNDANT):
            content = _Content(view, factors, Points(1.0, (), torch.float32), 0, _no_outliers(), conversion.dtype)
            _remember(conversion, content, None)
            return write(out, head, bytes([0]))
        grid = _fit_grid(x, prediction, distortion, left)
        points = Points(grid.step, grid.offsets, torch.float32)
        classes = fit_classes(view, energies, grid.step) if self.classes else one_class(view)
        kept = _kept(conversion, view, points)
        values, capacity = table(points, grid.largest), outlier_capacity(view.count)
        streams = WrittenStreams(x, prediction, grid, values, classes, capacity, kept)
        coded, outliers = streams.coded(), streams.outliers
        apart = write_outliers(outliers, grid.largest)
        if kept is None:
            content = _Content(view, factors, points, grid.largest, outliers, conversion.dtype)
            _remember(conversion, content, streams.symbols)
        offsets = bytes([len(grid.offsets), *(d & 255 for d in grid.offsets)])
        side = bytes([grid.largest]) + offsets + bfloat16(grid.step)
        return write(out, head, side, *coded[:1], varint(len(apart)), *coded[1:], apart)

    def _prepared(self, conversion: Conversion) -> tuple[TensorView, torch.Tensor, kernels.Energies]:
        """Return how to look at the tensor, what is to be coded of it before any prediction, and its energies.

        These are of rows and of the places in a row.
        """
        source = (conversion.gradient, conversion.memory, conversion.decay)
        x = KEPT.room("x", conversion.count, torch.float32)
        smooth = as_kernels(conversion.shape) if self.transform else None
        if smooth is not None:
            places = kernels.prepare(x, source, (smooth.shape[0], smooth.width, 1), smooth.matrices)
            if _saved(_by_axis(smooth, places)[2]) > CLEARLY_SMOOTH:
                return smooth, x, places
        view = as_matrix(conversion.shape)
        if view is None or min(view.shape[:2]) < 2:
            view = _best_blocks(conversion)
        return view, x, kernels.prepare(x, source, view.shape, [])


def _by_axis(view: TensorView, places: kernels.Energies) -> kernels.Energies:
    """Return the energies of rows, columns and coefficients from those of rows and of the places in a row."""
    of_row = places[1].reshape(view.shape[1:])
    return places[0], of_row.sum(1), of_row.sum(0)


def _saved(energies: np.ndarray) -> float:
    """Return how many bits an entry are saved by knowing which of these energies it has."""
    mean = float(energies.mean())
    if not mean > 0 or not math.isfinite(mean):
        return 0.0
    return -float(np.log2(np.maximum(energies / mean, 2.0**-20)).mean()) / 2


def _best_blocks(conversion: Conversion) -> TensorView:
    """Return the blocks whose scales tell the most for what they cost, by the first entries of the tensor."""
    part = conversion.slice(0, min(conversion.count, LOOKED_AT)).compensated()
    best = (-math.inf, LOG_BLOCKS[-1])
    for log_block in LOG_BLOCKS:
        view = as_blocks(part.numel(), log_block)
        saved = _saved(kernels.axis_energies(part, view.shape)[0]) - SCALE_BITS / (1 << log_block)
        best = max(best, (saved, log_block))
    return as_blocks(conversion.count, best[1])


def _fit_grid(x: torch.Tensor, prediction: kernels.Prediction | None, distortion: float, energy: float) -> MeasuredGrid:
    """Return the grid with the fewest bits at this squared error of x less a prediction, which has this energy."""
    curve = Curve(in_host_memory(kernels.sample_remainder(x, prediction)))
    if not curve.energy:  # the few entries that are not zero have escaped the sample
        rest = kernels.remainder(x, prediction)
        curve = Curve(in_host_memory(rest[rest != 0]), int((rest == 0).sum()))
    # The error of an entry hardly depends on how large it is, and so not on how much of the energy is in the sample.
    # But where most of it has escaped, what is left there must not be taken for noise.
    error = distortion * curve.count / len(x)
    grid = curve.find(error=min(error, max(distortion / energy, FIRM) * curve.energy))
    outliers = curve.outliers(grid)
    for largest in kernels.GRID_SIZES:
        if outliers(largest)[0] <= FEW_OUTLIERS * curve.count:
            break
    return MeasuredGrid(
        grid.step, grid.shift, grid.bits, grid.outlier_bits, grid.error, max(largest, grid.largest), grid.offsets
    )


def outlier_capacity(count: int) -> int:
    """Return how many outliers a tensor may have: decoders keep them beside the symbols."""
    return count // 128 + 16


def _no_outliers() -> Outliers:
    return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int32)


def _kept(conversion: Conversion, view: TensorView, points: Points) -> kernels.Kept | None:
    """Return how the error memory is written in the pass that quantizes; None where what is sent is rounded besides."""
    if conversion.memory_out is None or conversion.dtype != torch.float32:
        return None
    source = (conversion.gradient, conversion.memory, conversion.decay) if view.axes else None
    offset = points.offsets[-1] / 256 if points.offsets else 0.0
    return kernels.Kept(conversion.memory_out, source, view.matrices, offset)


def _remember(conversion: Conversion, content: _Content, symbols: torch.Tensor | None) -> None:
    """Write what the frame leaves out to the error memory: u less what will be decoded."""
    if conversion.memory_out is None:
        return
    for rows in _row_blocks(content.view, CACHED):
        part = None if symbols is None else symbols[rows.entries]
        memory = None if conversion.memory is None else conversion.memory[rows.entries]
        source, out = (conversion.gradient[rows.entries], memory, conversion.decay), conversion.memory_out[rows.entries]
        if content.dtype == torch.float32:
            content.write_values(part, rows, out, source)
            continue
        values = torch.empty(len(out), dtype=torch.float32, device="cpu")
        content.write_values(part, rows, values)
        torch.sub(kernels.compensate(*source), limit_to(values, content.dtype).float(), out=out)


# ── decoding ──────────────────────────────────────────────────────────────────────────────────────


def decode(header: Header, payload: np.ndarray, out: torch.Tensor, weight: float, accumulate: bool) -> None:
    """Write weight·decoded to `out`, or add it."""
    reader = Reader(memoryview(payload))
    if not header.dtype.is_floating_point or not header.elements:
        raise FrameError("structured frame of a dtype or size that is always stored")
    view = read_view(reader, header.shape)
    factors = read_factors(reader, view) if view.kind != BLOCKS else _no_rank(reader, view)
    if not reader.data[reader.position : reader.position + 1]:
        raise FrameError("frame is cut short")
    if not reader.data[reader.position]:
        if reader.position + 1 != len(reader.data):
            raise FrameError("bytes after the end of a structured frame")
        points = Points(1.0, (), torch.float32)
        _decode_rows(_Content(view, factors, points, 0, _no_outliers(), header.dtype), None, out, weight, accumulate)
        return
    largest, offsets = read_points(reader)
    points = Points(read_step(reader), offsets, torch.float32)
    classes = read_classes(reader, view)
    length = reader.varint(len(reader.data))
    streams = read_streams(reader, classes, view.count, largest)
    if length != len(reader.data) - reader.position:
        raise FrameError("wrong length of the outliers")
    outliers = read_outliers(reader.rest(), view.count, largest, outlier_capacity(view.count))
    _decode_rows(_Content(view, factors, points, largest, outliers, header.dtype), streams, out, weight, accumulate)


def _no_rank(reader: Reader, view: TensorView) -> LowRankFactors:
    if reader.byte():
        raise FrameError("blocks have no prediction")
    return no_factors(view)


def _decode_rows(
    content: _Content, streams: ReadStreams | None, out: torch.Tensor, weight: float, accumulate: bool
) -> None:
    count = content.view.count
    fp32 = out.dtype == content.dtype == torch.float32 and out.is_cpu
    if fp32 and content.write_all(streams, out, weight, accumulate):
        return
    in_place = fp32 and weight == 1 and not accumulate
    together = min(max(count // 16, WIDEST), CACHED) if in_place else min(max(count // 64, BLOCK), WIDEST)
    for rows in _row_blocks(content.view, together):
        symbols = streams.next(rows.entries) if streams is not None else None
        if in_place:
            content.write_values(symbols, rows, out[rows.entries])
            continue
        values = torch.empty(rows.entries.stop - rows.entries.start, dtype=torch.float32, device="cpu")
        content.write_values(symbols, rows, values)
        # What is rounded to zero loses its sign.
        combine(limit_to(values, content.dtype).add_(0.0), out[rows.entries], weight, accumulate)
