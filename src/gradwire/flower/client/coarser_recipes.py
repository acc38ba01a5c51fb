"""Recipes that take fewer bytes than a given one: the knobs that `byte_budget.py` turns."""

from __future__ import annotations

import glob
import math
from collections.abc import Iterator, Mapping

import torch

from gradwire.catalogue.all_recipes import DITHERED_RATE, recipe
from gradwire.catalogue.recipe import Recipe
from gradwire.catalogue.spec import Values
from gradwire.catalogue.spec_by_name import SMALL
from gradwire.convert.sparse import Sparse
from gradwire.errors import SpecError

ONE_BIT = ("bingrad", "signsgd", "terngrad")  # have nothing to turn
FINEST = 8.0  # bits an entry that ecq takes for granted where a recipe without memory is too long
LEAST_ERROR, MOST_ERROR = 1e-5, 0.99  # of what ecq takes as nmse
MOST_SHARE = 0.5  # of the entries
OVERHEAD = 40  # bytes of a frame beside its symbols


def sparse(chosen: Recipe) -> bool:
    """Whether it sends a part of the entries that can be made smaller."""
    return isinstance(chosen.codec.converter, Sparse)


def sparser(chosen: Recipe, part: float, steps: int) -> str:
    """The same with this part of the entries that it would send now; its warm-up is part of that."""
    changes: Values = {}
    if chosen.values.get("k", "none") != "none":
        changes["k"] = max(1, int(float(chosen.values["k"]) * part))
    else:
        now = chosen.at(steps).converter
        assert isinstance(now, Sparse)
        changes |= {"p": max(1e-15, float(f"{now.p * part:.4g}")), "warmup": 0}
    return _changed(chosen, changes)


def without_memory(chosen: Recipe, part: float, steps: int) -> str:
    """A coarser one for a recipe that forgets what it leaves out, and so may leave out nothing but by chance."""
    if sparse(chosen):
        return sparser(chosen, part, steps)
    if chosen.name in ONE_BIT:
        return str(chosen)
    if "levels" not in chosen.values:
        return f"ecq:rate={max(DITHERED_RATE, FINEST * part):.4g},rounding=stochastic,decay=0"
    levels = int(chosen.values["levels"])
    while levels > max(3, part * int(chosen.values["levels"])):
        levels = _next_fewer(chosen, levels)
    return _changed(chosen, {"levels": levels})


def _next_fewer(chosen: Recipe, levels: int) -> int:
    """The next number of levels that the recipe can have; all can have three."""
    for fewer in range(levels - 1, 2, -1):
        try:
            chosen.entry.parameters["levels"].parse(str(fewer))
        except SpecError:
            continue
        return fewer
    return 3


def _changed(chosen: Recipe, changes: Values) -> str:
    return str(recipe(chosen.entry.spell({**chosen.values, **changes})))


# ── of recipes with a memory, whatever they are ───────────────────────────────────────────────────


def largest(p: float) -> str:
    """The largest entries of all tensors together; fp4 values cost little more than signs, and lose next to nothing
    (docs/sparse.md)."""
    return f"topk:p={p:.4g},values=fp4,scope=model,small=same"


def share_for(bits: float, entries: int) -> float:
    """How many entries of a hundred fit about into so many bits: a position takes log₂(1/p) + 1.5, its value 3."""
    p = 1e-3
    for _ in range(20):
        p = min(max(bits / entries / (math.log2(1 / p) + 4.5), 1 / entries), MOST_SHARE)
    return p


class Water:
    """Reverse water-filling: the least squared error for its bits has the same error an entry in all tensors that
    have more than that, and nothing of the others is sent. Small tensors share a frame, and count as one."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]):
        self.names: list[list[str]] = [[name for name, t in tensors.items() if t.numel() < SMALL]]
        self.names += [[name] for name, t in tensors.items() if t.numel() >= SMALL]
        self.sizes = [sum(tensors[name].numel() for name in group) for group in self.names]
        self.powers = [
            sum(float(tensors[name].double().square().sum()) for name in group) / size if size else 0.0
            for group, size in zip(self.names, self.sizes, strict=True)
        ]

    def _filled(self, depth: float) -> Iterator[tuple[int, float]]:
        """(number, depth in bits) of what rises above an error of 4^−depth an entry."""
        for i, power in enumerate(self.powers):
            if power and (own := depth + math.log2(power) / 2) > 0:
                yield i, own

    def depth_for(self, total: float) -> float:
        """About where so many bits are used up."""
        logs = [-math.log2(power) / 2 for power in self.powers if power]
        low, high = min(logs, default=0.0), max(logs, default=0.0) + 16
        for _ in range(50):
            depth = (low + high) / 2
            bits = sum(self.sizes[i] * own + 8 * OVERHEAD for i, own in self._filled(depth))
            low, high = (depth, high) if bits <= total else (low, depth)
        return low

    def entries(self, depth: float) -> int:
        return sum(self.sizes[i] for i, _ in self._filled(depth))

    def spec(self, depth: float) -> dict[str, str]:
        """Recipes by name; tensors without one are left out."""
        return {
            glob.escape(name): f"ecq:nmse={min(max(4**-own, LEAST_ERROR), MOST_ERROR):.4g}"
            for i, own in self._filled(depth)
            for name in self.names[i]
        }
