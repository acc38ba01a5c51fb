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
from collections.abc import Callable, Collection, Generator, Hashable, Mapping, Sequence
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
from .agreement import (
    EXPONENT_WORDS,
    NOT_FINITE,
    Scale,
    Sizes,
    Told,
    added_words,
    counts_as_words,
    counts_from_words,
    heard,
    ored_words,
)  # fmt: skip
from .mean import Mean
from .pieces import Part, Piece, fingerprint
from .wire_thread import Job, Pause
from .word_sums import WordSums

WORTH_A_ROUND = 2**14  # words of a sketch
USABLE, SPOILED, OFF_THE_GRID = "usable", "spoiled", "off the grid"  # words that all ranks sent
NO_POSITIONS, NO_WORDS = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int32)
Found = tuple[torch.Tensor, torch.Tensor]  # positions, and the sums there
NOTHING: Found = (NO_POSITIONS, NO_WORDS)
Exchange = Generator[Pause, None, tuple[str, Found]]


@dataclass
class Words:
    """This rank's nonzero words of a message, and what it tells the others of each part."""

    positions: torch.Tensor
    values: torch.Tensor
    told: list[Told]

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
        self._scales: dict[str, Scale] = {}  # by part, so that a mean does not depend on what it travels with
        self._sizes: dict[Hashable, Sizes] = {}  # by message: DDP changes its buckets after the first step
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
        if self._knows(key, message) or self._ask(key, message, given):
            yield from self._exchange(key, message, given)
        for part in parts:
            touch(part)

    def _exchange(self, key: Hashable, message: _Message, given: Sequence[bool]) -> Job:
        sizes = self._sizes[key, message.layout]
        while True:
            start = time.perf_counter()
            scales = [self._scales[part.key] for part in message.parts]
            used = [scale.grid(message.converter.bits, self.world, message.limits) for scale in scales]
            message.settle(scales)
            most, seed = message.most_words(self.world), zlib.crc32(f"{key} {self.mean.steps}".encode())
            plan = sizes.plan(message.words, message.lanes, most, seed)
            words = message.encode(given, used)
            self.mean.encode_s += time.perf_counter() - start
            way = self._sketched
            if _in_two_rounds(message, plan):
                plan = sizes.index_plan(message.words, message.lanes, most, seed)
                way = self._sketched if plan.index == "dense" else self._aligned
            outcome, found = yield from way(plan, message, words)
            if outcome == SPOILED:
                message.spoil()
            elif outcome == USABLE:
                sizes.learn(code.blocks(found[0], message.words))
                message.put(*found, used, self.world)
            if outcome != OFF_THE_GRID:
                break

    def _sketched(self, plan: Plan, message: _Message, words: Words) -> Exchange:
        """Index and sketch go out together."""
        start = time.perf_counter()
        index, sketch = code.encode(plan, words.positions, words.values)
        told = torch.cat([ored_words(words.told), index]), torch.cat([added_words(words.told, message.print), sketch])
        self.mean.encode_s += time.perf_counter() - start
        ored, added = yield from self._added_up(*told)
        outcome = self._listen(message, ored, added)
        if outcome != USABLE:
            return outcome, NOTHING
        start = time.perf_counter()
        decoded = code.decode(plan, ored[message.ored :], added[message.added :])
        self.mean.decode_s += time.perf_counter() - start
        if not decoded.consistent:
            raise AggregateError("index and sketch do not belong together: the sum of the ranks was damaged")
        return outcome, self._complete(decoded, words)

    def _aligned(self, plan: Plan, message: _Message, words: Words) -> Exchange:
        """The index first; then all ranks know the union, and add up its words as they are."""
        start = time.perf_counter()
        told = torch.cat([ored_words(words.told), code.index_of(plan, words.positions)])
        self.mean.encode_s += time.perf_counter() - start
        ored, added = yield from self._added_up(told, added_words(words.told, message.print))
        outcome = self._listen(message, ored, added)
        if outcome != USABLE:
            return outcome, NOTHING
        start = time.perf_counter()
        try:
            everywhere, own = code.align(plan, ored[message.ored :], words.positions, words.values)
        except GradwireError as error:
            raise AggregateError(f"the sum of the ranks was damaged: {error}") from error
        self.mean.encode_s += time.perf_counter() - start
        _, added = yield from self._added_up(told[:0], own)
        here = added != 0
        return outcome, (everywhere, added) if bool(here.all()) else (everywhere[here], added[here])

    def _listen(self, message: _Message, ored: torch.Tensor, added: torch.Tensor) -> str:
        """What all ranks told of the parts, for the next step; and whether their words can be used."""
        told = heard(ored, added, len(message.parts), self.world, message.print)
        if any(part.exponent == NOT_FINITE for part in told):
            return SPOILED
        scales = [self._scales[part.key] for part in message.parts]
        held = [scale.exponent(message.limits) for scale in scales]
        for scale, part in zip(scales, told, strict=True):
            scale.learn(part)
        beyond = any(part.exponent > most for part, most in zip(told, held, strict=True))
        return OFF_THE_GRID if beyond and not message.limits else USABLE

    def _added_up(
        self, or_words: torch.Tensor, add_words: torch.Tensor
    ) -> Generator[Pause, None, tuple[torch.Tensor, torch.Tensor]]:
        if not len(or_words) + len(add_words):
            return or_words, add_words
        self.mean.frame_bytes += or_words.nbytes + add_words.nbytes
        ticket = self.sums.start(or_words, add_words)
        yield Pause(None)
        return self.sums.finish(ticket)

    def _knows(self, key: Hashable, message: _Message) -> bool:
        return (key, message.layout) in self._sizes and all(part.key in self._scales for part in message.parts)

    def _ask(self, key: Hashable, message: _Message, given: Sequence[bool]) -> bool:
        """Before the first step: what every other one tells. False if that is not finite."""
        message.settle([])
        told, counts = message.survey(given)
        ticket = self.sums.start(
            ored_words(told), torch.cat([added_words(told, message.print), counts_as_words(counts)])
        )
        ored, added = self.sums.finish(ticket)
        everyone = heard(ored, added, len(message.parts), self.world, message.print)
        if any(part.exponent == NOT_FINITE for part in everyone):
            message.spoil()
            return False
        for part, told_of_it in zip(message.parts, everyone, strict=True):
            if part.key not in self._scales:  # a checkpoint may have brought it
                self._scales[part.key] = Scale()
                self._scales[part.key].learn(told_of_it)
        sizes = self._sizes[key, message.layout] = Sizes()
        sizes.unions.append(counts_from_words(added[message.added :].tolist()))
        return True

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The scales that the next step goes by, so that a resumed run is the same to the bit."""
        return {key: scale.saved() for key, scale in self._scales.items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        self._scales = {key: Scale.loaded(saved) for key, saved in state.items()}
        self._sizes.clear()

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
        self.limits = bool(self.recipe.decay)  # what is beyond a grid waits in an error memory
        self.layout = fingerprint([Piece(self.recipe, self.recipe.codec, list(parts))])
        self.print = 0
        self.ored, self.added = EXPONENT_WORDS * len(parts), 1 + 2 * len(parts)  # words in front of index and sketch
        per_word = 32 // self.converter.bits
        ends = np.cumsum([-(-part.size // per_word) for part in parts])
        self.edges = [0, *ends.tolist()]
        self.words = self.edges[-1]

    @property
    def lanes(self) -> Sequence[int]:
        """Of blocks. The largest entries are few, however they lie; how many blocks they fill varies."""
        return LANES if self.top is None else LANES[:1]

    def most_words(self, world: int) -> int | None:
        """That a union can have, where each rank selects a few."""
        if self.top is None:
            return None
        most = 0
        for part, start, end in zip(self.parts, self.edges, self.edges[1:], strict=False):
            selected = self.top.count(part.size) if part.tensor.numel() >= WHOLE else None
            most += end - start if selected is None else min(end - start, world * selected)
        return most

    def settle(self, scales: Sequence[Scale]) -> None:
        """What is sent is told apart from all else by its layout, the step and the grids."""
        text = f"{self.layout} {self.mean.steps} {[scale.saved().tolist() for scale in scales]}"
        self.print = zlib.crc32(text.encode())

    def encode(self, given: Sequence[bool], used: Sequence[Grid]) -> Words:
        told: list[Told] = []
        positions: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for part, start, here, grid_of_part in zip(self.parts, self.edges, given, used, strict=False):
            if here:
                at, words, own = self._encode_part(part, *self._sources(part), grid_of_part)
                positions.append(at + start)
                values.append(words)
            told.append(own if here else Told())
        if not positions or any(part.exponent == NOT_FINITE for part in told):
            return Words(NO_POSITIONS, NO_WORDS, told)
        if len(positions) == 1:
            return Words(positions[0], values[0].clone(), told)  # kernels use their buffers again
        return Words(torch.cat(positions), torch.cat(values), told)

    def _encode_part(
        self, part: Part, gradient: torch.Tensor, before: torch.Tensor | None, after: torch.Tensor | None, used: Grid
    ) -> tuple[torch.Tensor, torch.Tensor, Told]:
        # A mean beyond the range of the tensor's dtype would be infinite: what is beyond it waits, too.
        most = int(min(used.most, torch.finfo(part.tensor.dtype).max / used.step))
        seed = None
        if self.converter.stochastic:
            seed = (self.mean.steps << 32) + zlib.crc32(f"{self.mean.rank}:{part.key}".encode())
        if self.top is None or part.tensor.numel() < WHOLE:
            at, words, exponent, squares = kernels.quantize_all(
                gradient, before, after, self.recipe.decay, used.step, most, used.bits, seed
            )
            self._measure(part, gradient, before, after)
            return at, words, Told.of(exponent, squares, int(gradient.count_nonzero()) if used.bits < 32 else part.size)
        try:
            at, chosen = self.top.select(Source(gradient, gradient, before, after, self.recipe.decay))
        except NonFinite:
            return NO_POSITIONS, NO_WORDS, Told.of(NOT_FINITE)
        if used.bits == 32:
            words, sent = kernels.quantize_values(chosen, used.step, most, seed)
            told = Told.of(exponent_of(float(chosen.abs().max())) if len(chosen) else 0)
            if after is not None:
                kernels.scatter(after, at, -sent, True)
        else:  # neighbours share words
            alone, sent = torch.zeros_like(gradient), torch.zeros_like(gradient)
            kernels.scatter(alone, at, chosen, True)
            entries = len(at)
            at, words, exponent, squares = kernels.quantize_all(
                alone, None, None, 1.0, used.step, most, used.bits, seed
            )
            told = Told.of(exponent, squares, entries)
            if after is not None:
                kernels.put_words(sent, at, words, used.bits, used.step)
                after.sub_(sent)
        self._measure(part, gradient, before, after)
        return at, words, told

    def _sources(self, part: Part) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        gradient = part.entries.reshape(-1).float()
        if not self.recipe.decay:
            return gradient, None, None
        before, after = self.mean.residual.buffers(part.name, part.tensor)
        return gradient, part.of(before).view(-1), part.of(after).view(-1)

    def survey(self, given: Sequence[bool]) -> tuple[list[Told], dict[int, int]]:
        """What the ranks have to know of this one before they send anything."""
        told, counts = [], dict.fromkeys(LANES, 0)
        for part, start, here in zip(self.parts, self.edges, given, strict=False):
            if not here:
                told.append(Told())
                continue
            gradient, before, _ = self._sources(part)
            u = kernels.compensate(gradient, before, self.recipe.decay) if before is not None else gradient
            exponents = (exponent_of(kernels.absmax(t)) for t in (gradient, u))  # u is limited to finite numbers
            told.append(Told.of(max(exponents), float(u.double().square().sum()), int(u.count_nonzero())))
            if self.top is not None and part.tensor.numel() >= WHOLE:
                most = self.top.count(part.size) or part.size
                counts = {lanes: count + most for lanes, count in counts.items()}
            else:
                at = torch.nonzero(gradient).flatten() // (32 // self.converter.bits)
                here_too = code.blocks(at.unique_consecutive() + start, self.words)
                counts = {lanes: count + here_too[lanes] for lanes, count in counts.items()}
        return told, counts

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

    def put(self, positions: torch.Tensor, values: torch.Tensor, used: Sequence[Grid], world: int) -> None:
        start = time.perf_counter()
        cuts = torch.searchsorted(positions, torch.tensor(self.edges)).tolist()
        for i, part in enumerate(self.parts):
            own = part.entries
            out = own.view(-1) if own.dtype == torch.float32 else torch.empty(part.size)
            out.zero_()
            at, edge = slice(cuts[i], cuts[i + 1]), self.edges[i]
            places = positions[at] - edge if edge else positions[at]
            kernels.put_words(out, places, values[at], used[i].bits, used[i].step / world)
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
