"""Entropy-constrained quantization: multiples of a step, their symbols entropy-coded.

With an ideal coder behind it the best scalar quantizer at moderate rates is close to an evenly spaced grid with a
wider cell around zero and values at the means of its cells (Gish and Pierce 1968, Sullivan 1996). So
ĝ = sign(u)·(j + d_j)·step with j = ⌊|u|/step + w⌋. The step is chosen to meet the target, a rate or a squared error,
and w and the offsets d to meet it best (grid_search.py). Multiples beyond the symbols' range are listed apart, as
outliers: so a few symbols, which are fast to code, are enough for heavy tails too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch

from gradwire import compress, kernels
from gradwire.compress import rans
from gradwire.convert.blocks import blocks, combine
from gradwire.convert.conversion import Conversion, Converter, in_host_memory, limit_to
from gradwire.convert.grid_fit import GridFit, Target, choose
from gradwire.convert.grid_search import MeasuredGrid
from gradwire.convert.minifloat import round_steps, write
from gradwire.convert.outliers import Outliers, read_outliers, write_outliers
from gradwire.convert.segments import Segments, read_step
from gradwire.errors import FrameError
from gradwire.frame.byte_fields import Reader, bfloat16, varint
from gradwire.frame.headers import GRID, SEGMENTED, Header

DEFAULT_RATE = 2.0
MAX_OFFSETS = 15


@dataclass(frozen=True)
class Points:
    """The values that multiples of the step stand for."""

    step: float
    offsets: tuple[int, ...]  # in 1/256 of a step
    dtype: torch.dtype

    def of(self, multiples: torch.Tensor, steps: torch.Tensor | None = None) -> torch.Tensor:
        """Return fp32 values, rounded to the tensor's dtype; `steps` has the step of each entry where they differ."""
        magnitude = multiples.abs().float()
        if self.offsets:
            offsets = torch.tensor(self.offsets, dtype=torch.float32, device=multiples.device) / 256
            magnitude = magnitude + offsets[multiples.abs().clamp(1, len(self.offsets)).long() - 1]
        step = torch.tensor(self.step, dtype=torch.float32, device="cpu") if steps is None else steps
        signed = torch.where(multiples < 0, -magnitude, magnitude).masked_fill(multiples == 0, 0.0)
        return limit_to(signed * step, self.dtype).float()


@lru_cache(maxsize=512)
def table(points: Points, largest: int) -> torch.Tensor:
    """Return what each symbol stands for, from −largest to largest."""
    return points.of(torch.arange(-largest, largest + 1, dtype=torch.int32, device="cpu"))


def tables(points: Points, largest: int, steps: np.ndarray) -> torch.Tensor:
    """Return a row of `table` for each of these steps, in place of the step of the points."""
    multiples = torch.arange(-largest, largest + 1, dtype=torch.int32, device="cpu")
    return points.of(multiples, torch.from_numpy(steps.astype(np.float32))[:, None])


