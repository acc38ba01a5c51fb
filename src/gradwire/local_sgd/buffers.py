"""Float buffers under LocalSGD: ranks average those that changed since the last sync.

Statistics of batch normalization change in every step. Masks, positions and other constants never change: they are not
sent, keep every bit, and may hold infinities. A rank's part of a message is:

1. one bit for every float buffer, the first buffer in the lowest bit: whether it changed on this rank;
2. one frame for each recipe and dtype, with all such buffers that changed, laid end to end.

If a buffer changed on some ranks only, the others enter the mean with its old value.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch
from torch import nn

from gradwire import codecs
from gradwire.catalogue.parse_recipe import recipe
from gradwire.catalogue.spec_by_name import Recipes, recipe_of_name, warn_of_idle_patterns
from gradwire.correct.complex_pairs import as_reals
from gradwire.errors import FrameError, GradwireError, SpecError
from gradwire.frame import headers


class Buffers:
    """The float buffers of a model, and their values after the last sync, which all ranks share (`common`).

    `encode` and `decode` leave everything as it is. `average` and `follow` change `common`, and `take` changes the
    model; nothing is sent here. All ranks have to call `average` with the same arguments, so that `common` stays the
    same on all of them. One thread uses it, that of the training. Complex buffers are pairs of reals here, and integer
    buffers are left alone.
    """

    def __init__(self, model: nn.Module, recipes: Recipes, of_parameters: Recipes):
        """`recipes` are those that the user has chosen for buffers, by pattern.

        What they do not match travels as it is where a parameter of its name would, and otherwise as bf16.
        """
        self.model = model
        for pattern, chosen in recipes.items():
            if chosen.decay or chosen.mask:
                raise SpecError(f"buffer:{pattern}: {chosen} needs a memory, which buffers have not: use none or bf16")
        warn_of_idle_patterns(recipes, self._float_buffers(), "float buffer")
        self.common = {name: b.detach().clone() for name, b in self._float_buffers().items()}
        others = {p: r if r.name == "none" else recipe("bf16") for p, r in of_parameters.items() if p not in recipes}
        by_pattern = {**recipes, **others}
        by_pattern.setdefault("*", recipe("bf16"))
        self._recipes = {name: recipe_of_name(name, by_pattern) for name in self.common}
        self.averaged: set[str] = set()  # names of those that the last `average` changed

    def _float_buffers(self) -> dict[str, torch.Tensor]:
        return {name: as_reals(b) for name, b in self.model.named_buffers() if has_real_entries(b)}

    def changed(self) -> bool:
        """Whether any buffer changed on this rank since the last sync that averaged buffers."""
        current = self._float_buffers()
        return not all(_equal(current[name], old) for name, old in self.common.items())

    def encode(self, seed: int) -> tuple[bytes, int]:
        """Return this rank's part of the message, and how many bytes of it are frames."""
        current = self._float_buffers()
        changed = [not _equal(current[name], old) for name, old in self.common.items()]
        mask = np.packbits(np.array(changed, dtype=bool), bitorder="little").tobytes()
        frames = b""
        for names in self._groups(changed):
            flat = torch.cat([current[name].reshape(-1) for name in names])
            frames += self._recipes[names[0]].codec.encode(flat, seed=seed)
        return mask + frames, len(frames)

    def _groups(self, changed: Sequence[bool]) -> list[list[str]]:
        """Return the names of the buffers that changed, those of one frame together."""
        groups: dict[tuple[str, torch.dtype], list[str]] = {}
        for (name, old), has_changed in zip(self.common.items(), changed, strict=True):
            if has_changed:
                groups.setdefault((str(self._recipes[name]), old.dtype), []).append(name)
        return list(groups.values())

    def decode(self, part: bytes) -> tuple[dict[str, torch.Tensor], bool]:
        """Return the buffers that changed on a rank, flat, and whether all of them are finite.

        Raises a FrameError if the bytes are damaged, or hold other buffers than this model has.
        """
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
            values.update(zip(names, torch.split(codecs.decode(frame), sizes), strict=True))
        return values, finite

    def average(self, ranks: Sequence[dict[str, torch.Tensor]]) -> None:
        """Set `common` to the mean over ranks. `ranks` has what `decode` returned for each of them, in rank order."""
        self.averaged.clear()
        for name, old in self.common.items():
            if any(name in values for values in ranks):
                self.averaged.add(name)
                wide = torch.promote_types(old.dtype, torch.float32)
                total = torch.zeros(old.shape, dtype=wide, device=old.device)
                for values in ranks:
                    total += values[name].view(old.shape).to(old.device, wide) if name in values else old.to(wide)
                old.copy_(total / len(ranks))

    def take(self, names: Collection[str] | None = None) -> None:
        """Copy `common` into the model: all buffers, or only these."""
        for name, buffer in self._float_buffers().items():
            if name in (self.common if names is None else names):
                buffer.copy_(self.common[name])

    def load(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Take over the common buffers of a checkpoint, which has all of them."""
        for name, buffer in saved.items():
            self.common[name].copy_(buffer)

    def follow(self) -> None:
        """Copy the model's buffers into `common`, when all ranks are known to have the same model."""
        for name, buffer in self._float_buffers().items():
            if name in self.common:
                self.common[name].copy_(buffer)


def has_real_entries(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor has entries that can be averaged: floats, or complex numbers, which are pairs of them."""
    return tensor.is_floating_point() or tensor.is_complex()


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape:
        raise GradwireError(f"a buffer has become {tuple(a.shape)} from {tuple(b.shape)}: make a new LocalSGD then")
    return bool(((a == b) | (a.isnan() & b.isnan())).all())
