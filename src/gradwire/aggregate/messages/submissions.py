"""Tensors that the training has submitted, as messages: several small submissions in one, large tensors in several."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import torch

from gradwire import gpu
from gradwire.aggregate.messages.known_plans import KnownPlans
from gradwire.aggregate.messages.model_recipes import ModelRecipes
from gradwire.aggregate.messages.tensor_parts import NamedTensors, TensorPart, split_into_messages
from gradwire.catalogue.recipe import Recipe

# Entries that are gathered before they are sent, where messages are long: a GPU takes as long for a short message as
# for one of so many. The first one of a step is sent sooner, so that the link has something to do.
ENOUGH, ENOUGH_TO_BEGIN = 2**24, 2**22


class Submissions:
    """What was submitted in a step and is not yet on its way; and how that was cut into messages in the last step.

    The training's thread calls everything. Messages are the same on all ranks: they depend on names, sizes and dtypes.
    """

    def __init__(self, recipes: ModelRecipes, known: KnownPlans):
        self._recipes, self._known = recipes, known
        self._long, self._has_begun = False, False
        # DDP makes other buckets after its first step. Whoever kept those of the first would hold them until the second
        # is over, beside the new ones: 4 bytes a parameter at the peak.
        self._in_first_step = True
        self._cut: dict[Hashable, tuple[Any, list[list[TensorPart]]]] = {}  # the messages of each key
        self._taken: set[Hashable] = set()  # keys of this step
        self.clear()

    def clear(self) -> None:
        """Forget what was submitted and is not yet on its way."""
        self._keys: list[Hashable] = []
        self._tensors: list[tuple[str, torch.Tensor]] = []
        self._ready: list[torch.cuda.Event] = []
        self._lasting, self._entries = True, 0

    def use_long_messages(self) -> None:
        """Make longer messages from the next step on; all ranks call it, or none."""
        self._long = True

    def add(self, key: Hashable, tensors: NamedTensors, ready: list[torch.cuda.Event], lasting: bool) -> None:
        """Add tensors that hold their values when all of `ready` have come."""
        self._keys.append(key)
        self._tensors += tensors
        self._ready += ready
        self._lasting &= lasting
        self._entries += sum(tensor.numel() for _, tensor in tensors)

    @property
    def suffice(self) -> bool:
        """Whether what there is should be sent now."""
        return not self._long or self._entries >= (ENOUGH if self._has_begun else ENOUGH_TO_BEGIN)

    def take(self) -> list[tuple[Hashable, list[TensorPart], list[torch.cuda.Event]]]:
        """Return key, parts and events of each message of what was submitted, which is forgotten."""
        if not self._keys:
            return []
        key, ready = tuple(self._keys), self._ready
        messages = self._known_messages(key) if self._lasting and not self._in_first_step else list(self._messages())
        self.clear()
        self._has_begun = True
        return [((key, i), parts, ready) for i, parts in enumerate(messages)]

    def _known_messages(self, key: Hashable) -> list[list[TensorPart]]:
        """Return the parts of each message; the same lists as in the last step, if all tensors lie where they did.

        They then are the same memory, since the parts have kept it.
        """
        places = [(name, t.data_ptr(), t.shape, t.stride(), t.dtype, t.device) for name, t in self._tensors]
        now = places, self._recipes.generation, self._long
        self._taken.add(key)
        known = self._cut.get(key)
        if known is None or known[0] != now:
            known = self._cut[key] = now, list(self._messages())
            self._known.expect(key, known[1])
        return known[1]

    def _messages(self) -> Iterator[list[TensorPart]]:
        """Yield the parts of each message.

        Tensors that are added up on their way travel with their like alone, and so do those that a GPU has kernels for:
        by their recipe and dtype, not by where they are, since messages are the same on all ranks.
        """
        groups: dict[tuple[Recipe | None, bool], list[tuple[str, torch.Tensor]]] = {}
        for name, tensor in self._tensors:
            recipe = self._recipes.of_tensor(name, tensor.numel())
            if tensor.numel():
                on_gpus = gpu.has_kernels(recipe.codec.converter, tensor.dtype)
                groups.setdefault((recipe if recipe.sums else None, on_gpus), []).append((name, tensor))
        for group in groups.values():
            yield from split_into_messages(group, self._recipes.by_pattern, self._long)

    def end_step(self) -> None:
        """Let go of what did not come in this step."""
        for key in self._cut.keys() - self._taken:
            del self._cut[key]
            self._known.expect(key, ())
        self._taken.clear()
        self._has_begun = self._in_first_step = False
