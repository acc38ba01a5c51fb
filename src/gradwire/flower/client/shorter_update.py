"""`ShorterUpdate`: an update that is too long for its budget, encoded by coarser recipes (see `byte_budget`)."""

from __future__ import annotations

import glob
import math
from collections.abc import Callable, Sequence

import torch

from gradwire import kernels
from gradwire.catalogue.spec_by_name import SMALL, Spec, parse_spec, recipe_of_tensor
from gradwire.flower.client import coarser_recipes
from gradwire.flower.client.fit_length import Point, longest_fitting
from gradwire.flower.shared import update
from gradwire.flower.shared.update import Encoded, Tensors

TARGET = 0.97  # the part of the budget that is aimed at
DENSE = 0.5  # bits per entry; with fewer, sending single entries is the better choice


class CannotShorten(Exception):
    """Even the shortest possible update, of `length` bytes, does not fit; the text names what must be sent."""

    def __init__(self, length: int, must_be_sent: str):
        super().__init__(must_be_sent)
        self.length = length


class ShorterUpdate:
    """The search for the longest encoding of an update that takes at most `limit` bytes.

    `unlimited` is the length under the spec as it is. Tensors with an error memory may wait in it; the others are
    made coarser only if what must be sent does not fit otherwise.
    """

    def __init__(
        self, limit: int, unlimited: int, differences: Tensors, values: Tensors, names: Sequence[str], spec: Spec,
        memory: dict[str, torch.Tensor], steps: int, seed: int,
    ):  # fmt: skip
        self.limit, self.unlimited, self.values, self.names = limit, unlimited, values, names
        self.memory, self.steps, self.seed = memory, steps, seed
        self.spec = {pattern: str(r) for pattern, r in parse_spec(update.full_spec(spec, names)).items()}
        self.recipes = parse_spec(self.spec)
        self.recipe_of = {
            name: recipe_of_tensor(name, t.numel(), self.recipes) for name, t in differences.items() if t.numel()
        }
        self.may_wait: dict[str, torch.Tensor] = {}  # u = d + γe of tensors with an error memory e
        self.must_go: dict[str, torch.Tensor] = {}  # d of tensors without one
        for name, recipe in self.recipe_of.items():
            if not recipe.decay:
                self.must_go[name] = differences[name]
                continue
            u = differences[name].detach().float().clone(memory_format=torch.contiguous_format)
            if name in memory:
                u.add_(memory[name], alpha=recipe.decay).clamp_(-kernels.FLOAT_MAX, kernels.FLOAT_MAX)
            if name in memory or kernels.absmax(u.view(-1)):
                self.may_wait[name] = u
        self.floor = 0  # bytes that every attempt has beside those that its setting changes

    def encode(self) -> Encoded:
        """Return the encoding, with the memory after it. Raises `CannotShorten`."""
        least = self._attempt(self.spec, {})
        if len(least.data) > self.limit:
            result = self._coarser_without_memory()
        else:
            self.floor = len(least.data)
            result = self._coarser_with_memory() or least
        assert len(result.data) <= self.limit
        return Encoded(result.data, {**self.memory, **self.may_wait, **result.memory})

    def _attempt(self, spec: dict[str, str], waiting: Tensors) -> Encoded:
        # Without a memory: u contains it already, and what the frames leave out of u is the memory afterwards.
        return update.encode({**self.must_go, **waiting}, self.values, self.names, spec, None, self.steps, self.seed)

    # ── tensors that may wait in their error memory ──

    def _coarser_with_memory(self) -> Encoded | None:
        entries = sum(u.numel() for u in self.may_wait.values())
        bits = 8 * TARGET * (self.limit - self.floor)
        if not entries or not bits:
            return None
        large = [self.recipe_of[name] for name, u in self.may_wait.items() if u.numel() >= SMALL]
        if large and all(map(coarser_recipes.is_sparse, large)):
            result = self._sparser()
        else:
            result = self._equal_error(bits) if bits >= DENSE * entries else None
        return result or self._largest_entries(bits, entries)

    def _sparser(self) -> Encoded | None:
        def attempt(log_part: float) -> Encoded:
            part = math.exp(log_part)
            spec = {
                pattern: coarser_recipes.sparser(r, part, self.steps)
                if r.decay and coarser_recipes.is_sparse(r)
                else str(r)
                for pattern, r in self.recipes.items()
            }
            return self._attempt(spec, self.may_wait)

        too_long = self._log(self.unlimited)
        return self._search(attempt, self._log(TARGET * self.limit) - too_long, 1.0, self._log, (0.0, too_long))

    def _equal_error(self, bits: float) -> Encoded | None:
        filling = coarser_recipes.ReverseWaterFilling(self.may_wait)

        def attempt(depth: float) -> Encoded:
            spec = filling.spec(depth)
            sent = {name: u for name, u in self.may_wait.items() if glob.escape(name) in spec}
            return self._attempt({**spec, **self.spec}, sent)

        depth = filling.depth_for(bits)
        return self._search(attempt, depth, max(1, filling.entries(depth)) / 8, float)

    def _largest_entries(self, bits: float, entries: int) -> Encoded | None:
        def attempt(log_share: float) -> Encoded:
            recipe = coarser_recipes.largest_entries(math.exp(log_share))
            spec = {**{glob.escape(name): recipe for name in self.may_wait}, **self.spec}
            return self._attempt(spec, self.may_wait)

        start = math.log(coarser_recipes.share_for(bits, entries))
        return self._search(attempt, start, 0.9, self._log, largest=math.log(coarser_recipes.LARGEST_SHARE))

    # ── tensors without an error memory ──

    def _coarser_without_memory(self) -> Encoded:
        def attempt(log_part: float) -> Encoded:
            part = math.exp(log_part)
            spec = {
                glob.escape(name): coarser_recipes.without_memory(self.recipe_of[name], part, self.steps)
                for name in self.must_go
                if not update.is_statistic(name)  # noise could make a variance negative
            }
            return self._attempt({**spec, **self.spec}, {})

        least = attempt(-20.0)
        if len(least.data) > self.limit:
            raise CannotShorten(len(least.data), self._must_be_sent())
        return self._search(attempt, -1.0, 0.5, self._log, largest=0.0) or least

    def _must_be_sent(self) -> str:
        without_memory = sorted({self.recipe_of[name].name for name in self.must_go if not update.is_statistic(name)})
        if not without_memory:
            return "integers, and running statistics of batch normalization"
        return f"tensors whose recipe ({', '.join(without_memory)}) keeps no error memory; co3, ecq and stc have one"

    # ── the search ──

    def _log(self, length: float) -> float:
        return math.log(max(1.0, length - self.floor))

    def _search(
        self, attempt: Callable[[float], Encoded], start: float, slope: float, linearize: Callable[[float], float],
        too_long: Point | None = None, largest: float = math.inf,
    ) -> Encoded | None:  # fmt: skip
        target = self.floor + TARGET * (self.limit - self.floor)
        return longest_fitting(attempt, self.limit, target, start, slope, linearize, too_long, largest)