class Ecq(Converter):
    """Multiples of a step that meets a target: a rate in bits an entry, or a relative squared error `nmse`."""

    wire_id = GRID
    families = ("quantize", "grid")
    lists_segments = stores_tiny = True

    def __init__(self, rate: float | None = DEFAULT_RATE, nmse: float | None = None, rounding: str = "nearest"):
        self.stochastic = rounding == "stochastic"
        self.target = Target(rate, nmse, self.stochastic)

    def _whole_range(self, u: torch.Tensor, grid: MeasuredGrid, segmented: bool) -> MeasuredGrid:
        """Return the grid with a step so large that all outliers have room: a stochastic grid must not saturate."""
        step, room = grid.step, kernels.grid_capacity(u.numel(), segmented)
        while kernels.absmax(u) / step >= kernels.GRID_LIMIT or int((u.abs() >= grid.largest * step).sum()) > room:
            step *= 2
        return replace(grid, step=step)

    # ── encoding ──

    def encode(self, conversion: Conversion, out: torch.Tensor) -> int:
        """Write the payload and update the error memory, as `Converter.encode` promises."""
        if conversion.segments:
            return self._encode_segments(conversion, out)
        if self.stochastic:
            conversion.require_finite()
        fitted = self.target.fit_tensor(conversion)
        if fitted is None:
            return _all_zero(conversion, out)
        grid, coding = fitted.grid, fitted.coding
        if self.stochastic:
            grid = self._whole_range(conversion.compensated(), grid, False)
        points = Points(grid.step, grid.offsets, conversion.dtype)
        side = _side(grid) + bfloat16(grid.step)
        if _covers(coding) and not self.stochastic:
            length = _encode_fused(conversion, out, side, fitted, points)
            if length:
                return length
        symbols, outliers = self._quantize(conversion, grid, points)  # the same bytes in two passes
        return _finish(out, side, symbols, coding, outliers, grid.largest)

    def _quantize(
        self, conversion: Conversion, grid: MeasuredGrid, points: Points, segmented: bool = False
    ) -> tuple[torch.Tensor, Outliers]:
        conversion.require_finite()
        symbols, outliers = kernels.grid_quantize(
            conversion.gradient, conversion.memory, conversion.memory_out, conversion.decay, grid.step,
            grid.shift, table(points, grid.largest), kernels.grid_capacity(conversion.count, segmented),
            conversion.seed if self.stochastic else None,
        )  # fmt: skip
        return symbols, _correct(conversion, points, outliers)

    def _encode_segments(self, conversion: Conversion, out: torch.Tensor) -> int:
        """Encode several small tensors, each with its own step: on one grid, in units of their root mean squares."""
        conversion.require_finite()  # all of it, before the memory of the first segment changes
        u, lengths = conversion.compensated(), np.array(conversion.segments)
        scales = np.sqrt(kernels.segment_moments(u, lengths)[:, 2] / lengths)
        fitted = self._fit_relative(u, lengths, scales)
        steps = round_steps(np.where(scales > 0, fitted.grid.step * scales, 1.0))
        symbols, outliers, steps = self._quantize_segments(conversion, u, fitted.grid, lengths, steps)
        side = bytearray()
        for length, step in zip(conversion.segments, steps.tolist(), strict=True):
            side += varint(length) + bfloat16(step)
        grid = fitted.grid
        coding = choose(grid.largest, kernels.histogram(symbols, 2 * grid.largest + 1), conversion.count)
        return _finish(
            out, _side(grid) + varint(len(conversion.segments)) + bytes(side), symbols, coding, outliers, grid.largest
        )

    def _fit_relative(self, u: torch.Tensor, lengths: np.ndarray, scales: np.ndarray) -> GridFit:
        """Return the fit for all entries in units of their segment's scale, but for segments that are all zero."""
        fitted = None
        if scales.any():
            scale = torch.from_numpy(np.repeat(scales.astype(np.float32), lengths)).to(u.device)
            relative = (u / scale)[scale > 0]
            fitted = self.target.fit(kernels.sample(relative, None, 0.0), u.numel())
        if fitted is None:
            fitted = self.target.fit(torch.ones(1, dtype=torch.float32, device="cpu"), u.numel())
            assert fitted is not None
        return fitted

    def _quantize_segments(
        self, conversion: Conversion, u: torch.Tensor, grid: MeasuredGrid, lengths: np.ndarray, steps: np.ndarray
    ) -> tuple[torch.Tensor, Outliers, np.ndarray]:
        """Return the symbols and the outliers of all segments, and their steps; the error memory is updated."""
        if self.stochastic:
            return self._round_segments(conversion, u, grid, steps)
        points = Points(1.0, grid.offsets, conversion.dtype)
        symbols, apart = kernels.grid_quantize_segments(
            conversion.gradient, conversion.memory, conversion.memory_out, conversion.decay, lengths, steps,
            grid.shift, tables(points, grid.largest, steps),
        )  # fmt: skip
        if conversion.memory_out is not None and len(apart[0]):
            of_each = steps[np.searchsorted(np.cumsum(lengths), in_host_memory(apart[0]), side="right")]
            values = points.of(apart[1], torch.from_numpy(of_each.astype(np.float32)).to(apart[1].device))
            kernels.add_at(conversion.memory_out, apart[0], -values)
        return symbols, _listed(apart), steps

    def _round_segments(
        self, conversion: Conversion, u: torch.Tensor, grid: MeasuredGrid, steps: np.ndarray
    ) -> tuple[torch.Tensor, Outliers, np.ndarray]:
        """Do the same at random, on steps so large that all outliers have room."""
        pieces, positions, multiples, wide, position = [], [], [], steps.copy(), 0
        for i, part in enumerate(u.split(conversion.segments)):
            ranged = self._whole_range(part, replace(grid, step=float(steps[i])), True)
            symbols, apart = self._quantize(
                conversion.slice(position, position + len(part)), ranged,
                Points(ranged.step, ranged.offsets, conversion.dtype), True,
            )  # fmt: skip
            pieces.append(symbols)
            positions.append(apart[0] + position)
            multiples.append(apart[1])
            wide[i], position = ranged.step, position + len(part)
        return torch.cat(pieces), (np.concatenate(positions), np.concatenate(multiples)), wide


def _side(grid: MeasuredGrid) -> bytes:
    return bytes([grid.largest, len(grid.offsets), *(d & 255 for d in grid.offsets)])


