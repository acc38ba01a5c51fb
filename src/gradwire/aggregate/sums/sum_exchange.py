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

import torch

from gradwire.aggregate.messages.mean import Mean
from gradwire.aggregate.messages.tensor_parts import Part
from gradwire.aggregate.sums.grid_agreement import (
    NOT_FINITE,
    Scale,
    Sizes,
    added_words,
    counts_as_words,
    counts_from_words,
    ored_words,
    summaries_from_words,
)
from gradwire.aggregate.sums.word_message import NO_POSITIONS, NO_WORDS, Message, Words, converter_of
from gradwire.aggregate.sums.word_sums import WordSums
from gradwire.aggregate.transport.exchange_thread import Exchange, Pause
from gradwire.errors import AggregateError, GradwireError
from gradwire.homomorphic import code, grid
from gradwire.homomorphic.plan import Plan

WORTH_A_ROUND = 2**14  # words of a sketch
USABLE, SPOILED, OFF_THE_GRID = "usable", "spoiled", "off the grid"  # words that all ranks sent
Found = tuple[torch.Tensor, torch.Tensor]  # positions, and the sums there
NOTHING: Found = (NO_POSITIONS, NO_WORDS)
WordExchange = Generator[Pause, None, tuple[str, Found]]


class Summed:
    """`sums`: what adds the words up, of `world` ranks."""

    def __init__(self, mean: Mean, sums: WordSums, world: int):
        self.mean, self.sums, self.world = mean, sums, world
        self.repairs = 0  # exchanges of words that were left
        self._scales: dict[str, Scale] = {}  # by part, so that a mean does not depend on what it travels with
        self._sizes: dict[Hashable, Sizes] = {}  # by message: DDP changes its buckets after the first step
        for recipe in mean.recipes.values():
            if recipe.sums:
                grid.by_largest(127, converter_of(recipe).bits, world)  # a SpecError if they are too many

    def job(
        self, key: Hashable, parts: Sequence[Part], missing: Collection[str], present: Callable[[Part], bool],
        touch: Callable[[Part], None],
    ) -> Exchange:  # fmt: skip
        """The parts, all of one recipe, become means. `present`: whether a part is not zero; `touch` hears of means."""
        message = Message(self.mean, parts)
        if not message.words:
            return
        # Where all that is not zero is sent, nothing is of a gradient that is.
        given = [part.name not in missing and (message.top is None or present(part)) for part in parts]
        if self._knows(key, message) or self._ask(key, message, given):
            yield from self._exchange(key, message, given)
        for part in parts:
            touch(part)

    def _exchange(self, key: Hashable, message: Message, given: Sequence[bool]) -> Exchange:
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

    def _sketched(self, plan: Plan, message: Message, words: Words) -> WordExchange:
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

    def _aligned(self, plan: Plan, message: Message, words: Words) -> WordExchange:
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
        _, added = yield from self._added_up(NO_WORDS, own)
        here = added != 0
        return outcome, (everywhere, added) if bool(here.all()) else (everywhere[here], added[here])

    def _listen(self, message: Message, ored: torch.Tensor, added: torch.Tensor) -> str:
        """What all ranks told of the parts, for the next step; and whether their words can be used."""
        told = summaries_from_words(ored, added, len(message.parts), self.world, message.print)
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

    def _knows(self, key: Hashable, message: Message) -> bool:
        return (key, message.layout) in self._sizes and all(part.key in self._scales for part in message.parts)

    def _ask(self, key: Hashable, message: Message, given: Sequence[bool]) -> bool:
        """Before the first step: what every other one tells. False if that is not finite."""
        message.settle([])
        told, counts = message.survey(given)
        ticket = self.sums.start(
            ored_words(told), torch.cat([added_words(told, message.print), counts_as_words(counts)])
        )
        ored, added = self.sums.finish(ticket)
        everyone = summaries_from_words(ored, added, len(message.parts), self.world, message.print)
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

    def _complete(self, decoded: code.Decoded, words: Words) -> Found:
        """With what could not be peeled, which all ranks know alike."""
        if not len(decoded.left):
            return decoded.positions, decoded.values
        self.repairs += 1
        own = words.at(decoded.left)
        self.mean.frame_bytes += own.nbytes
        _, added = self.sums.finish(self.sums.start(NO_WORDS, own))
        here = added != 0  # the others were false positives
        positions, order = torch.cat([decoded.positions, decoded.left[here]]).sort()
        return positions, torch.cat([decoded.values, added[here]])[order]


def _in_two_rounds(message: Message, plan: Plan) -> bool:
    """The sum of aligned words is shorter than a sketch, and need not be peeled; but it takes one more round trip."""
    rounds = message.recipe.values["rounds"]
    return plan.index != "dense" and (plan.sketch_words >= WORTH_A_ROUND if rounds == "auto" else rounds == "2")
