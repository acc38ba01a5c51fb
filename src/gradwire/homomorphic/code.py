"""The homomorphic code: each worker encodes its words into an index and a sketch, which can be summed as they are.

The workers' indexes are ORed and their sketches are added up, by anything that can do so with 32-bit integers. `decode`
then returns the sum of the workers' words from these two alone (docs/homomorphic.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gradwire import kernels
from gradwire.errors import GradwireError
from gradwire.homomorphic.plan import LANES, Plan


@dataclass(frozen=True)
class Decoded:
    """The words of a sum that were recovered, and the positions of those that were not."""

    positions: torch.Tensor  # int64, ascending: where the words are that are not zero
    values: torch.Tensor  # int32: these words
    left: torch.Tensor  # int64, ascending: where words are whose block could not be peeled; their sum is unknown
    consistent: bool = True  # False if index and sketch do not belong together: then no word can be trusted


def encode(plan: Plan, positions: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (index, sketch) of a message that has these words, at ascending positions, and zeros elsewhere."""
    _check(positions, torch.int64, "positions")
    _check(values, torch.int32, "values")
    if positions.device != values.device:
        raise GradwireError(f"positions are on {positions.device}, values on {values.device}")
    if len(positions) != len(values):
        raise GradwireError(f"there are {len(positions)} positions and {len(values)} values")
    if not kernels.are_ascending(positions, plan.words):
        raise GradwireError(f"positions must be ascending, and below {plan.words}")
    if plan.index == "dense":
        sketch = values.new_zeros(plan.words)
        sketch[positions] = values
        return values.new_empty(0), sketch
    index = index_of(plan, positions)
    sketch = kernels.sketch_words(positions, values, plan.lanes, plan.segments, plan.segment_log, plan.seed)
    return index, sketch


def decode(plan: Plan, index: torch.Tensor, sketch: torch.Tensor) -> Decoded:
    """Return the words of the sum. Damaged ones do no harm: any index and sketch of the right length can be decoded."""
    for name, tensor, length in (("index", index, plan.index_words), ("sketch", sketch, plan.sketch_words)):
        _check(tensor, torch.int32, name)
        if len(tensor) != length:
            raise GradwireError(f"{name} has {len(tensor)} words; the plan says {length}")
    if plan.index == "dense":
        positions = torch.nonzero(sketch).flatten()
        return Decoded(positions, sketch[positions], positions[:0])
    index = candidates(plan, index)
    return Decoded(*kernels.peel(index, sketch, plan.words, plan.lanes, plan.segments, plan.segment_log, plan.seed))


def index_of(plan: Plan, positions: torch.Tensor) -> torch.Tensor:
    """Return the index of a message: which blocks hold one of its positions."""
    index = kernels.index_bitmap(positions, plan.lanes, plan.blocks)
    return kernels.bloom_build(index, plan.index_words, plan.probes, plan.seed) if plan.index == "bloom" else index


def align(
    plan: Plan, index: torch.Tensor, positions: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions of all words that the ORed index of all workers marks, and one worker's words there.

    Since all workers get the same positions, these words can be added up as they are, without a sketch; the price is a
    second exchange, after that of the indexes.
    """
    everywhere, aligned, met = kernels.align_words(candidates(plan, index), plan.words, plan.lanes, positions, values)
    if met < len(positions):
        raise GradwireError("the index does not mark all blocks of this message: it is damaged")
    return everywhere, aligned


def candidates(plan: Plan, index: torch.Tensor) -> torch.Tensor:
    """Return a bitmap of the blocks that may hold words: a Bloom filter also marks some that do not."""
    if plan.index == "bloom":
        return kernels.bloom_query(index, plan.blocks, plan.probes, plan.seed)
    return index


def blocks(positions: torch.Tensor, words: int) -> dict[int, int]:
    """Return how many blocks of each size hold one of these ascending positions."""
    _check(positions, torch.int64, "positions")
    if not kernels.are_ascending(positions, words):
        raise GradwireError(f"positions must be ascending, and below {words}")
    return dict(zip(LANES, kernels.count_blocks(positions, LANES), strict=True))


def _check(tensor: torch.Tensor, dtype: torch.dtype, name: str) -> None:
    if not isinstance(tensor, torch.Tensor) or tensor.dtype != dtype or tensor.dim() != 1:
        raise GradwireError(f"{name} must be a flat {dtype} tensor")
    if not tensor.is_contiguous():
        raise GradwireError(f"{name} must be contiguous")
