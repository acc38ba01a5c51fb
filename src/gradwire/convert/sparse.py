"""Sparse codecs: the payload they share, with the positions and the values of the entries that are sent.

The entries with the k = ⌈p·d⌉ largest magnitudes of u are sent, or all whose magnitude reaches a threshold; among
equals those with the lowest positions, and never zeros. `sbc`, `stc`, `topk` and `m22` differ in how they send the
values. Entries that are not sent, and the difference between a value and what is sent for it, stay in the error memory.
"""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from fractions import Fraction

import numpy as np
import torch

from gradwire import kernels
from gradwire.compress import positions as coding
from gradwire.convert import magnitudes, minifloat
from gradwire.convert.conversion import Conversion, Converter, NonFinite, in_host_memory, limit_to, require_finite
from gradwire.errors import FrameError, SpecError, unknown_name
from gradwire.frame import headers
from gradwire.frame.byte_fields import Reader, varint
from gradwire.frame.headers import MINIFLOAT, SPARSE, Header

ONE_VALUE, ONE_MAGNITUDE, FP32, FP16, BF16, SMALL_FLOATS, MAGNITUDES = range(7)  # how values travel
DTYPES = {FP32: torch.float32, FP16: torch.float16, BF16: torch.bfloat16}
INFINITY_BITS = 0x7F800000
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


def received(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the values as a receiver decodes them: limited and rounded to the dtype of the tensor, as fp32."""
    if dtype.itemsize >= 4:
        return values.float()  # finite, and so in range
    return limit_to(values.float(), dtype).float()


# ── decoding ──────────────────────────────────────────────────────────────────────────────────────


def decode(header: Header, payload: np.ndarray, out: torch.Tensor, weight: float, accumulate: bool) -> None:
    """Write weight·decoded to `out`, or add it to the entries that were sent."""
    if not header.dtype.is_floating_point or not header.elements:
        raise FrameError("sparse frame of a dtype or size that is always stored")
    positions, kind, rest = _read_positions(payload, header.elements, header.elements)
    values = _read_values(header, kind, rest, len(positions))
    if weight != 1:
        values = values.to(out.dtype) * weight
    kernels.scatter(out, torch.from_numpy(positions), values, accumulate)


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
    positions, _, _ = _read_positions(np.frombuffer(payload, dtype=np.uint8), header.elements, limit)
    return torch.from_numpy(positions)


def _read_positions(payload: np.ndarray, elements: int, limit: int) -> tuple[np.ndarray, int, np.ndarray]:
    """Return the positions, the number that says how values travel, and the bytes of the values."""
    reader = Reader(memoryview(payload))
    count = reader.varint(min(elements, limit))
    if not count:
        if reader.rest():
            raise FrameError("a sparse frame without positions has no more to say")
        return np.empty(0, dtype=np.int64), ONE_VALUE, payload[:0]
    byte = reader.byte()
    positions = coding.read(reader, byte >> 4, count, elements)
    return positions, byte & 15, payload[reader.position :]


def _read_values(header: Header, kind: int, data: np.ndarray, count: int) -> torch.Tensor:
    """Return `count` values, or one for all of them, as fp32."""
    if not count:
        return torch.empty(0, dtype=torch.float32, device="cpu")
    if kind in (ONE_VALUE, ONE_MAGNITUDE):
        return _read_one_value(header, kind, Reader(memoryview(data)), count)
    if kind == SMALL_FLOATS:
        values = torch.empty(count, dtype=torch.float32, device="cpu")
        part = replace(header, codec=MINIFLOAT, shape=(count,), flags=0)
        minifloat.decode(part, data, values, 1.0, False)
        return values
    if kind == MAGNITUDES:
        return magnitudes.decode(data, count, header.dtype)
    if kind not in DTYPES or len(data) != count * DTYPES[kind].itemsize:
        raise FrameError("damaged values of a sparse frame")
    # Copied: the values may start at an odd address.
    values = torch.from_numpy(data.copy()).view(DTYPES[kind]).float()
    if not math.isfinite(kernels.absmax(values)):
        raise FrameError("a value of a sparse frame is not finite")
    return received(values, header.dtype)


def _read_one_value(header: Header, kind: int, reader: Reader, count: int) -> torch.Tensor:
    (value,) = struct.unpack("<f", reader.take(4))
    rest = reader.rest()
    if not math.isfinite(value) or not value or (kind == ONE_MAGNITUDE and value < 0):
        raise FrameError("damaged value of a sparse frame")
    values = received(torch.tensor([value], dtype=torch.float32, device="cpu"), header.dtype)
    if kind == ONE_MAGNITUDE:
        signs = torch.from_numpy(kernels.unpack_bits(rest, count, 1, 2))
        return torch.where(signs > 0, -values, values)
    if rest:
        raise FrameError("trailing bytes of a sparse frame")
    return values
