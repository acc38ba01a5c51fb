"""The mean of gradients whose words are added up on their way (docs/homomorphic.md).

1. encode: u = g + γe, all of it or its largest entries, on the common grid; index and sketch of its words;
2. index and sketch are ORed and added up, over a process group or by an aggregator;
3. peel: every rank recovers the same integer sums; words that are left are added up as they are;
4. learn: exponents, root mean squares and the union give grid and sizes of the next step.

Long messages have their index ORed first; then all ranks know the union, and add up its words without a sketch.
"""

from __future__ import annotations

import zlib
from collections.abc import Generator, Hashable, Mapping, Sequence
from typing import Any

import torch

from gradwire.aggregate.messages.message_coder import MessageCoder
from gradwire.aggregate.messages.step_tensors import StepTensors
from gradwire.aggregate.messages.tensor_parts import TensorPart
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
from gradwire.aggregate.sums.word_message import NO_POSITIONS, NO_WORDS, WordMessage, Words, converter_of
from gradwire.aggregate.sums.word_sums import WordSums
from gradwire.aggregate.transport.exchange_thread import Exchange, Pause
from gradwire.checkpoints.saved_values import mapping_in
from gradwire.errors import AggregateError, GradwireError
from gradwire.homomorphic import code, grid
from gradwire.homomorphic.plan import Plan

WORTH_A_ROUND = 2**14  # words of a sketch
USABLE, SPOILED, OFF_THE_GRID = "usable", "spoiled", "off the grid"  # words that all ranks sent
Summed = tuple[torch.Tensor, torch.Tensor]  # positions, and the sums there
NOTHING: Summed = (NO_POSITIONS, NO_WORDS)
SummedLater = Generator[Pause, None, tuple[str, Summed]]


