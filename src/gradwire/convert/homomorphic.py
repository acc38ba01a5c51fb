"""One worker's part of a homomorphic sum as a frame: integers on a grid, a sketch of them, an index.

After "lossless homomorphic compression" (arXiv 2402.07529); docs/homomorphic.md has the code, and what differs. The
sums of many workers are made in aggregate/sums/; a frame holds the part of one worker, where nothing is added to it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator

import numpy as np
import torch

from gradwire import kernels
from gradwire.convert.blocks import combine, wide_blocks
from gradwire.convert.conversion import (
    Conversion,
    Converter,
    NonFinite,
    in_host_memory,
    limit_to,
    require_finite,
)
from gradwire.convert.topk import TopK
from gradwire.errors import FrameError, GradwireError
from gradwire.frame.byte_fields import Reader, varint
from gradwire.frame.headers import HOMOMORPHIC, Header
from gradwire.homomorphic import code
from gradwire.homomorphic.grid import BITS, Grid, by_largest, by_rms, exponent_of
from gradwire.homomorphic.plan import INDEXES, LANES, MOST_CELLS, MOST_WORDS, Plan, choose

WHOLE = 4096  # tensors with fewer entries are sent whole
SMALL_SKETCH = 1 << 14  # words of index and sketch that are accepted even if the tensor has fewer
TRIES = 8  # so many seeds are tried before the sketch grows


class Homomorphic(Converter):
    """Integers on a grid; `p` is the share of the entries that are sent, None for all that are not zero."""

    wire_id = HOMOMORPHIC
    families = ("quantize", "sparse", "homomorphic")
    sums = stores_tiny = True

    def __init__(self, p: float | None = 0.01, bits: int = 32, rounding: str = "nearest"):
        self.p, self.bits, self.stochastic = p, bits, rounding == "stochastic"

    def encode(self, conversion: Conversion, out: torch.Tensor) -> int:
        """Write the payload and update the error memory, as `Converter.encode` promises."""
        conversion.require_finite()
        u = conversion.compensated()
        require_finite(u)  # a memory that is not would spoil the frame
        if self.p is None or conversion.count < WHOLE:
            # An entry whose gradient is zero is not sent, and its memory waits.
            chosen = torch.nonzero(conversion.gradient).flatten()
        else:
            chosen = kernels.select(u, None, None, 1.0, TopK(self.p).count(conversion.count))[1]
        entries = torch.zeros_like(u)
        entries[chosen] = u[chosen]
        grid = self._grid(u[chosen])
        seed = conversion.seed if self.stochastic else None
        positions, words, exponent, _ = kernels.quantize_all(
            entries, None, None, 1.0, grid.step, grid.most, grid.bits, seed
        )
        if exponent == 255:
            raise NonFinite
        payload = _write(positions, words, -(-conversion.count * self.bits // 32), grid)
        if conversion.memory_out is not None:
            sent = torch.zeros_like(u)
            kernels.put_words(sent, positions, words, self.bits, grid.step)
            torch.sub(u, limit_to(sent, conversion.dtype).float(), out=conversion.memory_out)
        memoryview(out.numpy())[: len(payload)] = payload
        return len(payload)

    def _grid(self, values: torch.Tensor) -> Grid:
        # Few levels are best spent on the bulk of the entries; but what is to be unbiased must not be clipped.
        if self.bits < 32 and not self.stochastic:
            mean = float(np.square(in_host_memory(values.double())).mean()) if values.numel() else 0.0
            return by_rms(math.sqrt(mean), self.bits, 1)
        return by_largest(exponent_of(kernels.absmax(values)), self.bits, 1)


def _write(positions: torch.Tensor, words: torch.Tensor, count: int, grid: Grid) -> bytes:
    """Return the payload. Other seeds, and then more cells, are tried until the sketch can be peeled."""
    union, seed = code.blocks(positions, count), 0
    while True:
        plan = choose(count, union, seed)
        index, sketch = code.encode(plan, positions, words)
        if plan.index == "dense" or not len(code.decode(plan, index, sketch).left):
            break
        seed += 1
        if seed % TRIES == 0:
            union = {lanes: blocks + blocks // 4 + 1 for lanes, blocks in union.items()}
    kind = INDEXES.index(plan.index) | LANES.index(plan.lanes) << 2 | BITS.index(grid.bits) << 4
    side = bytes([kind]) + struct.pack("<f", grid.step)
    if plan.index != "dense":
        side += struct.pack("<I", seed) + varint(plan.segments) + bytes([plan.segment_log])
    if plan.index == "bloom":
        side += varint(plan.index_words) + bytes([plan.probes])
    return side + _little_endian(index) + _little_endian(sketch)


def _little_endian(words: torch.Tensor) -> bytes:
    return in_host_memory(words).astype("<i4", copy=False).tobytes()


# ── decoding ──────────────────────────────────────────────────────────────────────────────────────


def read_side(reader: Reader, header: Header) -> tuple[Plan, Grid]:
    """Read everything before index and sketch."""
    if not header.dtype.is_floating_point or not header.elements:
        raise FrameError("homomorphic frame of a dtype or size that is always stored")
    kind = reader.byte()
    index, lanes, bits = kind & 3, kind >> 2 & 3, kind >> 4
    if index >= len(INDEXES) or lanes >= len(LANES) or bits >= len(BITS):
        raise FrameError("unknown kind of homomorphic frame")
    (step,) = struct.unpack("<f", reader.take(4))
    if not 2.0**-126 <= step <= torch.finfo(torch.float32).max:
        raise FrameError("invalid step of a homomorphic frame")
    words = -(-header.elements * BITS[bits] // 32)
    seed = segments = log = probes = index_words = 0
    if INDEXES[index] != "dense":
        (seed,) = struct.unpack("<I", reader.take(4))
        segments, log = reader.varint(MOST_CELLS), reader.byte()
        index_words = -(-words // (32 * LANES[lanes]))
    if INDEXES[index] == "bloom":
        index_words, probes = reader.varint(MOST_WORDS), reader.byte()
    try:
        plan = Plan(words, LANES[lanes], INDEXES[index], index_words, probes, segments, log, seed)
    except GradwireError as error:
        raise FrameError(str(error)) from None
    if plan.index != "dense" and plan.total_words > max(plan.words, SMALL_SKETCH):
        raise FrameError("index and sketch are longer than the words themselves, which are then sent as they are")
    return plan, Grid(step, 2 ** (BITS[bits] - 1) - 1, BITS[bits])


def decode(header: Header, payload: np.ndarray, out: torch.Tensor, weight: float, accumulate: bool) -> None:
    """Write weight·decoded to `out`, or add it."""
    reader = Reader(memoryview(payload))
    plan, grid = read_side(reader, header)
    body = reader.rest()
    if len(body) != 4 * plan.total_words:
        raise FrameError("wrong length of index and sketch")
    if plan.index == "dense":
        for part in _parts(plan, grid):
            words = torch.from_numpy(np.frombuffer(body[4 * part.start : 4 * part.stop], dtype="<i4").astype(np.int32))
            here = torch.arange(part.stop - part.start, dtype=torch.int64, device="cpu")
            _put_words(header, here, words, part, grid, out, weight, accumulate)
        return
    positions, words = _peeled(plan, np.frombuffer(body, dtype="<i4").astype(np.int32))
    for part in _parts(plan, grid):
        first, last = np.searchsorted(positions.numpy(), (part.start, part.stop))
        here = positions[first:last] - part.start
        _put_words(header, here, words[first:last], part, grid, out, weight, accumulate)


def _parts(plan: Plan, grid: Grid) -> Iterator[slice]:
    """Yield parts of a message, in words, whose entries are a block."""
    fields = 32 // grid.bits
    for block in wide_blocks(plan.words * fields):
        yield slice(block.start // fields, -(-block.stop // fields))


def _peeled(plan: Plan, data: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Return positions and values of the words that are not zero, of an index and the sketch behind it."""
    index, sketch = torch.from_numpy(data).split([plan.index_words, plan.sketch_words])
    # No more blocks than there are cells can be peeled. This check keeps a short frame from taking much memory.
    if kernels.count_bits(code.candidates(plan, index)) >= plan.cells + 32:
        raise FrameError("a sketch that cannot be peeled: its index has more blocks than there are cells")
    decoded = code.decode(plan, index, sketch)
    if len(decoded.left) or not decoded.consistent:
        raise FrameError("a sketch that cannot be peeled, or says more than its index")
    return decoded.positions, decoded.values


def _put_words(
    header: Header, positions: torch.Tensor, words: torch.Tensor, part: slice, grid: Grid, out: torch.Tensor,
    weight: float, accumulate: bool,
) -> None:  # fmt: skip
    """Write, or add, the entries of a part of the message: of these words, at positions within it, and zeros."""
    fields = 32 // grid.bits
    entries = slice(part.start * fields, min(header.elements, part.stop * fields))
    values = torch.zeros(entries.stop - entries.start, dtype=torch.float32, device="cpu")
    kernels.put_words(values, positions, words, grid.bits, grid.step)
    combine(limit_to(values, header.dtype).float(), out[entries], weight, accumulate)
