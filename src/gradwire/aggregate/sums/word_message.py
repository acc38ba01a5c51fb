"""Tensors that travel together, as words that can be added up: from gradients to words, and from sums to means."""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gradwire import kernels
from gradwire.aggregate.messages.mean import Mean
from gradwire.aggregate.messages.tensor_parts import Part, Piece, fingerprint
from gradwire.aggregate.sums.grid_agreement import EXPONENT_WORDS, NOT_FINITE, PartSummary, Scale
from gradwire.catalogue.recipe import Recipe
from gradwire.convert.conversion import Job, NonFinite
from gradwire.convert.homomorphic import WHOLE, Homomorphic
from gradwire.convert.topk import TopK
from gradwire.engine.log import Error
from gradwire.homomorphic import code
from gradwire.homomorphic.grid import Grid, exponent_of
from gradwire.homomorphic.plan import LANES

NO_POSITIONS, NO_WORDS = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int32)


@dataclass
class Words:
    """This rank's nonzero words of a message, and what it tells the others of each part."""

    positions: torch.Tensor
    values: torch.Tensor
    told: list[PartSummary]

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """The words there, zeros among them."""
        found = torch.searchsorted(self.positions, positions).clamp_(max=max(0, len(self.positions) - 1))
        if not len(self.positions):
            return torch.zeros(len(positions), dtype=torch.int32)
        return torch.where(self.positions[found] == positions, self.values[found], 0)


class Message:
    """Parts that travel together, as words."""

    def __init__(self, mean: Mean, parts: Sequence[Part]):
        self.mean, self.parts = mean, parts
        self.recipe = mean.own_recipe(parts[0])
        self.converter = converter_of(self.recipe)
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
        told: list[PartSummary] = []
        positions: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for part, start, here, grid_of_part in zip(self.parts, self.edges, given, used, strict=False):
            if here:
                at, words, own = self._encode_part(part, *self._sources(part), grid_of_part)
                positions.append(at + start)
                values.append(words)
            told.append(own if here else PartSummary())
        if not positions or any(part.exponent == NOT_FINITE for part in told):
            return Words(NO_POSITIONS, NO_WORDS, told)
        if len(positions) == 1:
            return Words(positions[0], values[0].clone(), told)  # kernels use their buffers again
        return Words(torch.cat(positions), torch.cat(values), told)

    def _encode_part(
        self, part: Part, gradient: torch.Tensor, before: torch.Tensor | None, after: torch.Tensor | None, used: Grid
    ) -> tuple[torch.Tensor, torch.Tensor, PartSummary]:
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
            return (
                at,
                words,
                PartSummary.of(exponent, squares, int(gradient.count_nonzero()) if used.bits < 32 else part.size),
            )
        try:
            at, chosen = self.top.select(Job(gradient, gradient, before, after, self.recipe.decay))
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

    def _sources(self, part: Part) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        gradient = part.entries.reshape(-1).float()
        if not self.recipe.decay:
            return gradient, None, None
        before, after = self.mean.residual.buffers(part.name, part.tensor)
        return gradient, part.of(before).view(-1), part.of(after).view(-1)

    def survey(self, given: Sequence[bool]) -> tuple[list[PartSummary], dict[int, int]]:
        """What the ranks have to know of this one before they send anything."""
        told, counts = [], dict.fromkeys(LANES, 0)
        for part, start, here in zip(self.parts, self.edges, given, strict=False):
            if not here:
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


def converter_of(recipe: Recipe) -> Homomorphic:
    converter = recipe.codec.converter
    assert isinstance(converter, Homomorphic)
    return converter
