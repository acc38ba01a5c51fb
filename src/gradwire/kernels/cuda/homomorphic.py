"""The kernels of the homomorphic code in CUDA C++ (sources/homomorphic.cu, sources/peel.cu).

Everything stays on the device but the numbers that the reference returns as numbers, among them how many words there
are; each call waits for these once or twice. Results are those of the reference, to the bit. Only the sum of squares of
`quantize_all` is added up in another order, always the same one: its last bits may differ.
"""

from __future__ import annotations

import struct

import torch

from gradwire.cuda_runtime import programs
from gradwire.kernels.conditions import where
from gradwire.kernels.cuda.launches import UNIT, Launcher, flat, flat_fp32, fp32_bits, fp64_bits
from gradwire.kernels.reference.homomorphic import Peeled, Quantized, fp32_up_to

__all__ = [
    "align_words", "are_ascending", "bloom_build", "bloom_query", "count_bits", "count_blocks", "index_bitmap", "peel",
    "put_words", "quantize_all", "quantize_values", "sketch_words",
]  # fmt: skip

can_run = programs.can_run  # the dispatcher asks it
PEELING_BLOCKS = 528  # four for each of 132: more than can find work at once


# ── entries and words ─────────────────────────────────────────────────────────────────────────────


@where(flat_fp32)
def quantize_all(
    gradient: torch.Tensor, memory: torch.Tensor | None, memory_out: torch.Tensor | None, decay: float, step: float,
    most: int, bits: int, seed: int | None = None,
) -> Quantized:  # fmt: skip
    """Quantize a tensor to words in one pass, which puts them in a staging area; then copy them to their places."""
    gpu, count, fields = Launcher("homomorphic", gradient.device), gradient.numel(), 32 // bits
    units, stride = -(-count // UNIT), UNIT // fields
    staged, locals_ = gpu.empty(units * stride, torch.int32), gpu.empty(units * stride, torch.int16)
    counts, largest = gpu.empty(units, torch.int32), gpu.empty(units, torch.int32)
    squares, told = gpu.empty(units, torch.float64), gpu.zeros(3)
    gpu.for_units(
        units, "quantize", gradient, memory, memory_out, count, fp32_bits(decay), fp32_bits(step),
        fp32_bits(fp32_up_to(most)), bits, int(seed is not None), seed, staged, locals_, counts, largest, squares,
    )  # fmt: skip
    gpu.sum_up(counts, units, told)
    gpu.start("summarize", 1, 1024, largest, squares, units, told[1:], told[2:])
    total, top, sum_bits = told.tolist()
    if top >> 23 == 255:
        return gpu.empty(0, torch.int64), gpu.empty(0, torch.int32), 255, 0.0
    positions, words = gpu.empty(total, torch.int64), gpu.empty(total, torch.int32)
    gpu.for_units(units, "collect", staged, locals_, counts, units, told, stride, positions, words)
    return positions, words, top >> 23, struct.unpack("<d", struct.pack("<q", sum_bits))[0]


@where(flat_fp32)
def quantize_values(
    values: torch.Tensor, step: float, most: int, seed: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (q, q·step) of these values."""
    gpu, count = Launcher("homomorphic", values.device), values.numel()
    q, sent = gpu.empty(count, torch.int32), gpu.empty(count, torch.float32)
    gpu.for_each(
        count, "quantize_given", values, count, fp32_bits(step), fp32_bits(fp32_up_to(most)), int(seed is not None),
        seed, q, sent,
    )  # fmt: skip
    return q, sent


@where(flat_fp32)
def put_words(out: torch.Tensor, positions: torch.Tensor, words: torch.Tensor, bits: int, factor: float) -> None:
    """Write the entries of these words."""
    gpu, count = Launcher("homomorphic", out.device), len(positions)
    gpu.for_each(count, "put", out, out.numel(), positions, words, count, bits, fp64_bits(factor))


# ── index ─────────────────────────────────────────────────────────────────────────────────────────


@where(flat)
def are_ascending(positions: torch.Tensor, limit: int) -> bool:
    """Tell whether positions are ascending, and from 0 on below the limit."""
    gpu, count = Launcher("homomorphic", positions.device), len(positions)
    found = gpu.zeros(1)
    gpu.for_each(count, "find_disorder", positions, count, limit, found)
    return not int(found)


@where(flat)
def count_blocks(positions: torch.Tensor, lanes: tuple[int, ...]) -> tuple[int, ...]:
    """Count the blocks that hold a position, for each number of lanes."""
    gpu, count = Launcher("homomorphic", positions.device), len(positions)
    blocks = gpu.zeros(len(lanes))
    for i, n in enumerate(lanes):
        gpu.for_each(count, "count_held", positions, count, n, blocks[i:])
    return tuple(blocks.tolist())


@where(flat)
def count_bits(bitmap: torch.Tensor) -> int:
    """Count the bits that are set."""
    gpu, words = Launcher("homomorphic", bitmap.device), bitmap.numel()
    bits = gpu.zeros(1)
    gpu.for_each(words, "count_set", bitmap, words, bits)
    return int(bits)


@where(flat)
def index_bitmap(positions: torch.Tensor, lanes: int, blocks: int) -> torch.Tensor:
    """Mark the blocks that hold a position."""
    gpu, count = Launcher("homomorphic", positions.device), len(positions)
    bitmap = gpu.zeros(-(-blocks // 32), torch.int32)
    gpu.for_each(count, "mark", positions, count, lanes, bitmap)
    return bitmap


@where(flat)
def bloom_build(bitmap: torch.Tensor, index_words: int, probes: int, seed: int) -> torch.Tensor:
    """Build a Bloom filter of the blocks that are marked."""
    gpu, words = Launcher("homomorphic", bitmap.device), bitmap.numel()
    index = gpu.zeros(index_words, torch.int32)
    gpu.for_each(words, "fill_filter", bitmap, words, probes, seed, index, index_words)
    return index


@where(flat)
def bloom_query(index: torch.Tensor, blocks: int, probes: int, seed: int) -> torch.Tensor:
    """Mark the blocks that may be in a Bloom filter."""
    gpu, words = Launcher("homomorphic", index.device), -(-blocks // 32)
    bitmap = gpu.empty(words, torch.int32)
    gpu.for_each(words, "ask_filter", index, index.numel(), probes, seed, bitmap, words)
    return bitmap


@where(flat)
def align_words(
    bitmap: torch.Tensor, words: int, lanes: int, positions: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return a message's words at all blocks that are marked."""
    gpu, count = Launcher("homomorphic", bitmap.device), len(positions)
    told = gpu.zeros(2)
    gpu.for_each(count, "count_met", bitmap, positions, count, lanes, told[1:])
    everywhere, before, met = _listed(gpu, bitmap, words, lanes, told)
    aligned = gpu.zeros(len(everywhere), torch.int32)
    gpu.for_each(count, "place", bitmap, before, positions, values, count, lanes, aligned)
    return everywhere, aligned, met


def _listed(
    gpu: Launcher, bitmap: torch.Tensor, words: int, lanes: int, told: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return the positions of all words in blocks that are marked, how many there are before each word of the bitmap,
    and told[1], for which the host waits at the same time."""
    units = -(-words // (lanes * UNIT))
    counts, before = gpu.empty(units, torch.int32), gpu.empty(bitmap.numel(), torch.int32)
    gpu.for_units(units, "count_marked", bitmap, words, lanes, counts)
    gpu.sum_up(counts, units, told)
    total, other = told.tolist()
    positions = gpu.empty(total, torch.int64)
    gpu.for_units(units, "list_marked", bitmap, words, lanes, counts, before, positions)
    return positions, before, other


# ── sketch ────────────────────────────────────────────────────────────────────────────────────────


@where(flat)
def sketch_words(
    positions: torch.Tensor, values: torch.Tensor, lanes: int, segments: int, segment_log: int, seed: int
) -> torch.Tensor:
    """Add every word to the four cells of its block: integers, in whatever order."""
    gpu, count = Launcher("homomorphic", positions.device), len(positions)
    sketch = gpu.zeros((segments << segment_log) * lanes, torch.int32)
    gpu.for_each(count, "add_to_sketch", positions, values, count, lanes, segments, segment_log, seed, sketch)
    return sketch


@where(flat)
def peel(
    bitmap: torch.Tensor, sketch: torch.Tensor, words: int, lanes: int, segments: int, segment_log: int, seed: int
) -> Peeled:
    """Recover the words of a sum of sketches: all threads at once, each from cells that hold one block."""
    gpu, cells = Launcher("peel", bitmap.device), segments << segment_log
    blocks, *_ = _listed(Launcher("homomorphic", gpu.device), bitmap, -(-words // lanes), 1, gpu.zeros(2))
    count = len(blocks)
    keys, sums, queue, slots = gpu.zeros(cells), sketch.clone(), gpu.zeros(4), gpu.zeros(cells)
    claimed, values = gpu.zeros(-(-count // 32), torch.int32), gpu.empty(count * lanes, torch.int32)
    gpu.for_each(count, "fill_keys", blocks, count, segments, segment_log, seed, keys)
    gpu.for_each(cells, "find_singles", keys, cells, queue, slots)
    gpu.start("open_queue", 1, 1, queue)
    gpu.start(
        "peel", min(-(-count // 256), PEELING_BLOCKS), 256, queue, slots, cells, blocks, lanes, segments, segment_log,
        seed, keys, sums, claimed, values,
    )  # fmt: skip
    units = -(-count * lanes // UNIT)
    known, left, told = gpu.empty(units, torch.int32), gpu.empty(units, torch.int32), gpu.zeros(3)
    gpu.for_units(units, "count_found", blocks, count, lanes, words, claimed, values, known, left, told[2:])
    gpu.for_each(cells * lanes, "check_cells", keys, sums, cells, lanes, told[2:])
    gpu.sum_up(known, units, told)
    gpu.sum_up(left, units, told[1:])
    found, unknown, wrong = told.tolist()
    positions, recovered = gpu.empty(found, torch.int64), gpu.empty(found, torch.int32)
    left_at = gpu.empty(unknown, torch.int64)
    gpu.for_units(
        units, "write_found", blocks, count, lanes, words, claimed, values, known, left, positions, recovered, left_at
    )
    return positions, recovered, left_at, not wrong