def _all_zero(conversion: Conversion, out: torch.Tensor) -> int:
    if conversion.memory_out is not None:
        conversion.memory_out.zero_()
    zero = compress.Coding(compress.CONSTANT, parameters=bytes([1]))
    return write(out, bytes([1, 0]), bfloat16(1.0), varint(0), zero.head)


def _correct(conversion: Conversion, points: Points, outliers: tuple[torch.Tensor, torch.Tensor]) -> Outliers:
    """Subtract ĝ from the error memory of the outliers, which the kernels leave at u, and return the list of them."""
    positions, multiples = outliers
    if conversion.memory_out is not None and len(positions):
        kernels.add_at(conversion.memory_out, positions, -points.of(multiples))
    return _listed(outliers)


def _listed(outliers: tuple[torch.Tensor, torch.Tensor]) -> Outliers:
    return in_host_memory(outliers[0]), in_host_memory(outliers[1])


def _finish(
    out: torch.Tensor, side: bytes, symbols: torch.Tensor, coding: compress.Coding, outliers: Outliers, largest: int
) -> int:
    """Code symbols as the sample suggests; should it have misled us, count them, and code them again."""
    alphabet, apart = compress.Alphabet(2 * largest + 1, largest), write_outliers(outliers, largest)
    coded = compress.encode(in_host_memory(symbols), alphabet, coding) if _covers(coding) else b""
    if not coded or _misled(coding, len(coded)):
        coding = choose(largest, kernels.histogram(symbols, alphabet.symbols), len(symbols))
        coded = compress.encode(in_host_memory(symbols), alphabet, coding)
    return write(out, side, varint(len(apart)), coded, apart)


def _covers(coding: compress.Coding) -> bool:
    """Tell whether every symbol has a code. The search, which rounds in another order, may have missed a symbol."""
    return coding.coder == compress.RANS and bool(coding.table.all())


def _misled(coding: compress.Coding, length: int) -> bool:
    return 8 * length > coding.expected_bits * 1.02 + 1024


def _encode_fused(conversion: Conversion, out: torch.Tensor, side: bytes, fitted: GridFit, points: Points) -> int:
    """Encode in one pass: error feedback, conversion and coding. This is the hot path.

    The result is the length of the payload, or 0 if there is no kernel for it, or g + decay·e overflows: then the
    memory is as it was, up to rounding, and the caller encodes in two passes.
    """
    grid, coding = fitted.grid, fitted.coding
    lane_bits, chunks = rans.layout(conversion.count, coding.expected_bits)
    layout = len(rans.head(lane_bits, [0] * chunks))
    guess = len(varint(int(fitted.outlier_bits / 8)))
    start = len(side) + guess + len(coding.head) + layout
    values = table(points, grid.largest)
    # The kernels update the memory of outliers only for fp32 tensors: they do not round to another dtype.
    offset = grid.offsets[-1] / 256 if conversion.dtype == torch.float32 and grid.largest >= len(grid.offsets) else None
    coded = kernels.grid_rans(
        conversion.gradient, conversion.memory, conversion.memory_out, conversion.decay, grid.step, grid.shift, values,
        offset, kernels.grid_capacity(conversion.count), coding.table, coding.precision, lane_bits, chunks, out[start:],
    )  # fmt: skip
    if coded is None:
        return 0
    lengths, done, listed = coded
    body = out[start : start + sum(lengths)]
    if done < conversion.count:
        settled = None if offset is None else listed
        _take_back(conversion, body, lengths, done, chunks, coding, lane_bits, values, points, settled)
        conversion.require_finite()
        return 0  # only g + decay·e overflows: the plain path limits it
    outliers = _listed(listed) if offset is not None else _correct(conversion, points, listed)
    if _misled(coding, len(coding.head) + layout + len(body)):
        data = rans.head(lane_bits, lengths) + body.numpy().tobytes()
        symbols = torch.from_numpy(rans.decode(memoryview(data), conversion.count, coding.table, coding.precision))
        return _finish(out, side, symbols, coding, outliers, grid.largest)
    apart = write_outliers(outliers, grid.largest)
    head = side + varint(len(apart)) + coding.head + rans.head(lane_bits, lengths)
    if len(head) != start:
        out[len(head) : len(head) + len(body)] = body.clone()
    write(out, head)
    write(out[len(head) + len(body) :], apart)
    return len(head) + len(body) + len(apart)


