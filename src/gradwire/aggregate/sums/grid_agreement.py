"""What ranks tell each other of their gradients when they sum words (docs/homomorphic.md).

With the words of a step, ranks send a summary of each part. From the summaries of all, every rank computes the same
grids and the same sizes of index and sketch for the next step. A summary travels as words of the sum:

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
from typing import Any

import numpy as np
import torch

from gradwire.errors import AggregateError, CheckpointError
from gradwire.homomorphic import grid as grids
from gradwire.homomorphic.grid import Grid
from gradwire.homomorphic.plan import LANES, Plan, choose, choose_index

EXPONENT_WORDS = 8
NOT_FINITE, LARGEST = 255, 254  # exponents, with a bias of 127 as in float32
HEADROOM = 4  # bits above the last maximum: a gradient that grows sixteenfold in a step is still on the grid
LOG_UNITS = 2**16
FILTER_ROOM = 2  # times the largest recent union, since a filter that is full would be useless
MOST_EIGHTHS = 8 * 256  # octaves: float32 has no root mean square beyond them
REMEMBERED = 4  # steps whose largest exponents and unions count
EIGHTHS = tuple(2 ** (i / 8) for i in range(8))  # root mean squares are rounded to an eighth of an octave


# ── what ranks tell each other ────────────────────────────────────────────────────────────────────


@dataclass
class PartSummary:
    """What is told of a part: of one rank's entries, or of those of all ranks together."""

    exponent: int = 0  # of the largest entry
    level: int = 0  # 2^16·log2 of the root mean square; of several ranks, the sum of theirs
    ranks: int = 0  # that have any entries

    @classmethod
    def of(cls, exponent: int, squares: float = 0.0, entries: int = 0) -> PartSummary:
        """Summarise this rank's entries: the exponent of the largest, the sum of their squares, and their number."""
        if exponent == NOT_FINITE or not squares > 0:
            return cls(exponent)
        return cls(exponent, round(LOG_UNITS * 0.5 * math.log2(squares / entries)), 1)


def ored_words(summaries: Sequence[PartSummary]) -> torch.Tensor:
    """Return the words of the summaries that are ORed: eight int32 for each part."""
    bits = np.zeros((len(summaries), EXPONENT_WORDS), dtype=np.uint32)
    for row, part in zip(bits, summaries, strict=True):
        row[part.exponent >> 5] = 1 << (part.exponent & 31)
    return torch.from_numpy(bits.reshape(-1).view(np.int32))


def added_words(summaries: Sequence[PartSummary], fingerprint: int) -> torch.Tensor:
    """Return the words of the summaries that are added: the fingerprint, and two int32 for each part."""
    words = [fingerprint, *(word for part in summaries for word in (part.level, part.ranks))]
    return torch.from_numpy(np.array(words, dtype=np.int64).astype(np.uint32).view(np.int32))


