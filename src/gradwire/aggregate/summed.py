"""The mean of gradients whose words are added up on their way (docs/homomorphic.md): one exchange of a message.

1. encode: u = g + γe, all of it or its largest entries, on the common grid; index and sketch of its words;
2. index and sketch are ORed and added up, over a process group or by an aggregator;
3. peel: every rank recovers the same integer sums; words that are left are added up as they are;
4. learn: exponents, root mean squares and the union give grid and sizes of the next step.

Long messages have their index ORed first; then all ranks know the union, and add up its words without a sketch.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Collection, Generator, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .. import kernels
from ..convert.homomorphic import WHOLE, Homomorphic
from ..convert.job import Job as Source
from ..convert.job import NonFinite
from ..convert.topk import TopK
from ..errors import AggregateError, GradwireError
from ..homomorphic import code, grid
from ..homomorphic.grid import Grid
from ..homomorphic.plan import LANES, Plan
from ..monitor import Error
from .agreement import ADDED_WORDS, EXPONENT_WORDS, NOT_FINITE, Agreed, Own, counts_as_words, counts_from_words
from .mean import Mean
from .pieces import Part, Piece, fingerprint
from .wire_thread import Job, Pause
from .word_sums import WordSums

WORTH_A_ROUND = 2**14  # words of a sketch
Exchange = Generator[Pause, None, tuple[torch.Tensor, torch.Tensor] | None]  # positions and sums, if they can be used


@dataclass
class Words:
    """This rank's nonzero words of a message, and what it tells the others of them."""

    positions: torch.Tensor
    values: torch.Tensor
    own: Own

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """The words there, zeros among them."""
        found = torch.searchsorted(self.positions, positions).clamp_(max=max(0, len(self.positions) - 1))
        if not len(self.positions):
            return torch.zeros(len(positions), dtype=torch.int32)
        return torch.where(self.positions[found] == positions, self.values[found], 0)


class Summed:
    """`sums`: what adds the words up, of `world` ranks."""

    def __init__(self, mean: Mean, sums: WordSums, world: int):
        self.mean, self.sums, self.world = mean, sums, world
        self.repairs = 0  # exchanges of words that were left
        self._agreed: dict[Hashable, Agreed] = {}  # by message: DDP changes its buckets after the first step
        for recipe in mean.recipes.values():
            if recipe.sums:
                grid.by_largest(127, _converter(recipe.codec).bits, world)  # a SpecError if they are too many

    def job(
        self, key: Hashable, parts: Sequence[Part], missing: Collection[str], present: Callable[[Part], bool],
        touch: Callable[[Part], None],
    ) -> Job:  # fmt: skip
        """The parts, all of one recipe, become means. `present`: whether a part is not zero; `touch` hears of means."""
        message = _Message(self.mean, parts)
        if not message.words:
            return
        # Where all that is not zero is sent, nothing is of a gradient that is.
        given = [part.name not in missing and (message.top is None or present(part)) for part in parts]
        agreed = self._agreed.get((key, message.layout))
        if agreed is None:
            agreed = self._first(key, message, given)
        while agreed is not None:
            start = time.perf_counter()
            used = agreed.grid()
            plan = agreed.plan(message.words, message.lanes, zlib.crc32(f"{key} {self.mean.steps}".encode()))
            words = message.encode(given, used)
            self.mean.encode_s += time.perf_counter() - start
            exchange = self._aligned if _in_two_rounds(message, plan) else self._sketched
            found = yield from exchange(agreed, plan, message, words)
            if found is not None:
                agreed.learn_union(code.blocks(found[0], message.words))
                message.put(*found, used, self.world)
                break
            if agreed.largest == NOT_FINITE:
                message.spoil()
                break
        for part in parts:
            touch(part)

    def _sketched(self, agreed: Agreed, plan: Plan, message: _Message, words: Words) -> Exchange:
        """Index and sketch go out together."""
        start = time.perf_counter()
        index, sketch = code.encode(plan, words.positions, words.values)
        told, added = torch.cat([words.own.ored(), index]), torch.cat([words.own.added(message.print), sketch])
        self.mean.encode_s += time.perf_counter() - start
        ored, added = yield from self._added_up(told, added)
        if not agreed.take(ored, added, message.print):
            return None
        start = time.perf_counter()
        decoded = code.decode(plan, ored[EXPONENT_WORDS:], added[ADDED_WORDS:])
        self.mean.decode_s += time.perf_counter() - start
        if not decoded.consistent:
            raise AggregateError("index and sketch do not belong together: the sum of the ranks was damaged")
        return self._complete(decoded, words)

    def _aligned(self, agreed: Agreed, plan: Plan, message: _Message, words: Words) -> Exchange:
        """The index first; then all ranks know the union, and add up its words as they are."""
        start = time.perf_counter()
        told = torch.cat([words.own.ored(), code.index_of(plan, words.positions)])
        self.mean.encode_s += time.perf_counter() - start
        ored, added = yield from self._added_up(told, words.own.added(message.print))
        if not agreed.take(ored, added, message.print):
            return None
        start = time.perf_counter()
        try:
            everywhere, own = code.align(plan, ored[EXPONENT_WORDS:], words.positions, words.values)
        except GradwireError as error:
            raise AggregateError(f"the sum of the ranks was damaged: {error}") from error
        self.mean.encode_s += time.perf_counter() - start
        _, added = yield from self._added_up(told[:0], own)
        here = added != 0
        return (everywhere, added) if bool(here.all()) else (everywhere[here], added[here])

    def _added_up(
        self, or_words: torch.Tensor, add_words: torch.Tensor
    ) -> Generator[Pause, None, tuple[torch.Tensor, torch.Tensor]]:
        if not len(or_words) + len(add_words):
            return or_words, add_words
        self.mean.frame_bytes += or_words.nbytes + add_words.nbytes
        ticket = self.sums.start(or_words, add_words)
        yield Pause(None)
        return self.sums.finish(ticket)

    def _first(self, key: Hashable, message: _Message, given: Sequence[bool]) -> Agreed | None:
        """Ask before the first step what every other one tells; None if that is not finite."""
        agreed = Agreed(self.world, message.converter.bits, bool(message.recipe.decay))
        own, counts = message.survey(given)
        ored, added = self.sums.finish(
            self.sums.start(own.ored(), torch.cat([own.added(message.print), counts_as_words(counts)]))
        )
        agreed.take(ored, added, message.print)
        if agreed.largest == NOT_FINITE:
            message.spoil()
            return None
        agreed.unions.append(counts_from_words(added[ADDED_WORDS:].tolist()))
        self._agreed[key, message.layout] = agreed
        return agreed

    def _complete(self, decoded: code.Decoded, words: Words) -> tuple[torch.Tensor, torch.Tensor]:
        """With what could not be peeled, which all ranks know alike."""
        if not len(decoded.left):
            return decoded.positions, decoded.values
        self.repairs += 1
        own = words.at(decoded.left)
        self.mean.frame_bytes += own.nbytes
        _, added = self.sums.finish(self.sums.start(torch.empty(0, dtype=torch.int32), own))
        here = added != 0  # the others were false positives
        positions, order = torch.cat([decoded.positions, decoded.left[here]]).sort()
        return positions, torch.cat([decoded.values, added[here]])[order]


