"""What ranks know of each other's gradients when they sum words (docs/homomorphic.md): the grids and the sizes of the
next step, agreed on with the words of this one.

ORed, in front of the index, for each part:  8 words  one bit of 256, at the exponent of this rank's largest entry; the
                                                      last bit if an entry is not finite
Added, in front of the sketch:               1 word   fingerprint of what is sent, the same on all ranks
       then for each part:                   1 word   2^16·log2 of the root mean square of this rank's entries; 0 if it
                                                      has none
                                             1 word   1 if it has any
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
import torch

from gradwire.errors import AggregateError
from gradwire.homomorphic import grid as grids
from gradwire.homomorphic.grid import Grid
from gradwire.homomorphic.plan import LANES, Plan, choose, choose_index

EXPONENT_WORDS = 8
NOT_FINITE, LARGEST = 255, 254  # exponents
HEADROOM = 4  # bits above the last maximum: a gradient that grows sixteenfold in a step is still on the grid
LOG_UNITS = 2**16
FILTER_ROOM = 2  # times the largest union of late, for a filter that would be useless if it were full
REMEMBERED = 4  # steps whose largest exponents and unions count
EIGHTHS = tuple(2 ** (i / 8) for i in range(8))  # of an octave, in which a common root mean square is told


# ── what is told ──────────────────────────────────────────────────────────────────────────────────


@dataclass
class PartSummary:
    """Of a part, by this rank; or by all of them, the logarithms then being a sum."""

    exponent: int = 0  # of the largest entry
    level: int = 0
    ranks: int = 0  # that have any entries

    @classmethod
    def of(cls, exponent: int, squares: float = 0.0, entries: int = 0) -> PartSummary:
        if exponent == NOT_FINITE or not squares > 0:
            return cls(exponent)
        return cls(exponent, round(LOG_UNITS * 0.5 * math.log2(squares / entries)), 1)


def ored_words(told: Sequence[PartSummary]) -> torch.Tensor:
    bits = np.zeros((len(told), EXPONENT_WORDS), dtype=np.uint32)
    for row, part in zip(bits, told, strict=True):
        row[part.exponent >> 5] = 1 << (part.exponent & 31)
    return torch.from_numpy(bits.reshape(-1).view(np.int32))


def added_words(told: Sequence[PartSummary], fingerprint: int) -> torch.Tensor:
    words = [fingerprint, *(word for part in told for word in (part.level, part.ranks))]
    return torch.from_numpy(np.array(words, dtype=np.int64).astype(np.uint32).view(np.int32))


def summaries_from_words(
    ored: torch.Tensor, added: torch.Tensor, parts: int, world: int, fingerprint: int
) -> list[PartSummary]:
    """What all ranks told of each part."""
    if int(added[0]) & 0xFFFFFFFF != (world * fingerprint) & 0xFFFFFFFF:
        raise AggregateError(
            "ranks sent words of different tensors, or of different steps, or on different grids: all ranks must have "
            "the same model, the same spec and the same version of gradwire, and load the same checkpoint"
        )
    bits = np.unpackbits(ored[: parts * EXPONENT_WORDS].numpy().view(np.uint8), bitorder="little").reshape(parts, 256)
    if not bits.any(axis=1).all():
        raise AggregateError("the exponents of the ranks' gradients are missing from their sum: it was damaged")
    largest = 255 - bits[:, ::-1].argmax(axis=1)
    levels = added[1 : 1 + 2 * parts].view(parts, 2).tolist()
    return [PartSummary(int(exponent), *level) for exponent, level in zip(largest, levels, strict=True)]


# ── what is agreed on: the same on all ranks, always ──────────────────────────────────────────────


@dataclass
class Scale:
    """Of a part, whatever it travels with."""

    exponents: deque[int] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    eighths: int = 0  # the root mean square is 2^(eighths/8)

    def learn(self, told: PartSummary) -> None:
        if told.exponent or not self.exponents:  # otherwise no rank has anything
            self.exponents.append(told.exponent)
        if told.ranks > 0:
            self.eighths = round(told.level * 8 / (LOG_UNITS * told.ranks))

    def exponent(self, limits: bool) -> int:
        """What a grid holds: some times the last maximum, if what is beyond can wait; otherwise, all of late."""
        return min(LARGEST, self.exponents[-1] + HEADROOM if limits else max(self.exponents))

    def grid(self, bits: int, world: int, limits: bool) -> Grid:
        if limits and bits < 32:
            return grids.by_rms(math.ldexp(EIGHTHS[self.eighths & 7], self.eighths >> 3), bits, world)
        return grids.by_largest(self.exponent(limits), bits, world)

    def saved(self) -> torch.Tensor:
        return torch.tensor([self.eighths, *self.exponents])

    @classmethod
    def loaded(cls, state: torch.Tensor) -> Scale:
        eighths, *exponents = state.tolist()
        return cls(deque(exponents, maxlen=REMEMBERED), eighths)


@dataclass
class Sizes:
    """Of the unions of a message."""

    unions: deque[Mapping[int, int]] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    guessed: bool = True  # as the sum of what the ranks have

    def guess(self, blocks: Mapping[int, int]) -> None:
        """Begin with a guess of the first union, by number of lanes: what all ranks have together."""
        self.unions.append(blocks)

    def learn(self, blocks: Mapping[int, int]) -> None:
        if self.guessed:
            self.unions.clear()
        self.guessed = False
        self.unions.append(blocks)

    def plan(self, words: int, lanes: Sequence[int], most: int | None, seed: int) -> Plan:
        """Room for the most words that the union can have, if that is known; otherwise for the largest union of late,
        and some more."""
        rooms = ((1, most),) if most is not None else self._rooms(words, lanes)
        return replace(_plan(words, rooms), seed=seed)

    def _rooms(self, words: int, lanes: Sequence[int]) -> tuple[tuple[int, int], ...]:
        largest = {n: max(union[n] for union in self.unions) for n in lanes}
        return tuple((n, min(_with_room(count), -(-words // n))) for n, count in largest.items())

    def index_plan(self, words: int, lanes: Sequence[int], most: int | None, seed: int) -> Plan:
        """The same where there is no sketch."""
        return replace(_index_plan(words, self._rooms(words, lanes), most), seed=seed)


def _with_room(count: int) -> int:
    """A few percent more; of few different sizes, so that plans are met again."""
    count += count // 32 + 2 * math.isqrt(count) + 1
    step = 1 << max(0, count.bit_length() - 7)
    return -(-count // step) * step


@lru_cache(maxsize=4096)
def _plan(words: int, rooms: tuple[tuple[int, int], ...]) -> Plan:
    return choose(words, dict(rooms), 0)


@lru_cache(maxsize=4096)
def _index_plan(words: int, rooms: tuple[tuple[int, int], ...], most: int | None) -> Plan:
    held = {lanes: FILTER_ROOM * count if most is None else most for lanes, count in rooms}
    return choose_index(words, dict(rooms), held, 0)


def counts_as_words(counts: Mapping[int, int]) -> torch.Tensor:
    return torch.tensor([counts[lanes] for lanes in LANES], dtype=torch.int32)


def counts_from_words(words: Sequence[int]) -> dict[int, int]:
    """Those of all ranks together: no union has more."""
    return {lanes: int(count) for lanes, count in zip(LANES, words, strict=True)}