def summaries_from_words(
    ored: torch.Tensor, added: torch.Tensor, parts: int, world: int, fingerprint: int
) -> list[PartSummary]:
    """Return what all `world` ranks together told of each part.

    AggregateError if their fingerprints were not all the given one, or if the sum was damaged.
    """
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
    """How large the entries of one part are, from the summaries of recent steps.

    All ranks have the same, since they learn from the same sums. A part keeps its scale whatever message it travels in.
    """

    exponents: deque[int] = field(default_factory=lambda: deque(maxlen=REMEMBERED))  # of the largest entries
    eighths: int = 0  # the root mean square is 2^(eighths/8)

    def learn(self, summary: PartSummary) -> None:
        """Take in what all ranks told of this part in a step."""
        if summary.exponent or not self.exponents:  # otherwise no rank has any entry
            self.exponents.append(summary.exponent)
        if summary.ranks > 0:
            self.eighths = round(summary.level * 8 / (LOG_UNITS * summary.ranks))

    def exponent(self, limits: bool) -> int:
        """Return the exponent that the next grid must hold.

        If entries above the limit may wait in an error memory (`limits`), 16 times the last maximum is enough;
        otherwise it is the largest maximum of recent steps.
        """
        return min(LARGEST, self.exponents[-1] + HEADROOM if limits else max(self.exponents))

    def grid(self, bits: int, world: int, limits: bool) -> Grid:
        """Return the grid of the next step, for integers of this many bits that are summed over `world` ranks."""
        if limits and bits < 32:
            return grids.by_rms(math.ldexp(EIGHTHS[self.eighths & 7], self.eighths >> 3), bits, world)
        return grids.by_largest(self.exponent(limits), bits, world)

    def saved(self) -> torch.Tensor:
        """Return the scale as a tensor, for a checkpoint."""
        return torch.tensor([self.eighths, *self.exponents], dtype=torch.int64, device="cpu")

    @classmethod
    def loaded(cls, state: Any) -> Scale:
        """Return the scale that `saved` made this tensor of; CheckpointError if it has made none of the kind."""
        is_saved = isinstance(state, torch.Tensor) and state.dtype == torch.int64 and state.layout == torch.strided
        if not is_saved or state.is_meta or state.ndim != 1 or not 2 <= len(state) <= 1 + REMEMBERED:
            raise CheckpointError("not a state of gradwire: its 'grids' are not scales of gradients")
        eighths, *exponents = state.tolist()
        if abs(eighths) > MOST_EIGHTHS or not all(0 <= exponent <= LARGEST for exponent in exponents):
            raise CheckpointError("not a state of gradwire: its 'grids' have scales that no gradient can have")
        return cls(deque(exponents, maxlen=REMEMBERED), eighths)


@dataclass
class Sizes:
    """How many words the unions of one message had in recent steps: all words that are not zero on some rank.

    A union is counted in blocks of several sizes: a mapping from the lanes of a block to the number of blocks.
    """

    unions: deque[Mapping[int, int]] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    guessed: bool = True  # before the first union is known, the words of all ranks are added up instead

    def guess(self, blocks: Mapping[int, int]) -> None:
        """Begin with a guess of the first union, by number of lanes: what all ranks have together."""
        self.unions.append(blocks)

    def learn(self, blocks: Mapping[int, int]) -> None:
        """Take in the union of a step."""
        if self.guessed:
            self.unions.clear()
        self.guessed = False
        self.unions.append(blocks)

    def plan(self, words: int, lanes: Sequence[int], most: int | None, seed: int) -> Plan:
        """Return the plan of index and sketch for the next step, for a message of this many words.

        There is room for `most`, the largest union there can be, if that is known; otherwise for the largest union of
        recent steps and a little more.
        """
        rooms = ((1, most),) if most is not None else self._rooms(words, lanes)
        return replace(_plan(words, rooms), seed=seed)

    def _rooms(self, words: int, lanes: Sequence[int]) -> tuple[tuple[int, int], ...]:
        largest = {n: max(union[n] for union in self.unions) for n in lanes}
        return tuple((n, min(_with_room(count), -(-words // n))) for n, count in largest.items())

    def index_plan(self, words: int, lanes: Sequence[int], most: int | None, seed: int) -> Plan:
        """Return the plan of the index alone, for exchanges without a sketch."""
        return replace(_index_plan(words, self._rooms(words, lanes), most), seed=seed)


def _with_room(count: int) -> int:
    """Return a few percent more, rounded to few different sizes, so that plans are used again (they are cached)."""
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
    """Return this rank's numbers of blocks as int32 words, which are added up over all ranks."""
    return torch.tensor([counts[lanes] for lanes in LANES], dtype=torch.int32, device="cpu")


def counts_from_words(words: Sequence[int]) -> dict[int, int]:
    """Return the numbers of blocks of all ranks together; no union has more."""
    return {lanes: int(count) for lanes, count in zip(LANES, words, strict=True)}
