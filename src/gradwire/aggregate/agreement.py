"""What ranks know of each other's gradients when they sum words (docs/homomorphic.md): the grid and the sizes of the
next step, agreed on with the words of this one.

ORed, in front of the index:  8 words  one bit of 256, at the exponent of this rank's largest entry; the last bit if an
                                       entry is not finite
Added, in front of the sketch: 1 word  fingerprint of what is sent, the same on all ranks
                               1 word  2^16·log2 of the root mean square of this rank's entries; 0 if it has none
                               1 word  1 if it has any
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
import torch

from ..errors import AggregateError
from ..homomorphic import grid as grids
from ..homomorphic.grid import Grid
from ..homomorphic.plan import LANES, Plan, choose

EXPONENT_WORDS, ADDED_WORDS = 8, 3
NOT_FINITE, LARGEST = 255, 254  # exponents
LOG_UNITS = 2**16
REMEMBERED = 4  # steps whose largest union counts
EIGHTHS = tuple(2 ** (i / 8) for i in range(8))  # of an octave, in which a common root mean square is told


@dataclass
class Own:
    """What this rank is about to send."""

    exponent: int = 0  # of the largest entry
    squares: float = 0.0
    entries: int = 0

    def add(self, exponent: int, squares: float, entries: int) -> None:
        self.exponent = max(self.exponent, exponent)
        self.squares += squares
        self.entries += entries

    def ored(self) -> torch.Tensor:
        bits = np.zeros(EXPONENT_WORDS, dtype=np.uint32)
        bits[self.exponent >> 5] = np.uint32(1 << (self.exponent & 31))
        return torch.from_numpy(bits.view(np.int32))

    def added(self, fingerprint: int) -> torch.Tensor:
        has = self.squares > 0 and self.exponent != NOT_FINITE
        level = round(LOG_UNITS * 0.5 * math.log2(self.squares / self.entries)) if has else 0
        return torch.from_numpy(np.array([fingerprint, level, int(has)]).astype(np.uint32).view(np.int32))


@dataclass
class Agreed:
    """The same on all ranks, always."""

    world: int
    bits: int
    limits: bool  # entries beyond the grid wait in an error memory; otherwise all have to be on it
    exponents: deque[int] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    largest: int = 0  # exponent of the last exchange
    eighths: int = 0  # the root mean square is 2^(eighths/8)
    unions: deque[Mapping[int, int]] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    guessed: bool = True  # the union, as the sum of what the ranks have

    def take(self, ored: torch.Tensor, added: torch.Tensor, fingerprint: int) -> bool:
        """What all ranks told; whether their words can be used: they are finite, and on the grid."""
        if int(added[0]) & 0xFFFFFFFF != (self.world * fingerprint) & 0xFFFFFFFF:
            raise AggregateError(
                "ranks sent words of different tensors, or of different steps: all ranks must have the same model, "
                "the same spec and the same version of gradwire"
            )
        present = np.flatnonzero(np.unpackbits(ored[:EXPONENT_WORDS].numpy().view(np.uint8), bitorder="little"))
        if not len(present):
            raise AggregateError("the exponents of the ranks' gradients are missing from their sum: it was damaged")
        self.largest = int(present[-1])
        if self.largest == NOT_FINITE:
            return False
        usable = self.limits or not self.exponents or self.largest <= self.exponent
        self.exponents.append(self.largest)
        level, ranks = int(added[1]), int(added[2])
        if ranks > 0:
            self.eighths = round(level * 8 / (LOG_UNITS * ranks))
        return usable

    def learn_union(self, blocks: Mapping[int, int]) -> None:
        if self.guessed:
            self.unions.clear()
        self.guessed = False
        self.unions.append(blocks)

    @property
    def exponent(self) -> int:
        """What the grid holds: with an error memory, twice the last maximum; without, all of late."""
        return min(LARGEST, self.exponents[-1] + 1 if self.limits else max(self.exponents))

    def grid(self) -> Grid:
        if self.limits and self.bits < 32:
            return grids.by_rms(math.ldexp(EIGHTHS[self.eighths & 7], self.eighths >> 3), self.bits, self.world)
        return grids.by_largest(self.exponent, self.bits, self.world)

    def plan(self, words: int, lanes: Sequence[int], seed: int) -> Plan:
        """Room for the largest union of late, and some more; in blocks of so many words."""
        most = {n: max(union[n] for union in self.unions) for n in lanes}
        rooms = tuple((n, min(_with_room(count), -(-words // n))) for n, count in most.items())
        return replace(_plan(words, rooms), seed=seed)


def _with_room(count: int) -> int:
    """A few percent more; of few different sizes, so that plans are met again."""
    count += count // 32 + 2 * math.isqrt(count) + 1
    step = 1 << max(0, count.bit_length() - 7)
    return -(-count // step) * step


@lru_cache(maxsize=4096)
def _plan(words: int, rooms: tuple[tuple[int, int], ...]) -> Plan:
    return choose(words, dict(rooms), 0)


def counts_as_words(counts: Mapping[int, int]) -> torch.Tensor:
    return torch.tensor([counts[lanes] for lanes in LANES], dtype=torch.int32)


def counts_from_words(words: Sequence[int]) -> dict[int, int]:
    """Those of all ranks together: no union has more."""
    return {lanes: int(count) for lanes, count in zip(LANES, words, strict=True)}
