"""The kernels of the homomorphic code, by the native module."""

from __future__ import annotations

import torch

from gradwire import _native
from gradwire.kernels.conditions import where
from gradwire.kernels.cpu.native_arguments import as_array, as_seed, flat_fp32
from gradwire.kernels.reference.homomorphic import Peeled, Quantized

__all__ = [
    "align_words", "are_ascending", "bloom_build", "bloom_query", "count_bits", "count_blocks", "index_bitmap", "peel",
    "put_words", "quantize_all", "quantize_values", "sketch_words",
]  # fmt: skip


def _words(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int32, device="cpu")


@where(flat_fp32)
def quantize_all(
    gradient: torch.Tensor, memory: torch.Tensor | None, memory_out: torch.Tensor | None, decay: float, step: float,
    most: int, bits: int, seed: int | None = None,
) -> Quantized:  # fmt: skip
    """Quantize a tensor to words in one pass."""
    # Room for all, and for stores of whole vectors; memory that is not written to costs nothing.
    room = -(-gradient.numel() * bits // 32) + 16
    positions = torch.empty(room, dtype=torch.int64, device="cpu")
    values = torch.empty(room, dtype=torch.int32, device="cpu")
    count, largest_g, largest_u, squares = _native.fixed_all(
        as_array(gradient), as_array(memory), as_array(memory_out), decay, step, most, bits, as_seed(seed),
        as_array(positions), as_array(values),
    )  # fmt: skip
    if max(largest_g, largest_u) >> 23 == 255:
        return positions[:0], values[:0], 255, 0.0
    return positions[:count], values[:count], largest_u >> 23, squares


@where(flat_fp32)
def quantize_values(
    values: torch.Tensor, step: float, most: int, seed: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (q, q·step) of these values."""
    q = torch.empty(values.numel(), dtype=torch.int32, device="cpu")
    sent = torch.empty(values.numel(), dtype=torch.float32, device="cpu")
    _native.fixed_values(as_array(values), step, most, as_seed(seed), as_array(q), as_array(sent))
    return q, sent


@where(flat_fp32)
def put_words(out: torch.Tensor, positions: torch.Tensor, words: torch.Tensor, bits: int, factor: float) -> None:
    """Write the entries of these words."""
    _native.put_words(as_array(out), as_array(positions), as_array(words), bits, factor)


def are_ascending(positions: torch.Tensor, limit: int) -> bool:
    """Tell whether positions are ascending, and from 0 on below the limit."""
    return _native.are_ascending(as_array(positions), limit)


def count_blocks(positions: torch.Tensor, lanes: tuple[int, ...]) -> tuple[int, ...]:
    """Count the blocks that hold a position, for each number of lanes."""
    return tuple(_native.count_blocks(as_array(positions), n) for n in lanes)


def count_bits(bitmap: torch.Tensor) -> int:
    """Count the bits that are set."""
    return _native.count_bits(as_array(bitmap))


def index_bitmap(positions: torch.Tensor, lanes: int, blocks: int) -> torch.Tensor:
    """Mark the blocks that hold a position."""
    bitmap = _words(-(-blocks // 32))
    _native.index_bitmap(as_array(positions), lanes, blocks, as_array(bitmap))
    return bitmap


def bloom_build(bitmap: torch.Tensor, index_words: int, probes: int, seed: int) -> torch.Tensor:
    """Build a Bloom filter of the blocks that are marked."""
    index = _words(index_words)
    _native.bloom_build(as_array(bitmap), probes, seed, as_array(index))
    return index


def bloom_query(index: torch.Tensor, blocks: int, probes: int, seed: int) -> torch.Tensor:
    """Mark the blocks that may be in a Bloom filter."""
    bitmap = torch.empty(-(-blocks // 32), dtype=torch.int32, device="cpu")
    _native.bloom_query(as_array(index), probes, seed, as_array(bitmap))
    return bitmap


def sketch_words(
    positions: torch.Tensor, values: torch.Tensor, lanes: int, segments: int, segment_log: int, seed: int
) -> torch.Tensor:
    """Add every word to the four cells of its block."""
    sketch = _words((segments << segment_log) * lanes)
    _native.sketch_words(as_array(positions), as_array(values), lanes, segments, segment_log, seed, as_array(sketch))
    return sketch


def align_words(
    bitmap: torch.Tensor, words: int, lanes: int, positions: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return a message's words at all blocks that are marked."""
    *arrays, met = _native.align_words(as_array(bitmap), words, lanes, as_array(positions), as_array(values))
    everywhere, aligned = map(torch.from_numpy, arrays)
    return everywhere, aligned, met


def peel(
    bitmap: torch.Tensor, sketch: torch.Tensor, words: int, lanes: int, segments: int, segment_log: int, seed: int
) -> Peeled:
    """Recover the words of a sum of sketches, block by block from a queue."""
    *arrays, consistent = _native.peel(as_array(bitmap), as_array(sketch), words, lanes, segments, segment_log, seed)
    positions, values, left = map(torch.from_numpy, arrays)
    return positions, values, left, consistent
