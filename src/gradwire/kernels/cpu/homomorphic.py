"""The kernels of the homomorphic code, by the native module."""

from __future__ import annotations

import torch

from gradwire import _native
from gradwire.kernels.cpu.dense import _array, _native_can, _seed
from gradwire.kernels.reference import homomorphic as reference
from gradwire.kernels.reference.homomorphic import Peeled, Quantized

__all__ = [
    "align_words", "are_ascending", "bloom_build", "bloom_query", "count_bits", "count_blocks", "index_bitmap", "peel",
    "put_words", "quantize_all", "quantize_values", "sketch_words",
]  # fmt: skip


def _words(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int32)


def quantize_all(
    gradient: torch.Tensor, memory: torch.Tensor | None, memory_out: torch.Tensor | None, decay: float, step: float,
    most: int, bits: int, seed: int | None = None,
) -> Quantized:  # fmt: skip
    if not _native_can(gradient):
        return reference.quantize_all(gradient, memory, memory_out, decay, step, most, bits, seed)
    # Room for all, and for stores of whole vectors; memory that is not written to costs nothing.
    room = -(-gradient.numel() * bits // 32) + 16
    positions, values = torch.empty(room, dtype=torch.int64), torch.empty(room, dtype=torch.int32)
    count, largest_g, largest_u, squares = _native.fixed_all(
        _array(gradient), _array(memory), _array(memory_out), decay, step, most, bits, _seed(seed), _array(positions),
        _array(values),
    )  # fmt: skip
    if max(largest_g, largest_u) >> 23 == 255:
        return positions[:0], values[:0], 255, 0.0
    return positions[:count], values[:count], largest_u >> 23, squares


def quantize_values(
    values: torch.Tensor, step: float, most: int, seed: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    if not _native_can(values):
        return reference.quantize_values(values, step, most, seed)
    q, sent = torch.empty(values.numel(), dtype=torch.int32), torch.empty(values.numel())
    _native.fixed_values(_array(values), step, most, _seed(seed), _array(q), _array(sent))
    return q, sent


def put_words(out: torch.Tensor, positions: torch.Tensor, words: torch.Tensor, bits: int, factor: float) -> None:
    if not _native_can(out):
        return reference.put_words(out, positions, words, bits, factor)
    return _native.put_words(_array(out), _array(positions), _array(words), bits, factor)


def are_ascending(positions: torch.Tensor, limit: int) -> bool:
    return _native.are_ascending(_array(positions), limit)


def count_blocks(positions: torch.Tensor, lanes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(_native.count_blocks(_array(positions), n) for n in lanes)


def count_bits(bitmap: torch.Tensor) -> int:
    return _native.count_bits(_array(bitmap))


def index_bitmap(positions: torch.Tensor, lanes: int, blocks: int) -> torch.Tensor:
    bitmap = _words(-(-blocks // 32))
    _native.index_bitmap(_array(positions), lanes, blocks, _array(bitmap))
    return bitmap


def bloom_build(bitmap: torch.Tensor, index_words: int, probes: int, seed: int) -> torch.Tensor:
    index = _words(index_words)
    _native.bloom_build(_array(bitmap), probes, seed, _array(index))
    return index


def bloom_query(index: torch.Tensor, blocks: int, probes: int, seed: int) -> torch.Tensor:
    bitmap = torch.empty(-(-blocks // 32), dtype=torch.int32)
    _native.bloom_query(_array(index), probes, seed, _array(bitmap))
    return bitmap


def sketch_words(
    positions: torch.Tensor, values: torch.Tensor, lanes: int, segments: int, segment_log: int, seed: int
) -> torch.Tensor:
    sketch = _words((segments << segment_log) * lanes)
    _native.sketch_words(_array(positions), _array(values), lanes, segments, segment_log, seed, _array(sketch))
    return sketch


def align_words(
    bitmap: torch.Tensor, words: int, lanes: int, positions: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, int]:
    *found, met = _native.align_words(_array(bitmap), words, lanes, _array(positions), _array(values))
    everywhere, aligned = map(torch.from_numpy, found)
    return everywhere, aligned, met


def peel(
    bitmap: torch.Tensor, sketch: torch.Tensor, words: int, lanes: int, segments: int, segment_log: int, seed: int
) -> Peeled:
    *found, consistent = _native.peel(_array(bitmap), _array(sketch), words, lanes, segments, segment_log, seed)
    positions, values, left = map(torch.from_numpy, found)
    return positions, values, left, consistent
