"""Which gradients take part in a step: those that this rank has, and those that any rank has sent."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from gradwire.aggregate.messages import present_tensors
from gradwire.aggregate.messages.tensor_parts import TensorPart
from gradwire.correct.worker_memories import WorkerMemories


class StepTensors:
    """The presence of tensors in the step under way.

    A gradient that is zero everywhere, or missing, is not sent, and its error memory waits. With several ranks on a
    host that send together (`shared_host`), a gradient that is missing on this rank may exist on another one.
    Missing tensors are declared by the training's thread before they are submitted; the rest is for the thread that
    runs exchanges.
    """

    def __init__(self, memories: WorkerMemories, shared_host: bool = False):
        self._memories, self._shared_host = memories, shared_host
        self._missing: set[str] = set()
        self._touched: set[str] = set()

    def declare_missing(self, names: Collection[str]) -> None:
        """Take note of tensors that have no gradient on this rank, and are zero."""
        self._missing.update(names)

    def is_missing(self, part: TensorPart) -> bool:
        """Return whether neither this rank, nor any that sends together with it, can have a gradient of the part."""
        return part.name in self._missing and not self._shared_host

    def has_gradient(self, part: TensorPart) -> bool:
        """Return whether the part is sent; if not, its error memory stays as it is."""
        return self.which_have_gradients([part], lambda parts: [present_tensors.is_zero(p.entries) for p in parts])[0]

    def which_have_gradients(
        self, parts: Sequence[TensorPart], which_are_zero: Callable[[Sequence[TensorPart]], list[bool]]
    ) -> list[bool]:
        """Return for each part whether it is sent; error memories of those that are not stay as they are."""
        present = [not self.is_missing(part) for part in parts]
        unknown = [
            part for part, has in zip(parts, present, strict=True) if has and not self._memories.has_momentum(part.name)
        ]
        zero = {id(part) for part, is_zero in zip(unknown, which_are_zero(unknown), strict=True) if is_zero}
        if not zero:
            return present
        for part in unknown:
            if id(part) in zero and not part.whole:  # other parts of the tensor may be sent: then all its memory counts
                self._memories.errors.keep(part.name, part.lo, part.hi)
        return [has and id(part) not in zero for part, has in zip(parts, present, strict=True)]

    def note_sent(self, names: Iterable[str]) -> None:
        """Take note of tensors that at least one rank has sent."""
        self._touched.update(names)

    def note_mean(self, part: TensorPart) -> None:
        """Take note of a mean that does not say who contributed: it is a gradient, unless nobody had one."""
        if part.name not in self._missing or bool(part.entries.any()):
            self._touched.add(part.name)

    def nobody_has(self, name: str) -> bool:
        """Return whether the tensor is missing on this rank and was sent by no other."""
        return name in self._missing and name not in self._touched

    def end_step(self) -> None:
        """Forget which tensors are missing; what was sent is kept until `take_touched`."""
        self._missing = set()

    def take_touched(self) -> set[str]:
        """Return the names of the tensors that any rank has sent in the step that is over."""
        touched, self._touched = self._touched, set()
        return touched
