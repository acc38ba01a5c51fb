"""Error feedback, samples and their statistics, and rounding to a small float format (CO3); any device."""

from __future__ import annotations

import numpy as np
import torch

from gradwire.kernels.reference.generator import mix, uniform
from gradwire.small_float_formats import Format

__all__ = [
    "FLOAT_MAX", "RUN", "SAMPLE", "absmax", "better_steps", "compensate", "dequantize", "histogram", "moments",
    "quantize", "quantize_rans", "quantize_segments", "sample", "sample_segments", "segment_moments", "squared_errors",
    "to_symbols",
]  # fmt: skip

SAMPLE_RUNS, RUN = 1024, 64
SAMPLE = SAMPLE_RUNS * RUN  # tensors up to this size are looked at whole
FLOAT_MAX = torch.finfo(torch.float32).max


# ── what to send ──────────────────────────────────────────────────────────────────────────────────


def compensate(gradient: torch.Tensor, memory: torch.Tensor | None, decay: float) -> torch.Tensor:
    """Return u = g + decay·e, limited to the finite range (two rounded operations, no fused one)."""
    if memory is None:
        return gradient
    return torch.clamp(gradient + memory * decay, -FLOAT_MAX, FLOAT_MAX)


def sample(gradient: torch.Tensor, memory: torch.Tensor | None, decay: float, run_length: int = RUN) -> torch.Tensor:
    """Return u at the sampled entries: runs of 64 or fewer, one at a hashed place in each of 1024 equal strata.

    The place is hashed, because a fixed stride would see the same columns of a matrix again and again.
    """
    n = gradient.numel()
    if n <= SAMPLE_RUNS * run_length:
        return compensate(gradient, memory, decay)
    stratum = n // SAMPLE_RUNS
    run = torch.arange(SAMPLE_RUNS, dtype=torch.int64, device="cpu")
    start = run * stratum + mix(run) % (stratum - run_length + 1)
    index = (start[:, None] + torch.arange(run_length, device="cpu")).flatten().to(gradient.device)
    return compensate(gradient[index], None if memory is None else memory[index], decay)


def sample_segments(
    gradient: torch.Tensor, memory: torch.Tensor | None, decay: float, lengths: np.ndarray, run_length: int = RUN
) -> tuple[torch.Tensor, np.ndarray]:
    """Return the samples of all segments, one after the other, and the length of each."""
    parts = gradient.split(lengths.tolist())
    memories = [None] * len(parts) if memory is None else memory.split(lengths.tolist())
    samples = [sample(part, beside, decay, run_length) for part, beside in zip(parts, memories, strict=True)]
    return torch.cat(samples), np.array([len(part) for part in samples])


def moments(x: torch.Tensor) -> tuple[int, float, float]:
    """Return (number of entries that are not zero, Σ|x|, Σx²) in fp64."""
    x = x.double()
    return int(torch.count_nonzero(x)), float(x.abs().sum()), float(x.square().sum())


def absmax(x: torch.Tensor) -> float:
    """Return the largest magnitude; NaN or infinity if x holds one."""
    return float(x.abs().max()) if x.numel() else 0.0


def histogram(symbols: torch.Tensor, count: int) -> np.ndarray:
    """Return how often each of `count` symbols comes, as int64."""
    return torch.bincount(symbols, minlength=count).cpu().numpy().astype(np.int64)


# ── convert ───────────────────────────────────────────────────────────────────────────────────────


def to_symbols(u: torch.Tensor, step: float, fmt: Format, seed: int | None = None) -> torch.Tensor:
    """Round to the nearest value of the format (or stochastically, with a seed), saturating; uint8 symbols."""
    y = u * inverse(step)
    magnitude = (y.abs() if fmt.sign else y.clamp(min=0)).clamp(max=fmt.largest)
    # The spacing is a power of two, constant below the smallest normal number.
    exponent = (torch.frexp(magnitude).exponent - 1).clamp(min=fmt.min_exponent)
    exponent = torch.where(magnitude > 0, exponent, fmt.min_exponent)  # frexp says 0 for zero
    multiple = torch.ldexp(magnitude, fmt.mantissa - exponent)  # magnitude / spacing, exact
    if seed is None:
        rounded = torch.round(multiple)  # ties to even
    else:
        lower = torch.floor(multiple)
        rounded = lower + (uniform(u.numel(), seed, device=u.device) < multiple - lower)
    index = (exponent - fmt.min_exponent) * 2**fmt.mantissa + rounded.int()
    index = index.clamp(max=len(fmt.magnitudes) - 1)
    return (fmt.zero_symbol + torch.where(y < 0, -index, index)).to(torch.uint8)