class _Message:
    """Parts that travel together, as words."""

    def __init__(self, mean: Mean, parts: Sequence[Part]):
        self.mean, self.parts = mean, parts
        self.recipe = mean.own_recipe(parts[0])
        self.converter = _converter(self.recipe.codec)
        self.top = None if self.converter.p is None else TopK(self.converter.p)
        self.layout = fingerprint([Piece(self.recipe, self.recipe.codec, list(parts))])
        self.print = self.layout ^ mean.steps & 0xFFFFFFFF
        per_word = 32 // self.converter.bits
        ends = np.cumsum([-(-part.size // per_word) for part in parts])
        self.edges = [0, *ends.tolist()]
        self.words = self.edges[-1]

    @property
    def lanes(self) -> Sequence[int]:
        """Of blocks. The largest entries are few, however they lie; how many blocks they fill varies."""
        return LANES if self.top is None else LANES[:1]

    def encode(self, given: Sequence[bool], used: Grid) -> Words:
        own = Own()
        positions, values = [], []
        for part, start, here in zip(self.parts, self.edges, given, strict=False):
            if here:
                at, words = self._encode_part(part, *self._sources(part), used, own)
                positions.append(at + start)
                values.append(words)
        if own.exponent == NOT_FINITE or not positions:
            return Words(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int32), own)
        return Words(torch.cat(positions), torch.cat(values), own)

    def _encode_part(
        self, part: Part, gradient: torch.Tensor, before: torch.Tensor | None, after: torch.Tensor | None, used: Grid,
        own: Own,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        # A mean beyond the range of the tensor's dtype would be infinite: what is beyond it waits, too.
        most = int(min(used.most, torch.finfo(part.tensor.dtype).max / used.step))
        seed = None
        if self.converter.stochastic:
            seed = (self.mean.steps << 32) + zlib.crc32(f"{self.mean.rank}:{part.key}".encode())
        if self.top is None or part.tensor.numel() < WHOLE:
            at, words, exponent, squares = kernels.quantize_all(
                gradient, before, after, self.recipe.decay, used.step, most, used.bits, seed
            )
            own.add(exponent, squares, int(gradient.count_nonzero()) if used.bits < 32 else part.size)
            self._measure(part, gradient, before, after)
            return at, words
        try:
            at, chosen = self.top.select(Source(gradient, gradient, before, after, self.recipe.decay))
        except NonFinite:
            own.add(NOT_FINITE, 0.0, 0)
            return torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int32)
        if used.bits == 32:
            words, sent = kernels.quantize_values(chosen, used.step, most, seed)
            own.add(exponent_of(float(chosen.abs().max())) if len(chosen) else 0, 0.0, 0)
            if after is not None:
                kernels.scatter(after, at, -sent, True)
        else:  # neighbours share words
            alone, sent = torch.zeros_like(gradient), torch.zeros_like(gradient)
            kernels.scatter(alone, at, chosen, True)
            entries = len(at)
            at, words, exponent, squares = kernels.quantize_all(
                alone, None, None, 1.0, used.step, most, used.bits, seed
            )
            own.add(exponent, squares, entries)
            if after is not None:
                kernels.put_words(sent, at, words, used.bits, used.step)
                after.sub_(sent)
        self._measure(part, gradient, before, after)
        return at, words

    def _sources(self, part: Part) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        gradient = part.entries.reshape(-1).float()
        if not self.recipe.decay:
            return gradient, None, None
        before, after = self.mean.residual.buffers(part.name, part.tensor)
        return gradient, part.of(before).view(-1), part.of(after).view(-1)

    def survey(self, given: Sequence[bool]) -> tuple[Own, dict[int, int]]:
        """What the ranks have to know of this one before they send anything."""
        own, counts = Own(), dict.fromkeys(LANES, 0)
        for part, start, here in zip(self.parts, self.edges, given, strict=False):
            if not here:
                continue
            gradient, before, _ = self._sources(part)
            u = kernels.compensate(gradient, before, self.recipe.decay) if before is not None else gradient
            own.add(exponent_of(kernels.absmax(gradient)), 0.0, 0)  # u is limited to finite numbers
            own.add(exponent_of(kernels.absmax(u)), float(u.double().square().sum()), int(u.count_nonzero()))
            if self.top is not None and part.tensor.numel() >= WHOLE:
                most = self.top.count(part.size) or part.size
                counts = {lanes: count + most for lanes, count in counts.items()}
            else:
                at = torch.nonzero(gradient).flatten() // (32 // self.converter.bits)
                here_too = code.blocks(at.unique_consecutive() + start, self.words)
                counts = {lanes: count + here_too[lanes] for lanes, count in counts.items()}
        return own, counts

    def _measure(
        self, part: Part, gradient: torch.Tensor, before: torch.Tensor | None, after: torch.Tensor | None
    ) -> None:
        """The error of what is sent, which the error memory holds."""
        if self.mean.measured is None or before is None or after is None:
            return
        wanted = gradient + self.recipe.decay * before
        squared, norm = float(after.double().square().sum()), float(wanted.double().square().sum())
        self.mean.measured.setdefault(part.name, Error()).add(squared, norm, 0)

    def spoil(self) -> None:
        """A rank had a NaN or an infinity: all have, and nobody's memory counts."""
        self.mean.finite = False
        for part in self.parts:
            part.entries.fill_(float("nan"))

    def put(self, positions: torch.Tensor, values: torch.Tensor, used: Grid, world: int) -> None:
        start = time.perf_counter()
        cuts = torch.searchsorted(positions, torch.tensor(self.edges)).tolist()
        for i, part in enumerate(self.parts):
            own = part.entries
            out = own.view(-1) if own.dtype == torch.float32 else torch.empty(part.size)
            out.zero_()
            at = slice(cuts[i], cuts[i + 1])
            kernels.put_words(out, positions[at] - self.edges[i], values[at], used.bits, used.step / world)
            if own.dtype != torch.float32:
                own.copy_(out.view(own.shape))
        self.mean.decode_s += time.perf_counter() - start


def _in_two_rounds(message: _Message, plan: Plan) -> bool:
    """The sum of aligned words is shorter than a sketch, and need not be peeled; but it takes one more round trip."""
    rounds = message.recipe.values["rounds"]
    return plan.index != "dense" and (plan.sketch_words >= WORTH_A_ROUND if rounds == "auto" else rounds == "2")


def _converter(codec: object) -> Homomorphic:
    converter = codec.converter  # type: ignore[attr-defined]
    assert isinstance(converter, Homomorphic)
    return converter


def exponent_of(largest: float) -> int:
    """Of a magnitude as fp32 has it: 0 for what is tiny, 255 for what is not finite."""
    return int(np.float32(largest).view(np.uint32)) >> 23
