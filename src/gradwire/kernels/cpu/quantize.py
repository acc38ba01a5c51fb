"""Samples, their statistics, and rounding to a small float format (CO3), by the native module.

Passes over whole tensors run on all threads that torch has, if there is enough to do for them.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from gradwire import _native
from gradwire.kernels.conditions import where
from gradwire.kernels.cpu.native_arguments import as_array, as_seed, flat_fp32
from gradwire.kernels.reference.coders import chunk_size
from gradwire.kernels.reference.quantize import RUN, SAMPLE_RUNS
from gradwire.small_float_formats import Format

__all__ = [
    "absmax", "better_steps", "histogram", "moments", "quantize", "quantize_rans", "quantize_segments", "sample",
    "sample_segments", "segment_moments", "squared_errors", "to_symbols",
]  # fmt: skip


@where(flat_fp32)
def sample(gradient: torch.Tensor, memory: torch.Tensor | None, decay: float, run_length: int = RUN) -> torch.Tensor:
    """Return u at the sampled entries, without computing the others, nor by torch's own threads."""
    if gradient.numel() <= SAMPLE_RUNS * run_length:
        if memory is None:
            return gradient
        return sample_segments(gradient, memory, decay, np.array([gradient.numel()]), run_length)[0]
    out = torch.empty(SAMPLE_RUNS * run_length, dtype=torch.float32, device="cpu")
    _native.sample(as_array(gradient), as_array(memory), decay, SAMPLE_RUNS, run_length, as_array(out))
    return out


@where(flat_fp32)
def sample_segments(
    gradient: torch.Tensor, memory: torch.Tensor | None, decay: float, lengths: np.ndarray, run_length: int = RUN
) -> tuple[torch.Tensor, np.ndarray]:
    """Return the samples of all segments, in one call."""
    sizes = np.minimum(lengths, SAMPLE_RUNS * run_length)
    out = torch.empty(int(sizes.sum()), dtype=torch.float32, device="cpu")
    _native.sample_segments(
        as_array(gradient), as_array(memory), decay, lengths, SAMPLE_RUNS, run_length, as_array(out)
    )
    return out, sizes


@where(flat_fp32)
def moments(x: torch.Tensor) -> tuple[int, float, float]:
    """Return the number of entries that are not zero, and the sums of magnitudes and squares."""
    return _native.moments(as_array(x))


@where(flat_fp32)
def absmax(x: torch.Tensor) -> float:
    """Return the largest magnitude; NaN or infinity if there is one."""
    return _native.absmax(as_array(x), torch.get_num_threads())


def _flat_bytes(symbols: torch.Tensor) -> bool:
    return symbols.dtype == torch.uint8 and symbols.is_contiguous()


@where(_flat_bytes)
def histogram(symbols: torch.Tensor, count: int) -> np.ndarray:
    """Count how often each of `count` symbols comes."""
    counts = np.empty(count, dtype=np.int64)
    _native.histogram(as_array(symbols), counts, torch.get_num_threads())
    return counts


@where(flat_fp32)
def to_symbols(u: torch.Tensor, step: float, fmt: Format, seed: int | None = None) -> torch.Tensor:
    """Round to the nearest value of the format."""
    # The values matter only to an error memory, and here is none.
    return quantize(u, None, None, 0.0, step, fmt, _no_values(fmt.symbols), seed)


@where(flat_fp32)
def squared_errors(u: torch.Tensor, steps: list[float], fmt: Format) -> list[float]:
    """Return the squared error for each of these steps."""
    return _native.squared_errors(as_array(u), steps, _format(fmt), as_array(_no_values(fmt.symbols)))


@where(flat_fp32)
def segment_moments(x: torch.Tensor, lengths: np.ndarray) -> np.ndarray:
    """Return the sums of all segments."""
    out = np.empty((len(lengths), 3))
    _native.segment_moments(as_array(x), lengths, out.ravel())
    return out


@where(flat_fp32)
def better_steps(
    u: torch.Tensor, lengths: np.ndarray, steps: np.ndarray, others: np.ndarray, scanned: int, clearly: float,
    fmt: Format,
) -> np.ndarray:  # fmt: skip
    """Compare all steps of all segments."""
    best = np.empty(len(lengths), dtype=np.int64)
    _native.better_steps(
        as_array(u), lengths, steps.astype(np.float32), others.astype(np.float32).ravel(), scanned, clearly,
        _format(fmt), as_array(_no_values(fmt.symbols)), best,
    )  # fmt: skip
    return np.where(best < 0, steps, others[np.arange(len(best)), best])


@where(flat_fp32)
def quantize_segments(
    gradient: torch.Tensor, memory: torch.Tensor | None, memory_out: torch.Tensor | None, decay: float,
    lengths: np.ndarray, steps: np.ndarray, fmt: Format, values: torch.Tensor, seed: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """Compute symbols and error memory of all segments."""
    symbols = torch.empty(gradient.numel(), dtype=torch.uint8, device="cpu")
    _native.quantize_segments(
        as_array(gradient), as_array(memory), as_array(memory_out), decay, lengths, steps.astype(np.float32),
        _format(fmt), as_array(values.reshape(-1)), as_seed(seed), as_array(symbols),
    )  # fmt: skip
    return symbols


@where(flat_fp32)
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
    """Compute symbols and error memory in one pass."""
    symbols = torch.empty(gradient.numel(), dtype=torch.uint8, device="cpu")
    _native.quantize(
        as_array(gradient), as_array(memory), as_array(memory_out), decay, step, _format(fmt), as_array(values),
        as_seed(seed), as_array(symbols), torch.get_num_threads(),
    )  # fmt: skip
    return symbols


@where(flat_fp32)
def quantize_rans(
    gradient: torch.Tensor, memory: torch.Tensor | None, memory_out: torch.Tensor | None, decay: float, step: float,
    fmt: Format, values: torch.Tensor, frequencies: np.ndarray, precision: int, lane_bits: int, chunks: int,
    out: torch.Tensor,
) -> tuple[list[int], int] | None:  # fmt: skip
    """Compute symbols and error memory, and encode them, 64 entries at a time, on all threads."""
    size = chunk_size(gradient.numel(), chunks)
    return _native.quantize_rans(
        as_array(gradient), as_array(memory), as_array(memory_out), decay, step, _format(fmt), as_array(values),
        frequencies, precision, 1 << lane_bits, size, as_array(out), torch.get_num_threads(),
    )  # fmt: skip


@lru_cache
def _format(fmt: Format) -> tuple[int, int, int, int, bool, float]:
    return (
        fmt.min_exponent, fmt.mantissa, fmt.zero_symbol, len(fmt.magnitudes) - 1, bool(fmt.sign), fmt.largest
    )  # fmt: skip


@lru_cache
def _no_values(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.float32, device="cpu")