def squared_errors(u: torch.Tensor, steps: list[float], fmt: Format) -> list[float]:
    """Return Σ(u − û)² for each of these steps."""
    levels = torch.from_numpy(fmt.levels)
    return [float((u.double() - dequantize(to_symbols(u, step, fmt), levels) * step).square().sum()) for step in steps]


def segment_moments(x: torch.Tensor, lengths: np.ndarray) -> np.ndarray:
    """Return a row for each segment of x: the number of entries that are not zero, sums of magnitudes and squares."""
    return np.array([moments(part) for part in x.split(lengths.tolist())], dtype=np.float64)


def better_steps(
    u: torch.Tensor, lengths: np.ndarray, steps: np.ndarray, others: np.ndarray, scanned: int, clearly: float,
    fmt: Format,
) -> np.ndarray:  # fmt: skip
    """Return the step of each segment, or another one (of its row) whose squared error is below `clearly` times that.

    Zeros cost no error at any step, and do not count. About `scanned` of a segment's entries propose another step, and
    all of them decide.
    """
    result = steps.copy()
    for i, part in enumerate(u.split(lengths.tolist())):
        entries, row = part[part != 0], others[i].tolist()
        errors = squared_errors(entries[:: max(1, entries.numel() // scanned)], row, fmt)
        best = min(range(len(row)), key=errors.__getitem__)
        error, other_error = squared_errors(entries, [float(steps[i]), row[best]], fmt)
        if other_error < error * clearly:
            result[i] = row[best]
    return result


def inverse(step: float) -> torch.Tensor:
    """Return 1/step, rounded to fp32."""
    return torch.tensor(1, dtype=torch.float32, device="cpu") / torch.tensor(step, dtype=torch.float32, device="cpu")


def quantize(
    gradient: torch.Tensor,
    memory: torch.Tensor | None,
    memory_out: torch.Tensor | None,
    decay: float,
    step: float,
    fmt: Format,
    values: torch.Tensor,
    seed: int | None = None,
) -> torch.Tensor:
    """Return symbols of u = g + decay·e, and write e ← u − value(symbol) into memory_out."""
    u = compensate(gradient, memory, decay)
    symbols = to_symbols(u, step, fmt, seed)
    if memory_out is not None:
        torch.sub(u, dequantize(symbols, values), out=memory_out)
    return symbols


def quantize_segments(
    gradient: torch.Tensor, memory: torch.Tensor | None, memory_out: torch.Tensor | None, decay: float,
    lengths: np.ndarray, steps: np.ndarray, fmt: Format, values: torch.Tensor, seed: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """Do `quantize` for each segment, with a step and a row of values of its own."""
    pieces, start = [], 0
    for i, length in enumerate(lengths.tolist()):
        here = slice(start, start + length)
        before, after = (None if m is None else m[here] for m in (memory, memory_out))
        seed_here = None if seed is None else seed + start
        pieces.append(quantize(gradient[here], before, after, decay, float(steps[i]), fmt, values[i], seed_here))
        start += length
    return torch.cat(pieces)


def dequantize(symbols: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the value of every symbol, on the device of the symbols."""
    return values.to(symbols.device)[symbols.int()]


def quantize_rans(
    gradient: torch.Tensor, memory: torch.Tensor | None, memory_out: torch.Tensor | None, decay: float, step: float,
    fmt: Format, values: torch.Tensor, frequencies: np.ndarray, precision: int, lane_bits: int, chunks: int,
    out: torch.Tensor,
) -> tuple[list[int], int] | None:  # fmt: skip
    """Do `quantize` and rANS in one pass: return the lengths of the chunks, which stand in `out`, and how many entries
    they hold. That is less than all where the kernel stopped before a NaN or an infinity. Entries of the memory behind
    them are then as they were if it is updated in place; in a buffer of its own they are undefined.

    None says that this device has no such kernel: the caller then quantizes and encodes one after the other.
    """
    return None
