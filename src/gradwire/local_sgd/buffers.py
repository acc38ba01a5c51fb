"""Float buffers under LocalSGD: the mean of those that changed since the last sync.

Statistics of batch normalization change in every step. Masks, positions and other constants never do: they do not
travel, they keep every bit, and an infinity in them is none of our business. A rank's part of a message:
1. one bit for every float buffer, first buffer in the lowest bit: it changed here since the last sync;
2. one frame for all that changed and have the same recipe and dtype, laid end to end.
A buffer that changed on some ranks only counts with its old value for the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from gradwire import codecs
from gradwire.catalogue.all_recipes import recipe
from gradwire.catalogue.spec_by_name import Recipes, recipe_of_name
from gradwire.errors import FrameError, GradwireError, SpecError
from gradwire.frame import headers


class Buffers:
    def __init__(self, model: nn.Module, recipes: Recipes):
        self.model = model
        for pattern, chosen in recipes.items():
            if chosen.decay or chosen.mask:
                raise SpecError(f"buffer:{pattern}: {chosen} needs a memory, which buffers have not: use none or bf16")
        recipes = {**recipes, "*": recipes.get("*", recipe("bf16"))}
        self.common = {name: b.detach().clone() for name, b in self._now().items()}  # as of the last sync
        self._recipes = {name: recipe_of_name(name, recipes) for name in self.common}
        self._averaged: set[str] = set()

    def _now(self) -> dict[str, torch.Tensor]:
        return {name: b for name, b in self.model.named_buffers() if b.is_floating_point()}

    def changed(self) -> bool:
        """Whether any did, on this rank, since the last sync that had buffers."""
        now = self._now()
        return not all(_equal(now[name], old) for name, old in self.common.items())

    def encode(self, seed: int) -> tuple[bytes, int]:
        """This rank's part of the message, and how much of it is frames."""
        now = self._now()
        changed = [not _equal(now[name], old) for name, old in self.common.items()]
        mask = np.packbits(np.array(changed, dtype=bool), bitorder="little").tobytes()
        frames = b""
        for names in self._groups(changed):
            flat = torch.cat([now[name].reshape(-1) for name in names])
            frames += self._recipes[names[0]].codec.encode(flat, seed=seed)
        return mask + frames, len(frames)

    def _groups(self, changed: Sequence[bool]) -> list[list[str]]:
        groups: dict[tuple[str, torch.dtype], list[str]] = {}
        for (name, old), did in zip(self.common.items(), changed, strict=True):
            if did:
                groups.setdefault((str(self._recipes[name]), old.dtype), []).append(name)
        return list(groups.values())

    def decode(self, part: bytes) -> tuple[dict[str, torch.Tensor], bool]:
        """The buffers that a rank has changed, and whether all of them are finite."""
        width = -(-len(self.common) // 8)
        mask = np.unpackbits(np.frombuffer(part[:width], dtype=np.uint8), bitorder="little")
        if len(part) < width or mask[len(self.common) :].any():
            raise FrameError("damaged mask of buffers")
        groups = self._groups(mask[: len(self.common)].astype(bool).tolist())
        frames = headers.split(memoryview(part)[width:])
        if len(frames) != len(groups):
            raise FrameError(f"{len(frames)} frames of buffers, expected {len(groups)}")
        values: dict[str, torch.Tensor] = {}
        finite = True
        for names, frame in zip(groups, frames, strict=True):
            sizes = [self.common[name].numel() for name in names]
            header = headers.read_header(frame)
            if header.shape != (sum(sizes),):
                raise FrameError(f"a frame of shape {header.shape} for {sum(sizes)} entries of buffers")
            finite &= not header.nonfinite
            values.update(zip(names, codecs.decode(frame).split(sizes), strict=True))
        return values, finite

    def average(self, ranks: Sequence[dict[str, torch.Tensor]]) -> None:
        """The common buffers become the mean of what the ranks have, in rank order."""
        self._averaged.clear()
        for name, old in self.common.items():
            if any(name in values for values in ranks):
                self._averaged.add(name)
                wide = torch.promote_types(old.dtype, torch.float32)
                total = torch.zeros(old.shape, dtype=wide, device=old.device)
                for values in ranks:
                    total += values[name].view(old.shape).to(old.device, wide) if name in values else old.to(wide)
                old.copy_(total / len(ranks))

    def take(self, only_averaged: bool = False) -> None:
        """The model has the common buffers, or those that were averaged just now."""
        for name, buffer in self._now().items():
            if name in (self._averaged if only_averaged else self.common):
                buffer.copy_(self.common[name])

    def follow(self) -> None:
        """The common buffers are what the model has."""
        for name, buffer in self._now().items():
            if name in self.common:
                self.common[name].copy_(buffer)


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape:
        raise GradwireError(f"a buffer has become {tuple(a.shape)} from {tuple(b.shape)}: make a new LocalSGD then")
    return bool(((a == b) | (a.isnan() & b.isnan())).all())
