"""How far decoded frames are from what they were made of: measured in some steps, for logs and for `auto`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from gradwire import codecs
from gradwire.aggregate.messages.frame_coding import MemorySlot
from gradwire.aggregate.messages.frame_plan import FramePlan
from gradwire.catalogue.spec_by_name import Recipes, parse_spec, recipe_of_tensor


class CodingError:
    """The squared error of what was sent, the squared norm of what was to be sent, and the bytes that it took."""

    def __init__(self) -> None:
        self.squared = self.norm = self.frame_bytes = 0.0

    def add(self, squared: float, norm: float, frame_bytes: float) -> None:
        """Add the figures of one more frame."""
        self.squared += squared
        self.norm += norm
        self.frame_bytes += frame_bytes


def nmse(errors: Iterable[CodingError]) -> float:
    """Return ‖u − û‖² / ‖u‖² over all of them together."""
    errors = list(errors)
    norm = sum(error.norm for error in errors)
    return sum(error.squared for error in errors) / norm if norm else 0.0


class ErrorProbe:
    """Measures the errors of one step, if it is asked to; otherwise it costs nothing.

    The training's thread calls `begin` before the first tensor of a step is submitted, and `take` when the step is
    over. The exchange thread calls `measure` and `add` in between.
    """

    def __init__(self) -> None:
        self._by_tensor: dict[str, CodingError] | None = None  # None while nothing is measured
        self._rivals: dict[str, tuple[Recipes, CodingError]] = {}

    @property
    def active(self) -> bool:
        """Whether the errors of the step under way are measured."""
        return self._by_tensor is not None

    @property
    def has_rivals(self) -> bool:
        """Whether other specs are measured, too, in the step under way; on all ranks alike."""
        return bool(self._rivals)

    def begin(self, rivals: Sequence[str] = ()) -> None:
        """Measure from now on; also what the errors would be with each of these other specs."""
        self._by_tensor = {}
        self._rivals = {spec: (parse_spec(spec), CodingError()) for spec in rivals}

    def take(self) -> tuple[dict[str, CodingError] | None, dict[str, float]]:
        """End measuring: the errors by tensor name (None if none were asked for), and each rival's relative error."""
        by_tensor, self._by_tensor = self._by_tensor, None
        rivals, self._rivals = self._rivals, {}
        return by_tensor, {spec: nmse([error]) for spec, (_, error) in rivals.items()}

    def add(self, name: str, squared: float, norm: float, frame_bytes: float) -> None:
        """Add the error of one part of a tensor, if errors are measured in this step."""
        if self._by_tensor is not None:
            self._by_tensor.setdefault(name, CodingError()).add(squared, norm, frame_bytes)

    def measure(
        self, plan: FramePlan, gradients: Sequence[torch.Tensor], memory: Sequence[MemorySlot], frame: torch.Tensor
    ) -> None:
        """Add the error of a frame against what was to be sent: the gradients plus the decayed error memory."""
        if self._by_tensor is None:
            return
        decoded = codecs.decode(frame).reshape(-1).float().split(plan.sizes)
        for i, (part, sent) in enumerate(zip(plan.parts, decoded, strict=True)):
            wanted = gradients[i].reshape(-1).float()
            if memory:
                wanted = wanted + plan.recipe.decay * memory[i].before.reshape(-1)
            norm = _squared_norm(wanted)
            self.add(part.name, _squared_norm(wanted - sent), norm, len(frame) * part.size / max(1, sum(plan.sizes)))
            for recipes, error in self._rivals.values():
                rival = recipe_of_tensor(part.name, part.tensor.numel(), recipes).codec.encode(
                    wanted.view(gradients[i].shape)
                )
                error.add(_squared_norm(wanted - codecs.decode(rival).view(-1)), norm, len(rival))

    def measure_memory(
        self, plan: FramePlan, gradients: Sequence[torch.Tensor], memory: Sequence[MemorySlot], length: int
    ) -> None:
        """Add the error of a frame of so many bytes that has stayed on a GPU: what it left in the error memory."""
        total = max(1, sum(plan.sizes))
        for part, gradient, slot in zip(plan.parts, gradients, memory, strict=True):
            wanted = gradient.float() + plan.recipe.decay * slot.factor * slot.before
            self.add(part.name, _squared_norm(slot.after), _squared_norm(wanted), length * part.size / total)


def _squared_norm(tensor: torch.Tensor) -> float:
    return float(tensor.double().square().sum())
