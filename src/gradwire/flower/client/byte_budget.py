"""A byte budget for one client's update: `within(limit, …)` is `update.encode` with a length that is never exceeded.

What does not fit is made coarser, by the first of these that does, its knob turned until real lengths come close:
1. the spec as it is; a budget never makes it finer;
2. sparse recipes: fewer entries. Dense ones with an error memory, from half a bit an entry on: `ecq`, the least error
   for its bytes, with the same error an entry in all tensors (reverse water-filling: those that have less wait);
3. the largest entries of all tensors together, as 4-bit floats: a single frame, down to one entry;
4. nothing: all of it waits in the error memory.
Each of them keeps the decay γ of the recipe that was given: sent + memory = d + γ·(memory before), tensor by tensor.

Recipes without a memory would lose what is left out, so they never come to 3 or 4: they get fewer levels, down to
three, or `ecq` rounded stochastically, which is right on average, down to where its noise would exceed the update.
What they take then, with integers and running statistics of batch normalization, is the least budget.
"""

from __future__ import annotations

import glob
import math
import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from fractions import Fraction

import torch

from gradwire import kernels
from gradwire.catalogue.spec_by_name import SMALL, Spec, parse_spec, recipe_of_tensor
from gradwire.errors import GradwireError, SpecError
from gradwire.flower.client import coarser_recipes
from gradwire.flower.client.fit_length import Point, closest
from gradwire.flower.shared.update import STATISTICS, Encoded, Tensors, encode, full_spec
from gradwire.kernels.reference import FLOAT_MAX

TARGET = 0.97  # of the budget is aimed at
DENSE = 0.5  # bits an entry, below which single entries are the better choice


def within(
    limit: int, differences: Tensors, values: Tensors, names: Sequence[str], spec: Spec, memory: Tensors | None = None,
    steps: int = 0, seed: int = 0, beside: int = 0,
) -> Encoded:  # fmt: skip
    """Table and frames of an update that take at most `limit` bytes together with `beside`, those of the message
    around it; all else as in `update.encode`."""
    given = encode(differences, values, names, spec, memory, steps, seed)
    if len(given.data) + beside <= limit:
        return given
    shorter = _TooLong(limit - beside, given, differences, values, names, spec, dict(memory or {}), steps, seed)
    try:
        return shorter.shorter()
    except _NotShorter as least:
        raise GradwireError(
            f"a budget of {limit} bytes is impossible: a reply takes at least {least.length + beside}, of which "
            f"{beside} are metrics and Flower's own bytes, and the rest is what may not wait: {least}. Raise the budget"
        ) from None


class _NotShorter(Exception):
    def __init__(self, length: int, why: str):
        super().__init__(why)
        self.length = length


