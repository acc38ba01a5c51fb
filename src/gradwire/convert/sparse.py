"""Sparse codecs: the payload they share, with the positions and the values of the entries that are sent.

The entries with the k = ⌈p·d⌉ largest magnitudes of u are sent, or all whose magnitude reaches a threshold; among
equals those with the lowest positions, and never zeros. `sbc`, `stc`, `topk` and `m22` differ in how they send the
values. Entries that are not sent, and the difference between a value and what is sent for it, stay in the error memory.
"""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import numpy as np
import torch

from gradwire import kernels
from gradwire.compress import positions as coding
from gradwire.convert import sparse_values
from gradwire.convert.blocks import blocks
from gradwire.convert.conversion import Conversion, Converter, NonFinite, in_host_memory, require_finite
from gradwire.convert.sparse_values import received
from gradwire.errors import FrameError, SpecError, unknown_name
from gradwire.frame import headers
from gradwire.frame.byte_fields import Reader, varint
from gradwire.frame.headers import SPARSE, Header

INFINITY_BITS = 0x7F800000
# Entries that were sent are put in their places all at once if there are few of them, or few beside the tensor: each
# takes up to twenty bytes on its way, and all together at most half of what the tensor takes.
FEW, SMALL_SHARE = 1 << 15, 40
DEFAULT_LIMIT, POSITIONS_PER_BYTE = 2**28, 4096  # of `sent_positions`, as in codecs.decode


