"""Recipes that take fewer bytes than another one, each with one setting that `shorter_update` adjusts."""

from __future__ import annotations

import glob
import math
from collections.abc import Iterator, Mapping

import torch

from gradwire.catalogue.dense_parameters import DITHERED_RATE
from gradwire.catalogue.parse_recipe import recipe
from gradwire.catalogue.recipe import Recipe
from gradwire.catalogue.spec import Values
from gradwire.catalogue.spec_by_name import SMALL
from gradwire.convert.sparse import Sparse
from gradwire.convert.sparseloco import LARGEST_CHUNK
from gradwire.errors import SpecError

FIXED_LEVELS = ("bingrad", "signsgd", "terngrad")  # nothing about them can be made coarser
FINEST = 8.0  # bits per entry of the ecq that takes the place of a recipe without a memory
LEAST_ERROR, MOST_ERROR = 1e-5, 0.99  # the range of ecq's parameter nmse
LARGEST_SHARE = 0.5  # of all entries
OVERHEAD = 40  # bytes of a frame beside its symbols


def is_sparse(chosen: Recipe) -> bool:
    """Whether the recipe sends a part of the entries, which can be made smaller."""
    return isinstance(chosen.codec.converter, Sparse)


def sparser(chosen: Recipe, part: float, steps: int) -> str:
    """Return the recipe with only this part of the entries that it would send after so many steps of its warm-up."""
    changes: Values = {}
    if "chunk" in chosen.values:
        changes["chunk"] = min(LARGEST_CHUNK, math.ceil(float(chosen.values["chunk"]) / part))
    elif chosen.values.get("k", "none") != "none":
        changes["k"] = max(1, int(float(chosen.values["k"]) * part))
    else:
        now = chosen.at(steps).converter
        assert isinstance(now, Sparse)
        changes |= {"p": max(1e-15, float(f"{now.p * part:.4g}")), "warmup": 0}
    return _changed(chosen, changes)


def without_memory(chosen: Recipe, part: float, steps: int) -> str:
    """Return a coarser recipe in place of one without an error memory, unbiased where the recipe is.

    `part` is the part of its entries, levels or bits that is left.
    """
    if is_sparse(chosen):
        return sparser(chosen, part, steps)
    if chosen.name in FIXED_LEVELS:
        return str(chosen)
    if "levels" not in chosen.values:
        return f"ecq:rate={max(DITHERED_RATE, FINEST * part):.4g},rounding=stochastic,decay=0"
    levels = int(chosen.values["levels"])
    while levels > max(3, part * int(chosen.values["levels"])):
        levels = _next_fewer(chosen, levels)
    return _changed(chosen, {"levels": levels})


def _next_fewer(chosen: Recipe, levels: int) -> int:
    """Return the next smaller number of levels that the recipe can have; every recipe can have three."""
    for fewer in range(levels - 1, 2, -1):
        try:
            chosen.entry.parameters["levels"].parse(str(fewer))
        except SpecError:
            continue
        return fewer
    return 3


def _changed(chosen: Recipe, changes: Values) -> str:
    return str(recipe(chosen.entry.spell({**chosen.values, **changes})))


# ── in place of any recipe with an error memory ───────────────────────────────────────────────────


def largest_entries(p: float) -> str:
    """Return the recipe that sends the part `p` of the entries, the largest of all tensors together.

    Values in fp4 cost little more than signs and lose next to nothing (docs/sparse.md).
    """
    return f"topk:p={p:.4g},values=fp4,scope=model,small=same"


def share_for(bits: float, entries: int) -> float:
    """Estimate the part p of the entries that fits into so many bits: a position takes log₂(1/p) + 1.5 bits, its value
    3."""
    p = 1e-3
    for _ in range(20):
        p = min(max(bits / entries / (math.log2(1 / p) + 4.5), 1 / entries), LARGEST_SHARE)
    return p


class ReverseWaterFilling:
    """How to spread bits over tensors so that the sum of squared errors is least.

    All tensors whose mean square is above the water level get the same error per entry, the level itself; of the others
    nothing is sent. The level is 4^−depth, so that one more unit of depth is one more bit for each entry that is sent.
    Small tensors share a frame, and count as one.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]):
        self.names: list[list[str]] = [[name for name, t in tensors.items() if t.numel() < SMALL]]
        self.names += [[name] for name, t in tensors.items() if t.numel() >= SMALL]
        self.sizes = [sum(tensors[name].numel() for name in group) for group in self.names]
        self.powers = [
            sum(float(tensors[name].double().square().sum()) for name in group) / size if size else 0.0
            for group, size in zip(self.names, self.sizes, strict=True)
        ]

    def _above_level(self, depth: float) -> Iterator[tuple[int, float]]:
        """Yield the index of each group of tensors above the water level, and its bits per entry."""
        for i, power in enumerate(self.powers):
            if power and (bits := depth + math.log2(power) / 2) > 0:
                yield i, bits

    def depth_for(self, total: float) -> float:
        """Estimate the depth at which this number of bits is used up."""
        logs = [-math.log2(power) / 2 for power in self.powers if power]
        low, high = min(logs, default=0.0), max(logs, default=0.0) + 16
        for _ in range(50):
            depth = (low + high) / 2
            needed = sum(self.sizes[i] * bits + 8 * OVERHEAD for i, bits in self._above_level(depth))
            low, high = (depth, high) if needed <= total else (low, depth)
        return low

    def entries(self, depth: float) -> int:
        """Return how many entries are sent at this depth."""
        return sum(self.sizes[i] for i, _ in self._above_level(depth))

    def spec(self, depth: float) -> dict[str, str]:
        """Return the recipes by (escaped) name of tensor; tensors that have none are not sent."""
        return {
            glob.escape(name): f"ecq:nmse={min(max(4**-bits, LEAST_ERROR), MOST_ERROR):.4g}"
            for i, bits in self._above_level(depth)
            for name in self.names[i]
        }