def _take_back(
    conversion: Conversion, body: torch.Tensor, lengths: list[int], done: int, chunks: int, coding: compress.Coding,
    lane_bits: int, values: torch.Tensor, points: Points, settled: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:  # fmt: skip
    """Undo what was done to a memory that is updated in place."""
    if not done or not conversion.in_place:
        return
    sent, size = torch.empty(done, dtype=torch.float32, device="cpu"), kernels.chunk_size(conversion.count, chunks)
    kernels.rans_dequantize(
        memoryview(body.numpy()), lengths, size, coding.table, coding.precision, lane_bits, values, sent, False
    )
    if settled is not None:  # otherwise they are still at u, as if nothing of them had been sent
        kernels.add_at(sent, settled[0], points.of(settled[1]))
    conversion.take_back(sent)


# ── decoding ──────────────────────────────────────────────────────────────────────────────────────


def decode(header: Header, payload: np.ndarray, out: torch.Tensor, weight: float, accumulate: bool) -> None:
    """Write weight·decoded to `out`, or add it."""
    reader, count = Reader(memoryview(payload)), header.elements
    if not header.dtype.is_floating_point or not count:
        raise FrameError("grid frame of a dtype or size that is always stored")
    largest, offsets = read_points(reader)
    alphabet = compress.Alphabet(2 * largest + 1, largest)
    segments = Segments(reader, count) if header.flags & SEGMENTED else None
    points = Points(1.0 if segments else read_step(reader), offsets, header.dtype)
    length = reader.varint(len(reader.data))
    if length > len(reader.data) - reader.position:
        raise FrameError("frame is cut short")
    end = len(reader.data) - length
    symbols_reader = Reader(reader.data[:end], reader.position)
    _decode_symbols(header, symbols_reader, alphabet, points, segments, out, weight, accumulate)
    # The outliers come last, when there are no symbols any more: both would take more memory than is promised.
    outliers = read_outliers(reader.data[end:], count, largest)
    if not len(outliers[0]):
        return
    if segments is None:
        for part in blocks(len(outliers[0])):
            _add_outliers(outliers, part, 0, points, None, out, weight)
        return
    for entries, steps in segments.steps():
        first, last = np.searchsorted(outliers[0], (entries.start, entries.stop))
        _add_outliers(outliers, slice(int(first), int(last)), entries.start, points, steps, out[entries], weight)


def _add_outliers(
    outliers: Outliers, part: slice, start: int, points: Points, steps: torch.Tensor | None, out: torch.Tensor,
    weight: float,
) -> None:  # fmt: skip
    """Add a part of the outliers to `out`, which begins at the entry `start`; so do `steps`, if every entry has one."""
    if part.start == part.stop:
        return
    positions, multiples = torch.from_numpy(outliers[0][part] - start), torch.from_numpy(outliers[1][part])
    values = points.of(multiples, None if steps is None else steps[positions])
    kernels.add_at(out, positions, values if weight == 1 else values.to(out.dtype) * weight)


def read_points(reader: Reader) -> tuple[int, tuple[int, ...]]:
    """Read (the largest magnitude of a symbol, the offsets)."""
    largest, number = reader.byte(), reader.byte()
    if not 1 <= largest <= 127 or number > MAX_OFFSETS:
        raise FrameError("invalid grid")
    return largest, tuple(d - 256 if d > 127 else d for d in bytes(reader.take(number)))


def _decode_symbols(
    header: Header, reader: Reader, alphabet: compress.Alphabet, points: Points,
    segments: Segments | None, out: torch.Tensor, weight: float, accumulate: bool,
) -> None:  # fmt: skip
    """Decode all entries but the outliers, for which zero is written or added."""
    count, coding = header.elements, compress.read_head(reader, alphabet)
    if segments is not None:
        coded = compress.decode(reader, alphabet, count, coding)
        for part, starts, steps in segments.runs(alphabet.symbols):
            values = tables(points, alphabet.zero_symbol, steps)
            values = values if weight == 1 else values * weight
            kernels.spread_levels(coded[part], values, starts, out[part], accumulate)
        return
    values = table(points, alphabet.zero_symbol)
    values = values if weight == 1 else values * weight
    if coding.coder == compress.CONSTANT:
        combine(values[compress.read_constant(reader, alphabet)].expand(count), out, 1, accumulate)
        return
    if coding.coder == compress.RANS:
        position = reader.position
        lane_bits, lengths, body = rans.read_head(reader.rest(), count)
        size = kernels.chunk_size(count, len(lengths))
        if kernels.rans_dequantize(
            body, lengths, size, coding.table, coding.precision, lane_bits, values, out, accumulate
        ):
            return
        reader.position = position
    symbols = torch.from_numpy(compress.decode(reader, alphabet, count, coding))
    for part in blocks(count):
        combine(kernels.dequantize(symbols[part], values), out[part], 1, accumulate)
