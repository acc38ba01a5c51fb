"""A recipe: a codec, and how the training around it corrects what the codec leaves out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import torch

from gradwire.catalogue.spec import Entry, Values
from gradwire.codecs import Codec

MOST = 0.5  # of a tensor's entries are sent by a share of the model's budget


@dataclass(frozen=True)
class Recipe:
    """Two recipes with the same spec are equal."""

    spec: str
    codec: Codec = field(compare=False)
    entry: Entry = field(repr=False, compare=False)
    values: Values = field(repr=False, compare=False)
    small: Recipe | None = field(
        default=None, compare=False
    )  # that of tensors with few entries, where it is another one
    last: Recipe | None = field(
        default=None, compare=False
    )  # that of a last exchange, which sends more of what is left in the error memory

    def __str__(self) -> str:
        return self.spec

    @property
    def name(self) -> str:
        """The name of the recipe, without parameters."""
        return self.entry.name

    @property
    def decay(self) -> float:
        """Error memory decays by this factor each step; 0 means no memory."""
        return float(self.values.get("decay", 0))

    @property
    def mask(self) -> bool:
        """Whether momentum is accumulated by each worker, and cleared where it was sent."""
        return self.values.get("mask") == "on"

    @property
    def clip(self) -> float:
        """The largest norm of a worker's gradient; 0 for any."""
        return float(self.values.get("clip_norm", 0))

    @property
    def sums(self) -> bool:
        """Whether what workers send can be added up on its way, without being decoded."""
        return self.codec.converter.sums

    @property
    def in_adam_units(self) -> bool:
        """Whether gradients are exchanged in units of Adam's steps."""
        return self.values.get("units") == "on"

    # ── what to select ──

    @property
    def whole_model(self) -> bool:
        """Whether entries are selected over all tensors together."""
        return self.values.get("scope") == "model"

    @property
    def power(self) -> float:
        """A tensor of d entries gets a part of the model's budget in proportion to d^power."""
        return float(self.values.get("power", 1))

    def at(self, step: int, part: float = 1.0) -> Codec:
        """The codec of this step for a tensor with this part of the budget: p falls geometrically from `start` to
        its own value during warm-up, and nmse rises."""
        warmup = float(self.values.get("warmup", 0))
        if (step >= warmup and part == 1) or self.values.get("k", "none") != "none":
            return self.codec
        if "nmse" in self.values:
            done = step / warmup
            nmse = float(self.values["start"]) ** (1 - done) * float(self.values["nmse"]) ** done
            return _codec_with(self, "nmse", float(f"{nmse:.2g}"))
        p = float(self.values["p"])
        if step < warmup:
            done = step / warmup
            p = float(self.values["start"]) ** (1 - done) * p**done
        return _codec_with(self, "p", float(f"{min(p * part, MOST) if part != 1 else p:.3g}"))

    # ── communication delay ──

    @property
    def sync_every(self) -> int:
        """Local steps between exchanges."""
        return int(self.values.get("sync_every", 1))

    @property
    def sync_schedule(self) -> int | Callable[[int], int]:
        """`sync_every`, or less during warm-up."""
        warmup, every = int(self.values.get("warmup", 0)), self.sync_every
        at_first = min(every, int(self.values.get("warmup_sync", every)))
        return every if at_first == every or not warmup else lambda step: at_first if step <= warmup else every

    @property
    def buffers_every(self) -> int:
        """Buffers are averaged at every so manieth exchange."""
        return int(self.values.get("buffers", 1))

    @property
    def ahead(self) -> float:
        """The part of its unsent update that a worker keeps in its own parameters."""
        return float(self.values.get("ahead", 0))

    @property
    def flush(self) -> float:
        """The share of the entries that are sent when all is over; 0 for no last exchange."""
        return float(self.values.get("flush", 0))

    def outer(self, parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
        """The optimizer of the common parameters: plain averaging, or Nesterov momentum on the mean updates."""
        lr, momentum = float(self.values.get("outer_lr", 1)), float(self.values.get("outer_momentum", 0))
        return torch.optim.SGD(parameters, lr=lr, momentum=momentum, nesterov=momentum > 0)

    @property
    def delayed(self) -> str:
        """Why it takes LocalSGD rather than a hook; empty where a hook will do."""
        if self.sync_every > 1:
            return f"sends only every {self.sync_every} steps"
        if self.whole_model:
            return "selects over the whole model, and DDP hands over one bucket at a time (scope=tensor does not)"
        if self.ahead:
            return "keeps a part of what was not sent in each worker's own parameters (ahead=0 does not)"
        return "sends what is left at the end (flush=0 does not)" if self.flush else ""


@lru_cache(maxsize=1024)
def _codec_with(recipe: Recipe, key: str, value: float) -> Codec:
    return recipe.entry.codec({**recipe.values, key: value})


def budget_parts(sizes: Mapping[str, int], recipes: Mapping[str, Recipe]) -> dict[str, float]:
    """How many times its share by size each tensor gets of the entries that are sent; by default once.

    With k_t ∝ d_t^power and Σk_t = p·Σd_t, that is d_t^(power−1) · Σd / Σd^power.
    """
    parts: dict[str, float] = {}
    for recipe in set(recipes.values()):
        own = {name: sizes[name] for name, other in recipes.items() if other == recipe and sizes[name]}
        total, weight = sum(own.values()), sum(d**recipe.power for d in own.values())
        if recipe.power != 1:
            parts |= {name: d ** (recipe.power - 1) * total / weight for name, d in own.items()}
    return parts
