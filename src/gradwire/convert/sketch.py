"""Count-sketch (Charikar, Chen, Farach-Colton 2002), a baseline of CO3: docs/wire-format.md, codec 6.

Every entry is added, with a hashed sign, to one hashed cell in each row; its estimate is the median over the rows of
sign·cell. Only the largest estimates are kept: the others are noise from collisions. They are scaled to leave the least
error, which the papers do not do. What is lost goes to the error memory, as with every codec.
"""

from __future__ import annotations

import math
import struct

import numpy as np
import torch

from gradwire import kernels
from gradwire.convert.blocks import blocks, combine
from gradwire.convert.conversion import Conversion, Converter, in_host_memory, limit_to, require_finite
from gradwire.errors import FrameError
from gradwire.frame.byte_fields import Reader, varint
from gradwire.frame.headers import SKETCH, Header

PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16}
ROWS = (1, 3, 5, 7)
MOST_COLUMNS = 1 << 23  # hashes have that many values
MOST_ENTRIES_PER_CELL = 1 << 20  # that an encoder may choose: ratio goes up to a million
MASK = (1 << 64) - 1
FEW = 80  # a decoder remembers the largest estimates if they are at most one of so many; each takes up to 72 bytes
DIGITS = ((20, 11), (10, 10), (0, 10))  # shift and bits of the digits of a magnitude, the highest first


