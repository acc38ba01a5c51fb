"""Quantizers with a few levels in each bucket of entries: the payload they share (docs/wire-format.md, codec 4).

A method is a subclass whose `fit` returns the numbers that describe the levels of each bucket. Everything else is done
here: tensors are cut into buckets, which restart at every segment, numbers are rounded to their precision, entries are
assigned to levels, and symbols are coded.
"""

from __future__ import annotations

from abc import abstractmethod

import numpy as np
import torch

from gradwire import compress, kernels
from gradwire.convert.conversion import Conversion, Converter, in_host_memory, limit_to, require_finite
from gradwire.convert.level_buckets import CodedBuckets, cut, make_buckets
from gradwire.convert.level_numbers import LARGEST, PRECISIONS, pack_numbers, read_numbers, round_outward, round_to
from gradwire.errors import FrameError, SpecError
from gradwire.frame.byte_fields import Reader, varint
from gradwire.frame.headers import LEVELS, SEGMENTED, Header

EXPLICIT, EVEN, SYMMETRIC = 0, 1, 2
MOST_LEVELS = 255


def widths(kind: int, levels: int) -> int:
    """Return how many numbers describe one bucket."""
    return {EXPLICIT: levels, EVEN: 2, SYMMETRIC: 1}[kind]


def level_values(numbers: np.ndarray, kind: int, levels: int, dtype: torch.dtype) -> torch.Tensor:
    """Return what each symbol of each bucket stands for, as fp32 numbers that the dtype holds."""
    if kind != EXPLICIT:
        low, high = (-numbers, numbers) if kind == SYMMETRIC else (numbers[:, :1], numbers[:, 1:])
        k = np.arange(levels, dtype=np.float64)
        numbers = ((low.astype(np.float64) * (levels - 1 - k) + high * k) / (levels - 1)).astype(np.float32)
    return limit_to(torch.from_numpy(numbers), dtype).float()


