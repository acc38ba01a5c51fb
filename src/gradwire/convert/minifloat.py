"""CO3's conversion (arXiv 2203.09044): ĝ = Q(s·u)/s, Q rounding to a small float format.

The step 1/s is the one with the least squared error under a GenNorm fitted to a sample of u by moments
(entries that are exactly zero are a point mass beside it: they cost no error). The symbols are then coded
with the same model, or with their histogram where that is shorter.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from gradwire import compress, kernels, models
from gradwire.compress import rans
from gradwire.convert.blocks import combine
from gradwire.convert.conversion import Conversion, Converter, NonFinite, in_host_memory, limit_to
from gradwire.convert.segments import LARGEST_STEP, SMALLEST_STEP, Segments, read_step
from gradwire.errors import FrameError
from gradwire.frame.byte_fields import Reader, bfloat16, varint
from gradwire.frame.headers import MINIFLOAT, SEGMENTED, Header
from gradwire.models import gennorm_moments, gennorm_tables
from gradwire.models.symbol_statistics import GenNormFit, SymbolStatistics
from gradwire.small_float_formats import PRESETS, SPECIALS, Format

CUSTOM = 255
SCANNED = 1 << 14  # entries of the sample on which other steps are tried
NEARBY = np.array([2.0 ** (quarter / 4) for quarter in range(-8, 5) if quarter])  # other steps, in parts of the model's
CLEARLY = 0.98  # another step is taken if its squared error is below this part of the model's


@dataclass(frozen=True)
class StepFit:
    """What a sample says about a tensor: the step, and the indexes of the model."""

    step: float  # a bfloat16 number
    beta_index: int
    zero_mass: int


def fit(fmt: Format, sample: torch.Tensor) -> StepFit | None:
    """Return the step with the least squared error under the fitted GenNorm; None if all entries are zero."""
    return fit_segments(fmt, sample, np.array([sample.numel()]))[0]


def fit_segments(fmt: Format, u: torch.Tensor, lengths: np.ndarray) -> list[StepFit | None]:
    """Return what `fit` does, for each of the tensors with these lengths that were laid end to end.

    A nearby step is taken that is clearly better on the entries than the model's step, if there is one: a few outliers
    can make the moments say β = 0.2 of a tensor that is otherwise well-behaved. A part of the entries proposes a step
    and all of them decide, since the part may have missed the outliers that matter.
    """
    nonzero, total_abs, total_square = kernels.segment_moments(u, lengths).T
    if not np.isfinite(total_square).all():
        raise NonFinite
    steps = np.ones(len(lengths))
    models_of: list[tuple[int, int] | None] = []
    for i, count in enumerate(nonzero.tolist()):
        if not count:
            models_of.append(None)
            continue
        mean_abs, mean_square = float(total_abs[i]) / count, float(total_square[i]) / count
        index = gennorm_moments.nearest_index(mean_abs, mean_square) if mean_square > 0 else gennorm_moments.GRID - 1
        zeros = 1 - count / int(lengths[i])
        zero_mass = min(gennorm_tables.ZERO_STEPS - 1, round(zeros * gennorm_tables.ZERO_STEPS))
        steps[i] = mean_abs * gennorm_tables.step_over_mean(fmt, index)
        models_of.append((index, zero_mass))
    steps = round_steps(steps)
    found = kernels.better_steps(u, lengths, steps, round_steps(steps[:, None] * NEARBY), SCANNED, CLEARLY, fmt)
    return [
        None if model is None else StepFit(step, *model) for step, model in zip(found.tolist(), models_of, strict=True)
    ]


def round_steps(steps: np.ndarray) -> np.ndarray:
    """Return what `round_step` does, of each of these steps."""
    bits = np.minimum(np.maximum(steps, SMALLEST_STEP), LARGEST_STEP).astype(np.float32).view(np.uint32)
    rounded: np.ndarray = ((bits + np.uint32(0x8000)) & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)
    return rounded


def round_step(step: float) -> float:
    """Return the nearest bfloat16 in the allowed range: it takes two bytes on the wire, and is as good a step."""
    (bits,) = struct.unpack("<I", struct.pack("<f", min(max(step, SMALLEST_STEP), LARGEST_STEP)))
    (rounded,) = struct.unpack("<f", struct.pack("<I", (bits + 0x8000) & 0xFFFF0000))
    return float(rounded)


@lru_cache(maxsize=512)
def values(fmt: Format, step: float, dtype: torch.dtype) -> torch.Tensor:
    """Return what each symbol stands for, as fp32: one rounded product, then rounded to the tensor's own dtype."""
    return values_of_steps(fmt, np.array([step]), dtype)[0]


