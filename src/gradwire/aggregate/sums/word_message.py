"""Tensors that travel together, as words that can be added up: from gradients to words, and from sums to means."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gradwire import kernels
from gradwire.aggregate.messages.frame_coding import frame_seed
from gradwire.aggregate.messages.frame_plan import FramePlan, fingerprint
from gradwire.aggregate.messages.message_coder import MessageCoder
from gradwire.aggregate.messages.tensor_parts import TensorPart
from gradwire.aggregate.sums.grid_agreement import EXPONENT_WORDS, NOT_FINITE, PartSummary, Scale
from gradwire.catalogue.recipe import Recipe
from gradwire.convert.conversion import Conversion, NonFinite
from gradwire.convert.homomorphic import WHOLE, Homomorphic
from gradwire.convert.topk import TopK
from gradwire.homomorphic import code
from gradwire.homomorphic.grid import Grid, exponent_of
from gradwire.homomorphic.plan import LANES

NO_POSITIONS = torch.empty(0, dtype=torch.int64, device="cpu")
NO_WORDS = torch.empty(0, dtype=torch.int32, device="cpu")


@dataclass
class Words:
    """The nonzero words of this rank's message with their positions, and what it tells the others about each part."""

    positions: torch.Tensor
    values: torch.Tensor
    told: list[PartSummary]

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """Return this rank's words at the given positions; zeros where it has none."""
        nearest = torch.searchsorted(self.positions, positions).clamp_(max=max(0, len(self.positions) - 1))
        if not len(self.positions):
            return torch.zeros(len(positions), dtype=torch.int32, device=positions.device)
        return torch.where(self.positions[nearest] == positions, self.values[nearest], 0)