def sent_values(estimates: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """Return scale × estimates as fp32 numbers that the dtype holds, as a receiver decodes them; no −0."""
    return limit_to(estimates * torch.tensor(scale, dtype=torch.float32, device="cpu"), dtype).float() + 0


def best_scale(exact: torch.Tensor, estimates: torch.Tensor) -> float:
    """Return the factor from 0 to 1 with which the estimates have the least squared error.

    If a tensor has no large entries, the largest estimates are those with the most noise. Sent as they are, they would
    add more error than they remove, and the error memory would grow without end. Scaled, they never do.
    """
    kept = in_host_memory(estimates.double())
    square = float(np.square(kept).sum())  # numpy's sums do not depend on the number of threads
    best = float((in_host_memory(exact.double()) * kept).sum()) / square if square else 0.0
    return float(np.float32(min(max(best, 0.0), 1.0))) + 0.0


class CountSketch(Converter):
    """A table of hashed sums, of which the decoder keeps the largest estimates."""

    wire_id = SKETCH
    families = ("quantize", "sketch", "sparse")
    stochastic = True
    selects = stores_tiny = True

    def __init__(self, ratio: float, rows: int, p: float, precision: str):
        self.ratio, self.rows, self.p, self.precision = ratio, rows, p, PRECISIONS[precision]

    def encode(self, conversion: Conversion, out: torch.Tensor) -> int:
        """Write the payload and update the error memory, as `Converter.encode` promises."""
        conversion.require_finite()
        u = _compensated(conversion)
        require_finite(u)  # a memory that is not would spoil the frame
        columns = min(max(1, int(conversion.count / (self.ratio * self.rows))), MOST_COLUMNS, conversion.count)
        seed = conversion.seed & MASK
        exact = kernels.sketch_cells(u, self.rows, columns, seed)
        limit = torch.finfo(torch.float32).max
        cells = limit_to(exact.clamp(-limit, limit).float(), self.precision)
        kept = min(conversion.count, math.ceil(self.p * conversion.count))
        index, estimates = kernels.sketch_largest(cells.numpy(), conversion.count, kept, seed)
        scale = best_scale(u[index], estimates)
        if conversion.memory_out is not None:
            left = u[index] - sent_values(estimates, scale, conversion.dtype)
            if u is not conversion.memory_out:
                conversion.memory_out.copy_(u)
            # An estimate may have the wrong sign, and then it is up to twice as far away as fp32 reaches.
            kernels.replace(conversion.memory_out, index, left.clamp(-limit, limit))
        side = bytes([self.rows | list(PRECISIONS.values()).index(self.precision) << 4])
        side += varint(columns) + varint(kept) + struct.pack("<fQ", scale, seed)
        body = cells.reshape(-1).view(torch.uint8)
        out[: len(side)] = torch.frombuffer(bytearray(side), dtype=torch.uint8)
        out[len(side) : len(side) + len(body)] = body
        return len(side) + len(body)


def _compensated(conversion: Conversion) -> torch.Tensor:
    """Return u, in the place of the new memory if there is one: fresh pages cost more than what is written to them."""
    memory, place = conversion.memory, conversion.memory_out
    if memory is None or place is None or conversion.in_place:
        return conversion.compensated()
    limit = torch.finfo(torch.float32).max
    return torch.mul(memory, conversion.decay, out=place).add_(conversion.gradient).clamp_(-limit, limit)


def decode(header: Header, payload: np.ndarray, out: torch.Tensor, weight: float, accumulate: bool) -> None:
    """Write weight·decoded to `out`, or add it."""
    count = header.elements
    if not header.dtype.is_floating_point or not count:
        raise FrameError("sketch of a dtype or size that is always stored")
    cells, kept, scale, seed = read_table(Reader(memoryview(payload)), count)
    if kept <= count // FEW:
        index, found = kernels.sketch_largest(cells, count, kept, seed)
        values = sent_values(found, scale, header.dtype)
        kernels.scatter(out, index, values if weight == 1 else values.to(out.dtype) * weight, accumulate)
        return
    estimates = _Estimates(
        cells, count, seed, out if out.dtype == torch.float32 and out.is_cpu and not accumulate else None
    )
    threshold, ties = _threshold(estimates, kept)
    factor = torch.tensor(scale, dtype=torch.float32, device="cpu")
    for part in blocks(count):
        block = estimates.block(part)
        magnitudes = _magnitudes(block)
        keep, equal = magnitudes > threshold, np.flatnonzero(magnitudes == threshold)[:ties]
        keep[equal] = True
        ties -= len(equal)
        values = limit_to(block * factor, header.dtype) + 0  # no −0
        values[torch.from_numpy(~keep)] = 0
        combine(values, out[part], weight, accumulate)


def read_table(reader: Reader, count: int) -> tuple[np.ndarray, int, float, int]:
    """Read (cells, how many estimates are kept, their scale, the seed) of a sketch of `count` entries."""
    table = reader.byte()
    rows, number = table & 15, table >> 4
    if rows not in ROWS or number >= len(PRECISIONS):
        raise FrameError("invalid sketch")
    columns, kept = reader.varint(min(count, MOST_COLUMNS)), reader.varint(count)
    scale, seed = struct.unpack("<fQ", reader.take(12))
    size = (4, 2)[number]
    body = reader.rest()
    if not 0 <= scale <= 1 or math.copysign(1, scale) < 0 or not columns or not kept:
        raise FrameError("invalid sketch")
    if len(body) != rows * columns * size:
        raise FrameError("invalid sketch")
    # No encoder makes a table with more cells than entries, except one of a column, or with so few.
    too_few = columns < MOST_COLUMNS and count > MOST_ENTRIES_PER_CELL * rows * (columns + 1)
    if rows * columns > max(count, rows) or too_few:
        raise FrameError("invalid sketch")
    cells = np.frombuffer(body, dtype=("<f4", "<f2")[number])
    if not all(np.isfinite(cells[part]).all() for part in blocks(len(cells))):
        raise FrameError("invalid sketch")
    return cells.reshape(rows, columns), kept, scale, seed


class _Estimates:
    """The estimates of all entries, block by block: from a tensor that they may be kept in, or computed each time."""

    def __init__(self, cells: np.ndarray, count: int, seed: int, room: torch.Tensor | None):
        self.cells, self.count, self.seed, self.kept = cells, count, seed, room
        if room is not None:
            kernels.sketch_estimates(cells, count, seed, out=room)

    def block(self, part: slice) -> torch.Tensor:
        if self.kept is not None:
            return self.kept[part]
        return kernels.sketch_estimates(self.cells, part.stop - part.start, self.seed, part.start)


def _magnitudes(estimates: torch.Tensor) -> np.ndarray:
    """Return bit patterns that are in the order of the magnitudes."""
    patterns: np.ndarray = estimates.numpy().view(np.int32) & 0x7FFFFFFF
    return patterns


def _threshold(estimates: _Estimates, kept: int) -> tuple[int, int]:
    """Return the smallest of the `kept` largest magnitudes, and how many that equal it are among them.

    Its digits are found one after the other, by counting those of all magnitudes that begin like it.
    """
    if kept == estimates.count:
        return -1, 0
    found, wanted = 0, kept  # `wanted`: how many of those that begin like `found` are kept
    for shift, bits in DIGITS:
        counts = np.zeros(1 << bits, dtype=np.int64)
        for part in blocks(estimates.count):
            magnitudes = _magnitudes(estimates.block(part))
            alike = (
                magnitudes >> shift if shift + bits == 31 else magnitudes[magnitudes >> shift + bits == found] >> shift
            )
            counts += np.bincount(alike & (1 << bits) - 1, minlength=1 << bits)
        above = np.cumsum(counts[::-1])  # how many have this digit or a higher one
        place = int(np.searchsorted(above, wanted))
        wanted -= int(above[place - 1]) if place else 0
        found = found << bits | (1 << bits) - 1 - place
    return found, wanted
