"""The kernels of evenly spaced grids (ecq); docs/wire-format.md, codec 3."""

from __future__ import annotations

import numpy as np
import torch

from ...errors import FrameError
from .dense import compensate, dequantize, inverse, uniform

__all__ = ["GRID_LIMIT", "Outliers", "grid_quantize", "grid_rans", "pack_outliers", "unpack_outliers"]

GRID_LIMIT = 1 << 24  # largest multiple: fp32 holds all integers up to it
GAP_LIMIT, EXCESS_LIMIT = 48, 24  # largest parameters of the codes

# Positions, signed multiples and u of the entries beyond the symbols' range, in order of position.
Outliers = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def grid_multiples(u: torch.Tensor, step: float, shift: float, seed: int | None) -> torch.Tensor:
    """Signed multiples of the step: ⌊|u|/step + shift⌋, or rounded up with the probability of what is left."""
    y = u * inverse(step)
    if seed is None:
        magnitude = torch.floor((y.abs() + shift).clamp(max=GRID_LIMIT))
    else:
        limited = y.abs().clamp(max=GRID_LIMIT)
        lower = torch.floor(limited)
        magnitude = lower + (uniform(u.numel(), seed, device=u.device) < limited - lower)
    return torch.where(y < 0, -magnitude, magnitude).int()


def grid_quantize(
    gradient: torch.Tensor, memory: torch.Tensor | None, memory_out: torch.Tensor | None, decay: float, step: float,
    shift: float, values: torch.Tensor, capacity: int, seed: int | None = None,
) -> tuple[torch.Tensor, Outliers]:  # fmt: skip
    """Symbols of u = g + decay·e, one for each of the 2M+1 `values`, and the first `capacity` multiples beyond ±M.

    Writes e ← u − value(symbol) into memory_out: for outliers, whose symbol is that of zero, u itself.
    """
    u, largest = compensate(gradient, memory, decay), len(values) // 2
    multiples = grid_multiples(u, step, shift, seed)
    positions = torch.nonzero(multiples.abs() > largest).flatten()[:capacity]
    outliers = (positions, multiples[positions], u[positions])
    multiples = multiples.clamp(-largest, largest)
    multiples[positions] = 0
    symbols = (multiples + largest).to(torch.uint8)
    if memory_out is not None:
        torch.sub(u, dequantize(symbols, values), out=memory_out)
    return symbols, outliers


def grid_rans(
    gradient: torch.Tensor, memory: torch.Tensor | None, memory_out: torch.Tensor | None, decay: float, step: float,
    shift: float, values: torch.Tensor, capacity: int, frequencies: np.ndarray, precision: int, lane_bits: int,
    chunks: int, out: torch.Tensor,
) -> tuple[list[int], int, Outliers] | None:  # fmt: skip
    """`grid_quantize` and rANS in one pass; None says "not here", and the caller composes the parts."""
    return None


# ── the list of outliers ──────────────────────────────────────────────────────────────────────────


def pack_outliers(gaps: np.ndarray, negative: np.ndarray, excesses: np.ndarray, a: int, b: int) -> bytes:
    """Rice codes of the gaps, signs, exponential Golomb codes of the excesses; lowest bits first."""
    value = position = 0
    parts = []
    for gap, sign, excess in zip(gaps.tolist(), negative.tolist(), excesses.tolist(), strict=True):
        head = (excess >> b) + 1
        size = head.bit_length() - 1
        for bits, number in (
            ((gap >> a) + 1, 1 << (gap >> a)), (a, gap & (1 << a) - 1), (1, int(sign)),
            (size + 1, 1 << size), (size, head & (1 << size) - 1), (b, excess & (1 << b) - 1),
        ):  # fmt: skip
            value |= number << position
            position += bits
        whole = position // 8
        parts.append((value & (1 << 8 * whole) - 1).to_bytes(whole, "little"))
        value, position = value >> 8 * whole, position % 8
    return b"".join(parts) + (value.to_bytes(1, "little") if position else b"")


def unpack_outliers(
    data: memoryview, count: int, elements: int, largest: int, a: int, b: int
) -> tuple[np.ndarray, np.ndarray]:
    """(positions below `elements`, signed multiples with magnitudes `largest`+1 … 2²⁴)."""
    string = "".join(f"{byte:08b}"[::-1] for byte in bytes(data)) + "1"  # the last 1 ends every run of zeros
    end, at, position = len(string) - 1, 0, -1
    positions, multiples = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int32)

    def bits(size: int) -> int:
        nonlocal at
        at += size
        if at > end:
            raise FrameError("damaged outliers")
        return int(string[at - size : at][::-1] or "0", 2)

    def zeros() -> int:
        nonlocal at
        start, at = at, string.index("1", at) + 1
        if at > end:
            raise FrameError("damaged outliers")
        return at - 1 - start

    for i in range(count):
        position += 1 + (zeros() << a) + bits(a)
        negative = bits(1)
        size = zeros()
        if size > EXCESS_LIMIT or position >= elements:
            raise FrameError("damaged outliers")
        magnitude = largest + 1 + ((((1 << size) | bits(size)) - 1) << b) + bits(b)
        if magnitude > GRID_LIMIT:
            raise FrameError("damaged outliers")
        positions[i], multiples[i] = position, -magnitude if negative else magnitude
    if end - at > 7 or "1" in string[at:end]:
        raise FrameError("damaged outliers")
    return positions, multiples