class WordMessage:
    """Parts of tensors that travel together, as words that can be added up.

    It lives for one exchange of one message, in the thread that runs it.
    """

    def __init__(self, coder: MessageCoder, parts: Sequence[TensorPart]):
        self.coder, self.parts = coder, parts
        self.device = parts[0].tensor.device  # where words are made, and become means again
        self.recipe = coder.recipes.of_part(parts[0])
        self.converter = converter_of(self.recipe)
        self.top = None if self.converter.p is None else TopK(self.converter.p)
        self.limits = bool(self.recipe.decay)  # what is beyond a grid waits in an error memory
        self.layout = fingerprint([FramePlan(self.recipe, self.recipe.codec, list(parts))])
        self.print = 0
        self.ored, self.added = EXPONENT_WORDS * len(parts), 1 + 2 * len(parts)  # words in front of index and sketch
        per_word = 32 // self.converter.bits
        ends = np.cumsum([-(-part.size // per_word) for part in parts])
        self.edges = [0, *ends.tolist()]
        self.words = self.edges[-1]

    @property
    def lanes(self) -> Sequence[int]:
        """The block sizes to choose from: one alone for selected entries, since how many blocks they fill varies."""
        return LANES if self.top is None else LANES[:1]

    def most_words(self, world: int) -> int | None:
        """Return the most words that the union of all ranks can have; None where not only a few are selected."""
        if self.top is None:
            return None
        most = 0
        for part, start, end in zip(self.parts, self.edges, self.edges[1:], strict=False):
            selected = self.top.count(part.size) if part.tensor.numel() >= WHOLE else None
            most += end - start if selected is None else min(end - start, world * selected)
        return most

    def settle(self, scales: Sequence[Scale]) -> None:
        """Fix the fingerprint of what is sent: it depends on the layout, the step and the grids."""
        text = f"{self.layout} {self.coder.ledger.steps} {[scale.saved().tolist() for scale in scales]}"
        self.print = zlib.crc32(text.encode())

    def encode(self, present: Sequence[bool], grids: Sequence[Grid]) -> Words:
        """Return the words of the parts that are present, each on its grid, and update their error memories."""
        told: list[PartSummary] = []
        positions: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for part, start, is_present, grid in zip(self.parts, self.edges, present, grids, strict=False):
            summary = PartSummary()
            if is_present:
                at, words, summary = self._encode_part(part, *self._sources(part), grid)
                positions.append((at + start).to(self.device))
                values.append(words.to(self.device))
            told.append(summary)
        if not positions or any(part.exponent == NOT_FINITE for part in told):
            return Words(NO_POSITIONS.to(self.device), NO_WORDS.to(self.device), told)
        if len(positions) == 1:
            return Words(positions[0], values[0].clone(), told)  # kernels use their buffers again
        return Words(torch.cat(positions), torch.cat(values), told)

    def _encode_part(
        self, part: TensorPart, gradient: torch.Tensor, before: torch.Tensor | None, after: torch.Tensor | None,
        used: Grid,
    ) -> tuple[torch.Tensor, torch.Tensor, PartSummary]:  # fmt: skip
        # A mean beyond the range of the tensor's dtype would be infinite: what is beyond it waits, too.
        most = int(min(used.most, torch.finfo(part.tensor.dtype).max / used.step))
        seed = None
        if self.converter.stochastic:
            seed = frame_seed(self.coder.ledger.steps, str(self.coder.rank), part.key)
        if self.top is None or part.tensor.numel() < WHOLE:
            at, words, exponent, squares = kernels.quantize_all(
                gradient, before, after, self.recipe.decay, used.step, most, used.bits, seed
            )
            self._measure(part, gradient, before, after)
            return (
                at,
                words,
                PartSummary.of(exponent, squares, int(gradient.count_nonzero()) if used.bits < 32 else part.size),
            )
        try:
            at, chosen = self.top.select(Conversion(gradient, gradient, before, after, self.recipe.decay))
        except NonFinite:
            return NO_POSITIONS, NO_WORDS, PartSummary.of(NOT_FINITE)
        if used.bits == 32:
            words, sent = kernels.quantize_values(chosen, used.step, most, seed)
            told = PartSummary.of(exponent_of(float(chosen.abs().max())) if len(chosen) else 0)
            if after is not None:
                kernels.scatter(after, at, -sent, True)
        else:  # neighbours share words
            alone, sent = torch.zeros_like(gradient), torch.zeros_like(gradient)
            kernels.scatter(alone, at, chosen, True)
            entries = len(at)
            at, words, exponent, squares = kernels.quantize_all(
                alone, None, None, 1.0, used.step, most, used.bits, seed
            )
            told = PartSummary.of(exponent, squares, entries)
            if after is not None:
                kernels.put_words(sent, at, words, used.bits, used.step)
                after.sub_(sent)
        self._measure(part, gradient, before, after)
        return at, words, told

    def _sources(self, part: TensorPart) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        gradient = part.entries.reshape(-1).float()
        if not self.recipe.decay:
            return gradient, None, None
        before, after = self.coder.memories.errors.buffers(part.name, part.tensor)
        return gradient, part.of(before).view(-1), part.of(after).view(-1)

    def survey(self, present: Sequence[bool]) -> tuple[list[PartSummary], dict[int, int]]:
        """Return what the other ranks have to know of this one before anything is sent for the first time.

        That is the largest exponent and the mean square of each part, and how many blocks of each size are not zero.
        """
        told, counts = [], dict.fromkeys(LANES, 0)
        for part, start, is_present in zip(self.parts, self.edges, present, strict=False):
            if not is_present:
                told.append(PartSummary())
                continue
            gradient, before, _ = self._sources(part)
            u = kernels.compensate(gradient, before, self.recipe.decay) if before is not None else gradient
            exponents = (exponent_of(kernels.absmax(t)) for t in (gradient, u))  # u is limited to finite numbers
            told.append(PartSummary.of(max(exponents), float(u.double().square().sum()), int(u.count_nonzero())))
            if self.top is not None and part.tensor.numel() >= WHOLE:
                most = self.top.count(part.size) or part.size
                counts = {lanes: count + most for lanes, count in counts.items()}
            else:
                at = torch.nonzero(gradient).flatten() // (32 // self.converter.bits)
                blocks = code.blocks(at.unique_consecutive() + start, self.words)
                counts = {lanes: count + blocks[lanes] for lanes, count in counts.items()}
        return told, counts

    def _measure(
        self, part: TensorPart, gradient: torch.Tensor, before: torch.Tensor | None, after: torch.Tensor | None
    ) -> None:
        """Measure the error of what is sent: the error memory holds it."""
        if not self.coder.probe.active or before is None or after is None:
            return
        wanted = gradient + self.recipe.decay * before
        squared, norm = float(after.double().square().sum()), float(wanted.double().square().sum())
        self.coder.probe.add(part.name, squared, norm, 0)

    def spoil(self) -> None:
        """Fill the parts with NaN, because a rank had a NaN or an infinity: all ranks see it, and roll back."""
        self.coder.ledger.note_finite(False)
        for part in self.parts:
            part.entries.fill_(float("nan"))

    def put(self, positions: torch.Tensor, sums: torch.Tensor, grids: Sequence[Grid], world: int) -> None:
        """Replace the parts by the means of `world` ranks, from the positions and values of their summed words."""
        edges = torch.tensor(self.edges, dtype=torch.int64, device=positions.device)
        cuts = torch.searchsorted(positions, edges).tolist()
        for i, part in enumerate(self.parts):
            entries = part.entries
            is_fp32 = entries.dtype == torch.float32
            out = entries.view(-1) if is_fp32 else torch.empty(part.size, dtype=torch.float32, device=entries.device)
            out.zero_()
            within, edge = slice(cuts[i], cuts[i + 1]), self.edges[i]
            at = positions[within] - edge if edge else positions[within]
            words = sums[within].to(out.device)
            kernels.put_words(out, at.to(out.device), words, grids[i].bits, grids[i].step / world)
            if not is_fp32:
                entries.copy_(out.view(entries.shape))


def converter_of(recipe: Recipe) -> Homomorphic:
    """Return the converter of a recipe whose words can be added up."""
    converter = recipe.codec.converter
    assert isinstance(converter, Homomorphic)
    return converter
