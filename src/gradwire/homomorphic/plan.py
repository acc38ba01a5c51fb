"""How long index and sketch are: a rule in integers, so that all workers find the same (docs/homomorphic.md)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..errors import GradwireError

LANES = (1, 4, 16)
INDEXES = ("dense", "bitmap", "bloom")
MOST_WORDS = 2**31  # of a message
MOST_CELLS = 2**31
MOST_PROBES = 24
LONGEST_SEGMENT = 16  # log2: hashes have 16 bits for each place
BLOOM_SAVES = (22, 25)  # a Bloom filter takes more time: it has to be 12% shorter, all in all

# Blocks, cells for a thousand of them, log2 of the cells of a segment: measured by benchmarks/peeling.py.
SIZES = (
    (1, 16000, 5), (16, 10000, 6), (64, 6000, 7), (256, 2500, 8), (1024, 1600, 9), (4096, 1350, 10), (16384, 1200, 11),
    (65536, 1130, 12), (262144, 1090, 13), (1048576, 1080, 14),
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """Everything that encoders and decoders must agree on."""

    words: int  # of the message
    lanes: int  # words of a block
    index: str  # dense (there is none: the words themselves are added), bitmap or bloom
    index_words: int
    probes: int  # of the Bloom filter
    segments: int
    segment_log: int
    seed: int

    def __post_init__(self) -> None:
        ok = 0 <= self.words <= MOST_WORDS and 0 <= self.seed < 2**32 and self.lanes in LANES
        if self.index == "dense":
            ok &= (self.lanes, self.index_words, self.probes, self.segments, self.segment_log) == (1, 0, 0, 0, 0)
        else:
            bitmap = -(-self.blocks // 32)
            ok &= self.index in INDEXES and 0 <= self.segment_log <= LONGEST_SEGMENT and self.segments >= 4
            ok &= self.segments << self.segment_log <= MOST_CELLS and self.words >= 1
            if self.index == "bitmap":
                ok &= (self.index_words, self.probes) == (bitmap, 0)
            else:
                ok &= 1 <= self.index_words <= MOST_WORDS and 1 <= self.probes <= MOST_PROBES
        if not ok:
            raise GradwireError(f"there is no such homomorphic code: {self}")

    @property
    def blocks(self) -> int:
        return -(-self.words // self.lanes)

    @property
    def cells(self) -> int:
        return self.segments << self.segment_log

    @property
    def sketch_words(self) -> int:
        return self.words if self.index == "dense" else self.cells * self.lanes

    @property
    def total_words(self) -> int:
        return self.index_words + self.sketch_words


def segments_for(blocks: int) -> tuple[int, int]:
    """(segments, log2 of their cells) of a sketch that this many blocks can be peeled from."""
    _, rate, log = next(size for size in reversed(SIZES) if blocks >= size[0] or size == SIZES[0])
    return max(4, -(-blocks * rate // (1000 << log))), log


def choose(words: int, blocks: Mapping[int, int], seed: int) -> Plan:
    """The shortest plan for a message whose sum has this many blocks (by lanes) that are not zero."""
    best = Plan(words, 1, "dense", 0, 0, 0, 0, seed)
    for lanes, union in sorted(blocks.items()):
        for plan in _sparse_plans(words, lanes, max(1, union), seed):
            slack = BLOOM_SAVES if plan.index == "bloom" else (1, 1)
            if plan.total_words * slack[1] < best.total_words * slack[0]:
                best = plan
    return best


def _sparse_plans(words: int, lanes: int, union: int, seed: int) -> Iterator[Plan]:
    """The bitmap first, then the best Bloom filter."""
    count = -(-words // lanes)
    union = min(union, count)
    if not count:
        return
    if segments_for(union)[0] << segments_for(union)[1] > min(count, MOST_CELLS):
        return  # longer than the words themselves
    yield Plan(words, lanes, "bitmap", -(-count // 32), 0, *segments_for(union), seed)
    best: Plan | None = None
    for probes in range(1, MOST_PROBES + 1):
        # Half of the bits are set where there are 1/ln 2 = 1.4427 bits for each probe.
        index_words = -(-union * probes * 14427 // 320000)
        false = (count - union) >> probes
        false += 16 * math.isqrt(false)  # it varies, and by 32 at a time where whole groups are set
        plan = Plan(words, lanes, "bloom", index_words, probes, *segments_for(min(count, union + false)), seed)
        if best is None or plan.total_words < best.total_words:
            best = plan
    assert best is not None
    yield best