class Levels(Converter):
    """What all quantizers with a few levels in each bucket share; a method adds `fit`.

    `outward` says that the outer levels enclose every entry, as unbiased methods need it.
    """

    wire_id = LEVELS
    families = ("quantize", "levels")
    lists_segments = stores_tiny = True
    kind = EXPLICIT
    outward = False

    def __init__(self, levels: int, bucket: int, precision: str, coder: str):
        if bucket and bucket < 2 * levels:
            raise SpecError(f"bucket={bucket} is too small for {levels} levels: 0 (whole tensors) or from {2 * levels}")
        self.levels, self.bucket, self.coder = levels, bucket, coder
        self.precision = PRECISIONS[precision]

    @abstractmethod
    def fit(self, conversion: Conversion, starts: np.ndarray) -> np.ndarray:
        """Return fp32 numbers for every bucket.

        These are its levels in ascending order (EXPLICIT), lo and hi (EVEN), or b of levels from −b to b (SYMMETRIC).
        """

    def encode(self, conversion: Conversion, out: torch.Tensor) -> int:
        """Write the payload and update the error memory, as `Converter.encode` promises."""
        conversion.require_finite()
        if conversion.memory is not None:
            require_finite(conversion.memory)  # one that is not would spoil the frame
        buckets = make_buckets(conversion.count, conversion.segments, self.bucket, self.levels)
        limit = min(LARGEST, torch.finfo(conversion.dtype).max)
        fitted = np.clip(self.fit(conversion, buckets.starts), -limit, limit).astype(np.float32)
        numbers, precision = self._round(fitted, buckets.sizes, conversion.dtype)
        if len(numbers) > 1 and (numbers == numbers[0]).all():  # one bucket is enough, as where all is zero
            buckets, numbers = cut((conversion.count,), 0), numbers[:1]
        values = level_values(numbers, self.kind, self.levels, conversion.dtype)
        seed = conversion.seed if self.stochastic else None
        symbols, counts = kernels.assign_levels(
            conversion.gradient,
            conversion.memory,
            conversion.memory_out,
            conversion.decay,
            values,
            buckets.starts,
            seed,
        )
        alphabet = compress.Alphabet(self.levels, self.levels // 2)
        coding = choose(alphabet, counts, conversion.count, self.coder)
        side = varint(buckets.bucket) + bytes([self.levels, self.kind | PRECISIONS_ON_WIRE.index(precision) << 2])
        if conversion.segments:
            side += varint(len(buckets.segments)) + b"".join(map(varint, buckets.segments))
        position = 0
        view = memoryview(out.numpy())
        for part in (
            side,
            pack_numbers(numbers, buckets.sizes, precision),
            *compress.encode_parts(in_host_memory(symbols), alphabet, coding),
        ):
            view[position : position + len(part)] = part
            position += len(part)
        return position

    def _round(self, numbers: np.ndarray, sizes: np.ndarray, dtype: torch.dtype) -> tuple[np.ndarray, torch.dtype]:
        """Return the numbers as they travel, and their precision: fp32 if the chosen one cannot hold the largest."""
        precision = self.precision
        if precision == torch.float16 and np.abs(numbers).max() > torch.finfo(torch.float16).max:
            precision = torch.float32
        rounded = round_to(numbers, precision)
        if self.outward:
            # They are rounded to the tensor's dtype first: the receiver rounds to it, and must not round inwards.
            end = round_outward(round_outward(numbers[:, -1], dtype, 1), precision, 1)
            last = np.clip(sizes - 1, 1, None)  # a small bucket repeats its last level
            width = numbers.shape[1]
            rounded = np.where(np.arange(width) >= np.minimum(last, width - 1)[:, None], end[:, None], rounded)
            if self.kind != SYMMETRIC:
                rounded[:, 0] = round_outward(round_outward(numbers[:, 0], dtype, -1), precision, -1)
        return rounded, precision


PRECISIONS_ON_WIRE = tuple(PRECISIONS.values())


def choose(alphabet: compress.Alphabet, counts: np.ndarray, total: int, coder: str) -> compress.Coding:
    """Return the shortest coding by the coder of this name, or by any coder for "auto"; or plain packing if shorter."""
    # On large tensors rANS is within half a percent of the entropy, and much faster than Huffman.
    every = ("rans", "huffman") if total < compress.LARGE else ("rans",)
    names = every if coder == "auto" else (coder,)
    statistics = compress.SymbolStatistics(alphabet, counts, total)
    codings = [compress.choose(statistics, compress.CODERS[name]) for name in names]
    return min(codings, key=lambda coding: coding.expected_bits + coding.coder.fixed_bits)


def read_side(reader: Reader, header: Header) -> tuple[CodedBuckets, int, int, torch.dtype]:
    """Read (buckets, number of levels, kind, precision) at the front of a payload."""
    bucket, levels, table = reader.varint(header.elements), reader.byte(), reader.byte()
    kind, precision = table & 3, table >> 2
    if not 2 <= levels <= MOST_LEVELS or kind > SYMMETRIC or precision >= len(PRECISIONS_ON_WIRE):
        raise FrameError("invalid table of levels")
    segments = reader if header.flags & SEGMENTED else None
    return CodedBuckets(header.elements, bucket, levels, segments), levels, kind, PRECISIONS_ON_WIRE[precision]


def read_values(
    numbers: Reader, starts: np.ndarray, levels: int, kind: int, precision: torch.dtype, dtype: torch.dtype
) -> torch.Tensor:
    """Read what each symbol stands for in the next buckets, which start and end there."""
    table = read_numbers(numbers, np.diff(starts), widths(kind, levels), precision)
    if kind == SYMMETRIC and (table < 0).any():
        raise FrameError("negative level")
    return level_values(table, kind, levels, dtype)


def decode(header: Header, payload: np.ndarray, out: torch.Tensor, weight: float, accumulate: bool) -> None:
    """Write weight·decoded to `out`, or add it."""
    if not header.dtype.is_floating_point or not header.elements:
        raise FrameError("levels frame of a dtype or size that is always stored")
    reader = Reader(memoryview(payload))
    buckets, levels, kind, precision = read_side(reader, header)
    numbers = Reader(reader.take(buckets.numbers(widths(kind, levels)) * precision.itemsize))
    alphabet = compress.Alphabet(levels, levels // 2)
    symbols = compress.decode(reader, alphabet, header.elements, compress.read_head(reader, alphabet))
    for starts in buckets.groups():
        values = read_values(numbers, starts, levels, kind, precision, header.dtype)
        if weight != 1:
            values = values * weight
        first, last = starts[0], starts[-1]
        kernels.spread_levels(symbols[first:last], values, starts - first, out[first:last], accumulate)
