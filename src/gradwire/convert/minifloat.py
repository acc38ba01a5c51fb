"""CO3's conversion (arXiv 2203.09044): ĝ = Q(s·u)/s, Q rounding to a small float format.

The step 1/s is the one with the least squared error under a GenNorm fitted to a sample of u by moments
(entries that are exactly zero are a point mass beside it: they cost no error). The symbols are then coded
with the same model, or with their histogram where that is shorter.
"""

from __future__ import annotations

import math
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
    nonzero, total_abs, total_square = kernels.moments(sample)
    if not nonzero:
        return None
    if not math.isfinite(total_square):
        raise NonFinite
    mean_abs, mean_square = total_abs / nonzero, total_square / nonzero
    index = gennorm_moments.nearest_index(mean_abs, mean_square) if mean_square > 0 else gennorm_moments.GRID - 1
    zeros = 1 - nonzero / sample.numel()
    zero_mass = min(gennorm_tables.ZERO_STEPS - 1, round(zeros * gennorm_tables.ZERO_STEPS))
    step = round_step(mean_abs * gennorm_tables.step_over_mean(fmt, index))
    return StepFit(_try_others(fmt, sample, step), index, zero_mass)


def _try_others(fmt: Format, sample: torch.Tensor, step: float) -> float:
    """Return a nearby step that is clearly better on the sample than the model's step, or else the model's step.

    A few outliers can make the moments say β = 0.2 of a tensor that is otherwise well-behaved. A part of the sample
    proposes a step and all of it decides, since the part may have missed the outliers that matter.
    """
    others: list[float] = round_steps(step * NEARBY).tolist()
    return kernels.better_step(sample, step, others, SCANNED, CLEARLY, fmt)


def round_steps(steps: np.ndarray) -> np.ndarray:
    """Return what `round_step` does, of each of these steps."""
    bits = np.clip(steps, SMALLEST_STEP, LARGEST_STEP).astype(np.float32).view(np.uint32)
    return ((bits + np.uint32(0x8000)) & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)


def round_step(step: float) -> float:
    """Return the nearest bfloat16 in the allowed range: it takes two bytes on the wire, and is as good a step."""
    (bits,) = struct.unpack("<I", struct.pack("<f", min(max(step, SMALLEST_STEP), LARGEST_STEP)))
    (rounded,) = struct.unpack("<f", struct.pack("<I", (bits + 0x8000) & 0xFFFF0000))
    return float(rounded)


@lru_cache(maxsize=512)
def values(fmt: Format, step: float, dtype: torch.dtype) -> torch.Tensor:
    """Return what each symbol stands for, as fp32: one rounded product, then rounded to the tensor's own dtype."""
    with np.errstate(over="ignore", under="ignore"):
        exact = torch.from_numpy(fmt.levels.astype(np.float32) * np.float32(step))
    return limit_to(exact, dtype).float()


class Minifloat(Converter):
    """Entries in a small float format, times a step that suits the tensor."""

    wire_id = MINIFLOAT
    families = ("quantize",)
    lists_segments = stores_tiny = True

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
        if sample.numel() < conversion.count and (fitted is None or fitted.zero_mass > 250):
            # Nearly all of the sample is zero: the few entries that are not deserve a full look.
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

    def encode(self, conversion: Conversion, out: torch.Tensor) -> int:
        """Write the payload and update the error memory, as `Converter.encode` promises."""
        if conversion.segments:
            return self._encode_segments(conversion, out)
        sample = kernels.sample(conversion.gradient, conversion.memory, conversion.decay)
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
        coding = self._choose(counts, conversion.count, fitted)
        table = values(self.format, step, conversion.dtype)
        symbols = None
        if coding.coder == compress.RANS:
            length = (
                0 if self.stochastic else self._encode_fused(conversion, out, side + coding.head, step, table, coding)
            )
            if not length:  # the same bytes in two passes
                symbols = self._quantize(conversion, step, table, seed)
                length = write(out, side, compress.encode(in_host_memory(symbols), self.format, coding))
            if length * 8 <= coding.expected_bits * 1.02 + 1024:
                return length
            # The sample misled us: count what was coded, and code it again.
            if symbols is None:
                symbols = decode_symbols(memoryview(out[:length].numpy()), conversion.count)
        if symbols is None:
            symbols = self._quantize(conversion, step, table, seed)
        counts = kernels.histogram(symbols, self.format.symbols)
        coding = self._choose(counts, conversion.count, fitted)
        return write(out, side, compress.encode(in_host_memory(symbols), self.format, coding))

    def _choose(self, counts: np.ndarray, total: int, step_fit: StepFit | None) -> compress.Coding:
        fitted = GenNormFit(step_fit.beta_index, step_fit.zero_mass) if step_fit else None
        return compress.choose(SymbolStatistics(self.format, counts, total, fitted), self.coder, self.models)

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
        side = bytearray(pack_format(self.format) + varint(len(conversion.segments)))
        pieces, fits, position = [], [], 0
        for length in conversion.segments:
            part = conversion.slice(position, position + length)
            fitted = self.fit(part, part.compensated())
            step = fitted.step if fitted else 1.0
            side += varint(length) + bfloat16(step)
            pieces.append(
                self._quantize(
                    part, step, values(self.format, step, conversion.dtype), part.seed if self.stochastic else None
                )
            )
            fits += [fitted] if fitted else []
            position += length
        symbols = torch.cat(pieces)
        counts = kernels.histogram(symbols, self.format.symbols)
        typical = sorted(fits, key=lambda f: f.beta_index)[len(fits) // 2] if fits else None
        coding = self._choose(counts, conversion.count, typical)
        return write(out, bytes(side), compress.encode(in_host_memory(symbols), self.format, coding))


def write(out: torch.Tensor, *parts: bytes) -> int:
    """Write these parts one after the other to the front of `out`; returns their length."""
    view, position = memoryview(out.numpy()), 0
    for part in parts:
        view[position : position + len(part)] = part
        position += len(part)
    return position


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
    symbols = torch.from_numpy(compress.decode(reader, fmt, header.elements, compress.read_head(reader, fmt)))
    levels = torch.from_numpy(fmt.levels.astype(np.float32))
    for part, steps in segments.steps():
        exact = kernels.dequantize(symbols[part], levels) * steps
        combine(limit_to(exact, header.dtype).float(), out[part], weight, accumulate)


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