class SumExchange:
    """Averages tensors whose words are added up on their way by `sums`: a process group, or an aggregator.

    What ranks learn of each other in a step (grids and sizes) serves the next one; it is the same on all ranks, since
    all of them learn it from the same sums. It runs in the exchange thread.
    """

    def __init__(self, coder: MessageCoder, sums: WordSums, tensors: StepTensors):
        self.coder, self.sums, self.tensors = coder, sums, tensors
        self.world = coder.world
        self.repairs = 0  # exchanges of words that were left
        self._scales: dict[str, Scale] = {}  # by part, so that a mean does not depend on what it travels with
        self._sizes: dict[Hashable, Sizes] = {}  # by message: DDP changes its buckets after the first step
        for recipe in coder.recipes.by_pattern.values():
            if recipe.sums:
                grid.by_largest(127, converter_of(recipe).bits, self.world)  # a SpecError if they are too many

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank sent beside the link, to an aggregator."""
        return self.sums.bytes_sent

    @property
    def bytes_received(self) -> int:
        """Bytes that this rank received beside the link, from an aggregator."""
        return self.sums.bytes_received

    def close(self) -> None:
        """Leave the aggregator, if there is one."""
        self.sums.close()

    def run(self, key: Hashable, parts: Sequence[TensorPart]) -> Exchange:
        """Replace the parts, all of one recipe, by their means."""
        message = WordMessage(self.coder, parts)
        if not message.words:
            return
        # Where all entries that are not zero are sent, a gradient of zeros sends nothing anyway.
        present = [self._is_present(part, message) for part in parts]
        if self._knows(key, message) or self._ask(key, message, present):
            yield from self._exchange(key, message, present)
        for part in parts:
            self.tensors.note_mean(part)

    def _is_present(self, part: TensorPart, message: WordMessage) -> bool:
        return not self.tensors.is_missing(part) and (message.top is None or self.tensors.has_gradient(part))

    def _exchange(self, key: Hashable, message: WordMessage, present: Sequence[bool]) -> Exchange:
        """Exchange the words, again on coarser grids while an entry is beyond one and cannot wait."""
        ledger, sizes = self.coder.ledger, self._sizes[key, message.layout]
        outcome = OFF_THE_GRID
        while outcome == OFF_THE_GRID:
            with ledger.encoding():
                scales = [self._scales[part.key] for part in message.parts]
                grids = [scale.grid(message.converter.bits, self.world, message.limits) for scale in scales]
                message.settle(scales)
                most, seed = message.most_words(self.world), zlib.crc32(f"{key} {ledger.steps}".encode())
                plan = sizes.plan(message.words, message.lanes, most, seed)
                words = message.encode(present, grids)
            exchange = self._sketched
            if _in_two_rounds(message, plan):
                plan = sizes.index_plan(message.words, message.lanes, most, seed)
                exchange = self._sketched if plan.index == "dense" else self._aligned
            outcome, summed = yield from exchange(plan, message, words)
        if outcome == SPOILED:
            message.spoil()
            return
        sizes.learn(code.blocks(summed[0], message.words))
        with ledger.decoding():
            message.put(*summed, grids, self.world)

    def _sketched(self, plan: Plan, message: WordMessage, words: Words) -> SummedLater:
        """Send index and sketch together."""
        with self.coder.ledger.encoding():
            index, sketch = code.encode(plan, words.positions, words.values)
            to_or = _behind(ored_words(words.told), index)
            to_add = _behind(added_words(words.told, message.print), sketch)
        ored, added = yield from self._added_up(to_or, to_add)
        outcome = self._learn(message, ored, added)
        if outcome != USABLE:
            return outcome, NOTHING
        with self.coder.ledger.decoding():
            index, sketch = (t.to(message.device) for t in (ored[message.ored :], added[message.added :]))
            decoded = code.decode(plan, index, sketch)
        if not decoded.consistent:
            raise AggregateError("index and sketch do not belong together: the sum of the ranks was damaged")
        return outcome, self._complete(decoded, words)

    def _aligned(self, plan: Plan, message: WordMessage, words: Words) -> SummedLater:
        """Send the index first; then all ranks know the union, and add up its words without a sketch."""
        with self.coder.ledger.encoding():
            to_or = _behind(ored_words(words.told), code.index_of(plan, words.positions))
        ored, added = yield from self._added_up(to_or, added_words(words.told, message.print))
        outcome = self._learn(message, ored, added)
        if outcome != USABLE:
            return outcome, NOTHING
        with self.coder.ledger.encoding():
            try:
                index = ored[message.ored :].to(message.device)
                positions, aligned = code.align(plan, index, words.positions, words.values)
            except GradwireError as error:
                raise AggregateError(f"the sum of the ranks was damaged: {error}") from error
        _, sums = yield from self._added_up(NO_WORDS, aligned)
        sums = sums.to(message.device)
        nonzero = sums != 0
        return outcome, (positions, sums) if bool(nonzero.all()) else (positions[nonzero], sums[nonzero])

    def _learn(self, message: WordMessage, ored: torch.Tensor, added: torch.Tensor) -> str:
        """Learn for the next step what all ranks told of the parts; return whether their words can be used."""
        ored, added = ored[: message.ored].cpu(), added[: message.added].cpu()
        told = summaries_from_words(ored, added, len(message.parts), self.world, message.print)
        if any(part.exponent == NOT_FINITE for part in told):
            return SPOILED
        scales = [self._scales[part.key] for part in message.parts]
        limits = [scale.exponent(message.limits) for scale in scales]
        for scale, part in zip(scales, told, strict=True):
            scale.learn(part)
        beyond = any(part.exponent > limit for part, limit in zip(told, limits, strict=True))
        return OFF_THE_GRID if beyond and not message.limits else USABLE

    def _added_up(
        self, or_words: torch.Tensor, add_words: torch.Tensor
    ) -> Generator[Pause, None, tuple[torch.Tensor, torch.Tensor]]:
        """Return the OR and the sum of all ranks' words."""
        if not len(or_words) + len(add_words):
            return or_words, add_words
        self.coder.ledger.count_frame_bytes(or_words.nbytes + add_words.nbytes)
        ticket = self.sums.start(or_words, add_words)
        yield Pause(None)
        return self.sums.finish(ticket)

    def _knows(self, key: Hashable, message: WordMessage) -> bool:
        return (key, message.layout) in self._sizes and all(part.key in self._scales for part in message.parts)

    def _ask(self, key: Hashable, message: WordMessage, present: Sequence[bool]) -> bool:
        """Ask all ranks, before the first step, what every other step tells; return False if that is not finite."""
        message.settle([])
        told, counts = message.survey(present)
        ticket = self.sums.start(
            ored_words(told), torch.cat([added_words(told, message.print), counts_as_words(counts)])
        )
        ored, added = (t.cpu() for t in self.sums.finish(ticket))
        of_all_ranks = summaries_from_words(ored, added, len(message.parts), self.world, message.print)
        if any(part.exponent == NOT_FINITE for part in of_all_ranks):
            message.spoil()
            return False
        for part, summary in zip(message.parts, of_all_ranks, strict=True):
            if part.key not in self._scales:  # a checkpoint may have brought it
                self._scales[part.key] = Scale()
                self._scales[part.key].learn(summary)
        sizes = self._sizes[key, message.layout] = Sizes()
        sizes.guess(counts_from_words(added[message.added :].tolist()))
        return True

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the scales that the next step goes by, so that a resumed run is the same to the bit."""
        return {key: scale.saved() for key, scale in self._scales.items()}

    def read_state(self, state: Mapping[str, Any]) -> dict[str, Scale]:
        """Return the scales in a saved state of the exchange; CheckpointError if they are none."""
        return {key: Scale.loaded(saved) for key, saved in mapping_in(state, "grids").items()}

    def load(self, scales: dict[str, Scale]) -> None:
        """Go on with the scales of a checkpoint; sizes are asked for again."""
        self._scales = dict(scales)
        self._sizes.clear()

    def _complete(self, decoded: code.Decoded, words: Words) -> Summed:
        """Add up the words that could not be peeled as they are: all ranks know which they are."""
        if not len(decoded.left):
            return decoded.positions, decoded.values
        self.repairs += 1
        left = words.at(decoded.left)
        self.coder.ledger.count_frame_bytes(left.nbytes)
        _, sums = self.sums.finish(self.sums.start(NO_WORDS, left))
        sums = sums.to(left.device)
        nonzero = sums != 0  # the others were false positives of the index
        positions, order = torch.cat([decoded.positions, decoded.left[nonzero]]).sort()
        return positions, torch.cat([decoded.values, sums[nonzero]])[order]


def _behind(summaries: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Return words behind what ranks tell each other, where the words are."""
    return torch.cat([summaries.to(words.device), words])


def _in_two_rounds(message: WordMessage, plan: Plan) -> bool:
    """The sum of aligned words is shorter than a sketch, and need not be peeled; but it takes one more round trip."""
    rounds = message.recipe.values["rounds"]
    return plan.index != "dense" and (plan.sketch_words >= WORTH_A_ROUND if rounds == "auto" else rounds == "2")
