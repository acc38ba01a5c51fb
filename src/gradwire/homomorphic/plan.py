"""The lengths of index and sketch, in integer arithmetic, so that all workers get the same (docs/homomorphic.md)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from gradwire.errors import GradwireError

LANES = (1, 4, 16)
INDEXES = ("dense", "bitmap", "bloom")
MOST_WORDS = 2**31  # in a message
MOST_CELLS = 2**32 - 1
MOST_PROBES = 24
LONGEST_SEGMENT = 16  # log2 of its cells: hashes have 16 bits for the place in a segment
NO_SKETCH = (4, 0)  # the fewest segments, and log2 of the fewest cells in each
# A plan that takes more time is chosen only if it has less than this part of the words of the best before it: 15/16 for
# a bitmap, where larger blocks come first, and 2/3 for a Bloom filter.
SHORTER = {"bitmap": (15, 16), "bloom": (2, 3)}

# (fewest blocks that the entry is for, cells for a thousand blocks, log2 of the cells in a segment). There are at least
# four segments. For few blocks it is long segments that keep two blocks from sharing all cells (benchmarks/peeling.py).
SIZES = (
    (1, 0, 4), (5, 0, 5), (17, 0, 6), (65, 0, 7), (257, 1800, 7), (513, 1650, 8), (1025, 1550, 8), (2049, 1450, 8),
    (4097, 1400, 8), (6145, 1380, 9), (8193, 1320, 9), (16385, 1250, 10), (32769, 1200, 10), (65537, 1175, 11),
    (131073, 1145, 11), (262145, 1120, 11), (524289, 1100, 12), (1048577, 1085, 13), (4194305, 1075, 14),
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """Everything that encoders and decoders must agree on."""

    words: int  # in the message
    lanes: int  # words in a block
    index: str  # "bitmap", "bloom", or "dense" if there is no index and the words themselves are added up
    index_words: int
    probes: int  # bits of the Bloom filter that a block sets
    segments: int  # of the sketch
    segment_log: int  # log2 of the cells in a segment
    seed: int  # of the hashes

    def __post_init__(self) -> None:
        ok = 0 <= self.words <= MOST_WORDS and 0 <= self.seed < 2**32 and self.lanes in LANES
        if self.index == "dense":
            ok &= (self.lanes, self.index_words, self.probes, self.segments, self.segment_log) == (1, 0, 0, 0, 0)
        else:
            bitmap = -(-self.blocks // 32)
            ok &= self.index in INDEXES and 0 <= self.segment_log <= LONGEST_SEGMENT and self.segments >= 4
            ok = ok and self.segments << self.segment_log <= MOST_CELLS and self.words >= 1
            if self.index == "bitmap":
                ok &= (self.index_words, self.probes) == (bitmap, 0)
            else:
                ok &= 1 <= self.index_words <= MOST_WORDS and 1 <= self.probes <= MOST_PROBES
        if not ok:
            raise GradwireError(f"there is no such homomorphic code: {self}")

    @property
    def blocks(self) -> int:
        """The number of blocks of the message."""
        return -(-self.words // self.lanes)

    @property
    def cells(self) -> int:
        """The number of cells of the sketch."""
        return self.segments << self.segment_log

    @property
    def sketch_words(self) -> int:
        """The number of words of the sketch, or of the message itself if the plan is dense."""
        return self.words if self.index == "dense" else self.cells * self.lanes

    @property
    def total_words(self) -> int:
        """The number of words of index and sketch together."""
        return self.index_words + self.sketch_words


def segments_for(blocks: int) -> tuple[int, int]:
    """Return (segments, log2 of their cells) of a sketch that this many blocks can be peeled from."""
    _, rate, log = next(size for size in reversed(SIZES) if blocks >= size[0])
    return max(4, -(-blocks * rate // (1000 << log))), log


def choose(words: int, blocks: Mapping[int, int], seed: int) -> Plan:
    """Return the shortest plan for a message; `blocks` says for each block size how many are not zero in the sum.

    Plans that take less time come first, and a slower one is chosen only if it is clearly shorter (SHORTER).
    """
    best = Plan(words, 1, "dense", 0, 0, 0, 0, seed)
    for make in (_bitmap, _bloom):
        for lanes, union in sorted(blocks.items(), reverse=True):
            plan = make(words, lanes, min(max(1, union), -(-words // lanes)), seed) if words else best
            part, whole = SHORTER.get(plan.index, (1, 1))
            if plan.total_words * whole < best.total_words * part:
                best = plan
    return best


def choose_index(words: int, blocks: Mapping[int, int], held: Mapping[int, int], seed: int) -> Plan:
    """Return the shortest plan for an index alone: the words of the union are then added up without a sketch.

    `blocks` says for each block size how many the union is expected to have, and `held` how many a Bloom filter must be
    able to hold. A filter with more blocks than it was made for soon marks all blocks of the message as present; a
    bitmap is always exact.
    """
    best, fewest = Plan(words, 1, "dense", 0, 0, 0, 0, seed), words
    for index in ("bitmap", "bloom"):
        before, (part, whole) = fewest, SHORTER[index]
        for lanes, union in sorted(blocks.items(), reverse=True) if words else ():
            count = -(-words // lanes)
            if index == "bitmap":
                sizes = [(-(-count // 32), 0, 0)]
            else:
                sizes = [(filter_words(max(1, held[lanes]), k), k, count >> k) for k in range(1, MOST_PROBES + 1)]
            for index_words, probes, false in sizes:
                total = index_words + min(count, union + false) * lanes
                if total * whole < before * part and total < fewest:
                    best, fewest = Plan(words, lanes, index, index_words, probes, *NO_SKETCH, seed), total
    return best


def filter_words(blocks: int, probes: int) -> int:
    """Return the words of a Bloom filter that these blocks fill to one half: 1/ln 2 = 1.4427 bits for each probe."""
    return -(-blocks * probes * 14427 // 320000)


def _bitmap(words: int, lanes: int, union: int, seed: int) -> Plan:
    count = -(-words // lanes)
    return Plan(words, lanes, "bitmap", -(-count // 32), 0, *segments_for(union), seed)


def _bloom(words: int, lanes: int, union: int, seed: int) -> Plan:
    """Return the plan whose number of probes makes filter and sketch, with false positives, shortest together."""
    count, plans = -(-words // lanes), []
    for probes in range(1, MOST_PROBES + 1):
        index_words = filter_words(union, probes)
        false = (count - union) >> probes
        false += 16 * math.isqrt(false)  # it varies, and by 32 at a time where whole groups are set
        segments = segments_for(min(count, union + false))
        plans.append(Plan(words, lanes, "bloom", index_words, probes, *segments, seed))
    return min(plans, key=lambda plan: plan.total_words)