class _TooLong:
    """An update that has to be made shorter."""

    def __init__(
        self, limit: int, given: Encoded, differences: Tensors, values: Tensors, names: Sequence[str], spec: Spec,
        memory: dict[str, torch.Tensor], steps: int, seed: int,
    ):  # fmt: skip
        self.limit, self.given, self.values, self.names = limit, given, values, names
        self.memory, self.steps, self.seed = memory, steps, seed
        self.spec = {pattern: str(r) for pattern, r in parse_spec(full_spec(spec)).items()}
        self.recipes = parse_spec(self.spec)
        self.own = {
            name: recipe_of_tensor(name, t.numel(), self.recipes) for name, t in differences.items() if t.numel()
        }
        self.waiting: dict[str, torch.Tensor] = {}  # u = d + γe of tensors with a memory
        self.lost: dict[str, torch.Tensor] = {}  # d of those without, which cannot wait
        for name, chosen in self.own.items():
            if not chosen.decay:
                self.lost[name] = differences[name]
                continue
            u = differences[name].detach().float().clone(memory_format=torch.contiguous_format)
            if name in memory:
                u.add_(memory[name], alpha=chosen.decay).clamp_(-FLOAT_MAX, FLOAT_MAX)
            if name in memory or kernels.absmax(u.view(-1)):
                self.waiting[name] = u

    def encode(self, spec: dict[str, str], waiting: Tensors) -> Encoded:
        # No memory: what waits is in u already, and what is left of u is the memory.
        return encode({**self.lost, **waiting}, self.values, self.names, spec, None, self.steps, self.seed)

    def shorter(self) -> Encoded:
        least = self.encode(self.spec, {})
        self.floor = len(least.data)
        if self.floor > self.limit:
            found = self._without_memory()
        else:
            found = self._with_memory() or least
        assert len(found.data) <= self.limit
        return Encoded(found.data, {**self.memory, **self.waiting, **found.memory})

    # ── what waits in the memory if it is not sent ──

    def _with_memory(self) -> Encoded | None:
        entries = sum(u.numel() for u in self.waiting.values())
        bits = 8 * TARGET * (self.limit - self.floor)
        if not entries or not bits:
            return None
        large = [self.own[name] for name, u in self.waiting.items() if u.numel() >= SMALL]
        if large and all(map(coarser_recipes.sparse, large)):
            found = self._sparser()
        else:
            found = self._water(bits) if bits >= DENSE * entries else None
        return found or self._largest(bits, entries)

    def _sparser(self) -> Encoded | None:
        def make(log_part: float) -> Encoded:
            part = math.exp(log_part)
            spec = {
                pattern: coarser_recipes.sparser(r, part, self.steps)
                if r.decay and coarser_recipes.sparse(r)
                else str(r)
                for pattern, r in self.recipes.items()
            }
            return self.encode(spec, self.waiting)

        given = self._log(len(self.given.data))
        return self._closest(make, self._log(TARGET * self.limit) - given, 1.0, self._log, (0.0, given))

    def _water(self, bits: float) -> Encoded | None:
        water = coarser_recipes.Water(self.waiting)

        def make(depth: float) -> Encoded:
            spec = water.spec(depth)
            filled = {name: u for name, u in self.waiting.items() if glob.escape(name) in spec}
            return self.encode({**spec, **self.spec}, filled)

        depth = water.depth_for(bits)
        return self._closest(make, depth, max(1, water.entries(depth)) / 8, float)

    def _largest(self, bits: float, entries: int) -> Encoded | None:
        def make(log_share: float) -> Encoded:
            chosen = coarser_recipes.largest(math.exp(log_share))
            return self.encode({**{glob.escape(name): chosen for name in self.waiting}, **self.spec}, self.waiting)

        first = math.log(coarser_recipes.share_for(bits, entries))
        return self._closest(make, first, 0.9, self._log, most=math.log(coarser_recipes.MOST_SHARE))

    # ── what would be lost ──

    def _without_memory(self) -> Encoded:
        def make(log_part: float) -> Encoded:
            part = math.exp(log_part)
            spec = {
                glob.escape(name): coarser_recipes.without_memory(self.own[name], part, self.steps)
                for name in self.lost
                if not _is_statistic(name)  # noise may make them negative
            }
            return self.encode({**spec, **self.spec}, {})

        least = make(-20.0)
        if len(least.data) > self.limit:
            raise _NotShorter(len(least.data), self._must_be_sent())
        self.floor = 0
        return self._closest(make, -1.0, 0.5, self._log, most=0.0) or least

    def _must_be_sent(self) -> str:
        forgetful = sorted({self.own[name].name for name in self.lost if not _is_statistic(name)})
        if not forgetful:
            return "integers, and running statistics of batch normalization"
        return f"tensors whose recipe ({', '.join(forgetful)}) keeps no error memory; co3, ecq and stc have one"

    # ── the search ──

    def _log(self, length: float) -> float:
        return math.log(max(1.0, length - self.floor))

    def _closest(
        self, make: Callable[[float], Encoded], x: float, slope: float, straight: Callable[[float], float],
        high: Point | None = None, most: float = math.inf,
    ) -> Encoded | None:  # fmt: skip
        target = self.floor + TARGET * (self.limit - self.floor)
        return closest(make, self.limit, target, x, slope, straight, high, most)


def _is_statistic(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in STATISTICS)


_UNITS = {"": 1, "B": 1, "kB": 1000, "MB": 1000**2, "GB": 1000**3, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}


def parse_bytes(text: str | float) -> int:
    """200_000 of "200kB", 204_800 of "200KiB"; a whole number is one of bytes."""
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,15})?)\s*([A-Za-z]*)\s*", str(text), re.ASCII)
    units = {unit.lower(): factor for unit, factor in _UNITS.items()}
    if isinstance(text, bool) or not match or match[2].lower() not in units:
        raise SpecError(
            f"{text!r} is not a number of bytes: write 200000, 200kB, 1.5MB (1000s) or 200KiB, 1MiB (1024s)"
        )
    count = Fraction(match[1]) * units[match[2].lower()]
    if count.denominator != 1:
        raise SpecError(f"{text!r} is {float(count):g} bytes: a budget is a whole number of them")
    return int(count)