def values_of_steps(fmt: Format, steps: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """Return a row of `values` for each step."""
    with np.errstate(over="ignore", under="ignore"):
        exact = torch.from_numpy(fmt.levels.astype(np.float32) * steps.astype(np.float32)[:, None])
    return limit_to(exact, dtype).float()


class Minifloat(Converter):
    """Entries in a small float format, times a step that suits the tensor."""

    wire_id = MINIFLOAT
    families = ("quantize",)
    lists_segments = joins = stores_tiny = True

    def __init__(self, fmt: Format, coder: str = "rans", model: str = "auto", rounding: str = "nearest"):
        self.format, self.coder = fmt, compress.CODERS[coder]
        self.stochastic = rounding == "stochastic"
        self.models = models.by_name("histogram" if self.stochastic else model)

    def fit(self, conversion: Conversion, sample: torch.Tensor) -> StepFit | None:
        """Return the step for this tensor; None if all entries are zero."""
        if self.stochastic:
            # Without bias nothing may saturate: the largest entry must be in the range of the format.
            return self._fit_range(conversion)
        fitted = fit(self.format, sample)
        if sample.numel() < conversion.count and _looks_empty(fitted):
            fitted = fit(self.format, conversion.compensated())
        return fitted

    def _fit_range(self, conversion: Conversion) -> StepFit | None:
        conversion.require_finite()
        largest = kernels.absmax(conversion.compensated())
        if not largest:
            return None
        step = round_step(largest / self.format.largest)
        if step * self.format.largest < largest:
            step = round_step(step * (1 + 2**-7))  # the next one
        return StepFit(step, 0, 0)

    def _fit_segments(self, conversion: Conversion, lengths: np.ndarray) -> list[StepFit | None]:
        """Return for each segment what `fit` returns for that tensor alone."""
        samples, sizes = kernels.sample_segments(conversion.gradient, conversion.memory, conversion.decay, lengths)
        fits = fit_segments(self.format, samples, sizes)
        for i in np.flatnonzero(sizes < lengths).tolist():
            if _looks_empty(fits[i]):
                end = int(lengths[: i + 1].sum())
                fits[i] = fit(self.format, conversion.slice(end - int(lengths[i]), end).compensated())
        return fits

    def encode(self, conversion: Conversion, out: torch.Tensor) -> int:
        """Write the payload and update the error memory, as `Converter.encode` promises."""
        if conversion.segments:
            return self._encode_segments(conversion, out)
        sample = kernels.sample(conversion.gradient, conversion.memory, conversion.decay, conversion.run_length)
        fitted = self.fit(conversion, sample)
        step = fitted.step if fitted else 1.0
        side = pack_format(self.format) + bfloat16(step)
        if fitted is None:  # all entries are zero
            if conversion.memory_out is not None:
                conversion.memory_out.zero_()
            zero = compress.Coding(compress.CONSTANT, parameters=bytes([self.format.zero_symbol]))
            return write(out, side, zero.head)
        seed = conversion.seed if self.stochastic else None
        counts = self._sample_counts(sample, step, seed)
        coding = self._choose(counts, conversion, fitted)
        table = values(self.format, step, conversion.dtype)
        symbols = None
        if coding.coder == compress.RANS:
            length = (
                0 if self.stochastic else self._encode_fused(conversion, out, side + coding.head, step, table, coding)
            )
            if not length:  # the same bytes in two passes
                symbols = self._quantize(conversion, step, table, seed)
                length = write(out, side, *compress.encode_parts(in_host_memory(symbols), self.format, coding))
            if length * 8 <= coding.expected_bits * 1.02 + 1024:
                return length
            # The sample misled us: count what was coded, and code it again.
            if symbols is None:
                symbols = decode_symbols(memoryview(out[:length].numpy()), conversion.count)
        if symbols is None:
            symbols = self._quantize(conversion, step, table, seed)
        counts = kernels.histogram(symbols, self.format.symbols)
        coding = self._choose(counts, conversion, fitted)
        return write(out, side, *compress.encode_parts(in_host_memory(symbols), self.format, coding))

    def _choose(self, counts: np.ndarray, conversion: Conversion, step_fit: StepFit | None) -> compress.Coding:
        fitted = GenNormFit(step_fit.beta_index, step_fit.zero_mass) if step_fit else None
        statistics = SymbolStatistics(self.format, counts, conversion.count, fitted)
        return compress.choose(statistics, self.coder, self.models, conversion.part_of)

    def _sample_counts(self, sample: torch.Tensor, step: float, seed: int | None) -> np.ndarray:
        return kernels.histogram(kernels.to_symbols(sample, step, self.format, seed), self.format.symbols)

    def _quantize(self, conversion: Conversion, step: float, table: torch.Tensor, seed: int | None) -> torch.Tensor:
        conversion.require_finite()
        return kernels.quantize(
            conversion.gradient,
            conversion.memory,
            conversion.memory_out,
            conversion.decay,
            step,
            self.format,
            table,
            seed,
        )

    def _encode_fused(
        self,
        conversion: Conversion,
        out: torch.Tensor,
        head: bytes,
        step: float,
        table: torch.Tensor,
        coding: compress.Coding,
    ) -> int:
        """Encode in one pass: error feedback, conversion and coding. This is the hot path.

        The result is the length of the payload, or 0 if there is no kernel for it, or g + decay·e overflows: then the
        memory is as it was, up to rounding, and the caller encodes in two passes.
        """
        lane_bits, chunks = rans.layout(conversion.count, coding.expected_bits)
        start = len(head) + len(rans.head(lane_bits, [0] * chunks))
        coded = kernels.quantize_rans(
            conversion.gradient, conversion.memory, conversion.memory_out, conversion.decay, step, self.format, table,
            coding.table, coding.precision, lane_bits, chunks, out[start:],
        )  # fmt: skip
        if coded is None:
            return 0
        lengths, done = coded
        if done < conversion.count:
            if done and conversion.in_place:
                body = memoryview(out[start : start + sum(lengths)].numpy())
                size = kernels.chunk_size(conversion.count, chunks)
                sent = torch.empty(done, dtype=torch.float32, device="cpu")
                kernels.rans_dequantize(
                    body, lengths, size, coding.table, coding.precision, lane_bits, table, sent, False
                )
                conversion.take_back(sent)
            conversion.require_finite()
            return 0  # only g + decay·e overflows: the plain path limits it
        write(out, head, rans.head(lane_bits, lengths))
        return start + sum(lengths)

    def _encode_segments(self, conversion: Conversion, out: torch.Tensor) -> int:
        """Encode several small tensors, each with its own step; their symbols are coded together."""
        conversion.require_finite()  # all of it, before the memory of the first segment changes
        lengths = np.array(conversion.segments)
        if self.stochastic:
            ends = np.cumsum(lengths).tolist()
            parts = [conversion.slice(end - n, end) for n, end in zip(conversion.segments, ends, strict=True)]
            fits = [self._fit_range(part) for part in parts]
        else:
            fits = self._fit_segments(conversion, lengths)
        steps = np.array([fitted.step if fitted else 1.0 for fitted in fits])
        side = bytearray(pack_format(self.format) + varint(len(conversion.segments)))
        for length, step in zip(conversion.segments, steps.tolist(), strict=True):
            side += varint(length) + bfloat16(step)
        symbols = kernels.quantize_segments(
            conversion.gradient, conversion.memory, conversion.memory_out, conversion.decay, lengths, steps,
            self.format, values_of_steps(self.format, steps, conversion.dtype),
            conversion.seed if self.stochastic else None,
        )  # fmt: skip
        counts = kernels.histogram(symbols, self.format.symbols)
        used = sorted((fitted for fitted in fits if fitted), key=lambda fitted: fitted.beta_index)
        coding = self._choose(counts, conversion, used[len(used) // 2] if used else None)
        return write(out, bytes(side), *compress.encode_parts(in_host_memory(symbols), self.format, coding))


def _looks_empty(fitted: StepFit | None) -> bool:
    """Tell whether nearly all of a sample is zero, so that the few entries that are not deserve a full look."""
    return fitted is None or fitted.zero_mass > 250


def write(out: torch.Tensor, *parts: bytes | memoryview) -> int:
    """Write these parts one after the other to the front of `out`; returns their length."""
    view, position = memoryview(out.numpy()), 0
    for part in parts:
        view[position : position + len(part)] = part
        position += len(part)
    return position


@lru_cache(maxsize=64)
def pack_format(fmt: Format) -> bytes:
    """Return the bytes of a float format: the number of a preset, or all fields of another one."""
    for number, preset in enumerate(PRESETS.values()):
        if preset == fmt:
            return bytes([number])
    kind = fmt.sign + 2 * SPECIALS.index(fmt.special)
    return struct.pack("<BBBBb", CUSTOM, kind, fmt.exponent, fmt.mantissa, fmt.bias)


def read_format(reader: Reader) -> Format:
    """Read a float format: the number of a preset, or all fields of another one."""
    number = reader.byte()
    if number < len(PRESETS):
        return list(PRESETS.values())[number]
    if number != CUSTOM:
        raise FrameError(f"unknown float format {number}")
    kind, exponent, mantissa, bias = struct.unpack("<BBBb", reader.take(4))
    if kind >> 1 >= len(SPECIALS):
        raise FrameError("invalid float format")
    try:
        return Format(kind & 1, exponent, mantissa, bias, SPECIALS[kind >> 1])
    except ValueError as error:
        raise FrameError(f"invalid float format: {error}") from None


def decode_symbols(payload: memoryview, count: int) -> torch.Tensor:
    """Return the symbols of a payload without segments."""
    reader = Reader(payload)
    fmt = read_format(reader)
    read_step(reader)
    return torch.from_numpy(compress.decode(reader, fmt, count, compress.read_head(reader, fmt)))


def decode(header: Header, payload: np.ndarray, out: torch.Tensor, weight: float, accumulate: bool) -> None:
    """Write weight·decoded to `out`, or add it."""
    reader, count = Reader(memoryview(payload)), header.elements
    if not header.dtype.is_floating_point or not count:
        raise FrameError("minifloat frame of a dtype or size that is always stored")
    fmt = read_format(reader)
    if header.flags & SEGMENTED:
        _decode_segments(header, reader, fmt, out, weight, accumulate)
        return
    step = read_step(reader)
    coding = compress.read_head(reader, fmt)
    if coding.coder == compress.RANS and _decode_fused(header, reader, fmt, step, coding, out, weight, accumulate):
        return
    table = weighted_values(fmt, step, header.dtype, weight)
    if coding.coder == compress.CONSTANT:
        combine(table[compress.read_constant(reader, fmt)].expand(count), out, 1, accumulate)
        return
    symbols = compress.decode(reader, fmt, count, coding)
    kernels.spread_levels(symbols, table[None], np.array([0, count]), out, accumulate)


def decode_onto(header: Header, payload: np.ndarray, out: torch.Tensor, onto: torch.Tensor) -> bool:
    """Write onto + decoded to `out` in one pass; return False, with nothing written, if there is no kernel for that."""
    if header.flags & SEGMENTED or not header.elements:
        return False
    reader = Reader(memoryview(payload))
    fmt, step = read_format(reader), read_step(reader)
    coding = compress.read_head(reader, fmt)
    return coding.coder == compress.RANS and _decode_fused(header, reader, fmt, step, coding, out, 1.0, True, onto)


def bound(header: Header, payload: np.ndarray) -> float | None:
    """Return the largest magnitude that the frame can hold, by its side information; None where segments differ."""
    if header.flags & SEGMENTED:
        return None
    reader = Reader(memoryview(payload))
    return read_format(reader).largest * read_step(reader)


def _decode_segments(
    header: Header, reader: Reader, fmt: Format, out: torch.Tensor, weight: float, accumulate: bool
) -> None:
    """Decode entries with the step of their own segment."""
    segments = Segments(reader, header.elements)
    symbols = compress.decode(reader, fmt, header.elements, compress.read_head(reader, fmt))
    for part, starts, steps in segments.runs(fmt.symbols):
        table = values_of_steps(fmt, steps, header.dtype)
        kernels.spread_levels(symbols[part], table if weight == 1 else table * weight, starts, out[part], accumulate)


def weighted_values(fmt: Format, step: float, dtype: torch.dtype, weight: float) -> torch.Tensor:
    """Return `values`, each times the weight."""
    table = values(fmt, step, dtype)
    return table if weight == 1 else table * weight


def _decode_fused(
    header: Header, reader: Reader, fmt: Format, step: float, coding: compress.Coding, out: torch.Tensor,
    weight: float, accumulate: bool, onto: torch.Tensor | None = None,
) -> bool:  # fmt: skip
    """Decode straight into an fp32 `out`; return False, with the reader where it was, if no kernel can do that."""
    position = reader.position
    lane_bits, lengths, body = rans.read_head(reader.rest(), header.elements)
    table = weighted_values(fmt, step, header.dtype, weight)
    size = kernels.chunk_size(header.elements, len(lengths))
    done = kernels.rans_dequantize(
        body, lengths, size, coding.table, coding.precision, lane_bits, table, out, accumulate, onto
    )
    if not done:
        reader.position = position
    return done