class Sparse(Converter):
    """What sparse codecs share: the choice of entries, and the payload.

    `p` is the share of a tensor that is sent. Where they are given, `k` is the number of entries instead, or
    `threshold` the least |u| of those that are sent.
    """

    wire_id = SPARSE
    families = ("quantize", "sparse", "positions")
    selects = True

    def __init__(self, p: float = 0.01, k: int | None = None, positions: str = "auto", threshold: float | None = None):
        if not 0 < p < 1:
            raise SpecError(f"p must be above 0 and below 1, not {p}: the share of the entries that are sent")
        if k is not None and k < 1:
            raise SpecError(f"k must be 1 or more, not {k}: the number of entries that are sent of each tensor")
        if positions not in coding.WAYS:
            raise unknown_name("code of positions", positions, coding.WAYS)
        if threshold is not None and not threshold >= 0:
            raise SpecError(f"threshold must be a number from 0 on, not {threshold}")
        self.p, self.k, self.positions, self.threshold = p, k, positions, threshold

    def count(self, elements: int) -> int | None:
        """Return how many entries of a tensor are sent at most; None if as many as reach the threshold."""
        if self.threshold is not None:
            return None
        # p is the decimal number that was written: in binary 0.07 · 100 would be more than 7.
        wanted = self.k or math.ceil(Fraction(repr(self.p)) * elements)
        return min(wanted, elements)

    def select(self, conversion: Conversion, one_sign: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Return positions and u of the chosen entries, and leave u of all entries in memory_out."""
        count, low = self.count(conversion.count), _bits_from(self.threshold)
        done, *chosen = kernels.select(
            conversion.gradient, conversion.memory, conversion.memory_out, conversion.decay, count, low, one_sign
        )
        if done == conversion.count:
            return chosen[0], chosen[1]
        # Either the gradient holds a NaN or an infinity, or g + decay·e overflows and has to be limited.
        u = kernels.compensate(
            conversion.gradient[done:],
            None if conversion.memory is None else conversion.memory[done:],
            conversion.decay,
        )
        try:
            conversion.require_finite()
            require_finite(u)  # a memory that is not would spoil the frame
        except NonFinite:
            if done and conversion.in_place:
                conversion.take_back(torch.zeros(done, dtype=torch.float32, device="cpu"))
            raise
        if done and conversion.in_place:
            assert conversion.memory is not None
            u = torch.cat([conversion.memory[:done], u])
        elif done:
            u = conversion.compensated()
        return kernels.select(u, None, conversion.memory_out, 1.0, count, low, one_sign)[1:]

    def write(
        self,
        conversion: Conversion,
        out: torch.Tensor,
        chosen: torch.Tensor,
        kind: int,
        values: bytes,
        sent: torch.Tensor | None,
    ) -> int:
        """Write the payload, and return its length.

        `sent` are the values that the receiver decodes, which are subtracted from the memory here. It is None if the
        caller has done so already.
        """
        if conversion.memory_out is not None and sent is not None:
            kernels.scatter(conversion.memory_out, chosen, -sent, True)
        payload = varint(chosen.numel())
        if chosen.numel():
            way, coded = coding.encode(in_host_memory(chosen), conversion.count, self.positions)
            payload += bytes([kind | way << 4]) + coded + values
        memoryview(out.numpy())[: len(payload)] = payload
        return len(payload)


def _bits_from(threshold: float | None) -> int:
    """Return the bit pattern of the smallest fp32 magnitude that reaches the threshold and is not zero."""
    if threshold is None:
        return 1
    if threshold > torch.finfo(torch.float32).max:
        return INFINITY_BITS  # no finite number reaches it
    bits = int(np.float32(threshold).view(np.uint32))
    return max(1, bits + (float(np.float32(threshold)) < threshold))


def one_value(mean: float, dtype: torch.dtype) -> tuple[bytes, torch.Tensor]:
    """Return a mean of fp32 numbers in the bytes that travel, and as the number that the receiver decodes."""
    raw = struct.pack("<f", mean)
    return raw, received(torch.tensor(struct.unpack("<f", raw), dtype=torch.float32, device="cpu"), dtype)


# ── decoding ──────────────────────────────────────────────────────────────────────────────────────


def decode(header: Header, payload: np.ndarray, out: torch.Tensor, weight: float, accumulate: bool) -> None:
    """Write weight·decoded to `out`, or add it to the entries that were sent."""
    elements = header.elements
    if not header.dtype.is_floating_point or not elements:
        raise FrameError("sparse frame of a dtype or size that is always stored")
    reader = Reader(memoryview(payload))
    count, way, kind = _read_front(reader, elements)
    if not count:
        if not accumulate:
            out.zero_()
        return
    positions = coding.open_positions(reader, way, count, elements)
    if count <= FEW + out.nbytes // SMALL_SHARE:
        (places,) = positions.parts(count)
        values = sparse_values.open_values(header, kind, payload[positions.end :], count)
        _put(out, torch.from_numpy(places), values(slice(0, count)), weight, accumulate)
        return
    rest = payload[positions.end :]
    both_are_symbols = way == coding.CLASSES and kind in (sparse_values.SMALL_FLOATS, sparse_values.MAGNITUDES)
    if accumulate or out.element_size() > 2 or not both_are_symbols:
        _put_parts(out, positions, sparse_values.open_values(header, kind, rest, count), weight, accumulate)
        return
    # Classes of gaps and symbols of values take a byte each. Both would be as much as such a tensor: so it remembers
    # the positions itself, as ones, until the values are known.
    _put_parts(out, positions, lambda part: torch.ones(1, dtype=out.dtype, device="cpu"), 1.0, False)
    del positions
    _put_in_order(out, sparse_values.open_values(header, kind, rest, count), weight)


def nonzero_positions(header: Header, payload: np.ndarray) -> torch.Tensor:
    """Return where the decoded tensor is not zero: at the positions that were sent, unless its dtype rounds to zero."""
    reader = Reader(memoryview(payload))
    count, way, kind = _read_front(reader, header.elements)
    if not count:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    coded = coding.open_positions(reader, way, count, header.elements)
    (places,) = coded.parts(count)
    values = sparse_values.open_values(header, kind, payload[coded.end :], count)(slice(0, count))
    positions = torch.from_numpy(places)
    return positions if bool((values != 0).all()) else positions[(values != 0).expand(count)]


def _put(out: torch.Tensor, places: torch.Tensor, values: torch.Tensor, weight: float, accumulate: bool) -> None:
    """Write values, times the weight, to these places and zeros elsewhere, or add them."""
    if weight != 1:
        values = values.to(out.dtype) * weight
    kernels.scatter(out, places, values, accumulate)


def _put_parts(
    out: torch.Tensor, positions: coding.CodedPositions, values: sparse_values.Values, weight: float, accumulate: bool
) -> None:
    """Do `_put` part by part: each covers the entries behind the last one of the part before."""
    start = sent = 0
    for places in positions.parts(coding.PART):
        part = slice(sent, sent + len(places))
        end = out.numel() if part.stop == positions.count else int(places[-1]) + 1
        _put(out[start:end], torch.from_numpy(places - start), values(part), weight, accumulate)
        start, sent = end, part.stop


def _put_in_order(out: torch.Tensor, values: sparse_values.Values, weight: float) -> None:
    """Write the values, times the weight, over the entries that are not zero."""
    sent = 0
    for part in blocks(out.numel()):
        here = torch.nonzero(out[part]).flatten()
        if len(here):
            found = values(slice(sent, sent + len(here))).to(out.device, out.dtype)
            out[part][here] = found if weight == 1 else found * weight
        sent += len(here)


def _read_front(reader: Reader, limit: int) -> tuple[int, int, int]:
    """Read how many entries were sent, and the numbers of the codes of their positions and values."""
    count = reader.varint(limit)
    if not count:
        if reader.rest():
            raise FrameError("a sparse frame without positions has no more to say")
        return 0, coding.GOLOMB, sparse_values.ONE_VALUE
    byte = reader.byte()
    return count, byte >> 4, byte & 15


def sent_positions(frame: bytes | memoryview | np.ndarray | torch.Tensor) -> torch.Tensor:
    """Return which entries a sparse frame holds (flat, ascending, int64); all of them for a stored one."""
    data = frame.numpy() if isinstance(frame, torch.Tensor) else frame
    view = memoryview(np.frombuffer(data, dtype=np.uint8))
    header, payload = headers.open_frame(view)
    limit = max(DEFAULT_LIMIT, POSITIONS_PER_BYTE * len(view))
    if header.codec == headers.STORED and header.elements <= limit:
        return torch.arange(header.elements, device="cpu")
    if header.codec != SPARSE or not header.elements:
        raise FrameError("not a sparse frame: it does not tell positions")
    reader = Reader(payload)
    count, way, _ = _read_front(reader, min(header.elements, limit))
    places = coding.read(reader, way, count, header.elements) if count else np.empty(0, dtype=np.int64)
    return torch.from_numpy(places)
