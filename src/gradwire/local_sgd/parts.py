"""Which part of the model is exchanged when, if not all of it at once (Streaming DiLoCo, arXiv 2501.18512).

The parts take turns: 0, 1, …, P−1, 0, …, evenly spread over the steps between two exchanges of the same part. The k-th
exchange of one rank meets the k-th of all others, whatever step each of them is at, so that all know whose turn it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gradwire.errors import SpecError


def divide(sizes: Mapping[str, int], parts: int) -> list[list[str]]:
    """Return the names in contiguous parts that have about as many entries each.

    A tensor belongs to the part that its middle entry falls in; fewer parts come out where some tensors are larger than
    a part would be.
    """
    if isinstance(parts, bool) or not isinstance(parts, int) or not 1 <= parts <= len(sizes):
        raise SpecError(f"parts must be a number from 1 to {len(sizes)}, that of the trained tensors, not {parts!r}")
    total, before = sum(sizes.values()), 0
    divided: list[list[str]] = [[] for _ in range(parts)]
    for number, (name, size) in enumerate(sizes.items()):
        middle = parts * (2 * before + size) // (2 * total) if total else parts * number // len(sizes)
        divided[min(middle, parts - 1)].append(name)
        before += size
    return [names for names in divided if names]


class Turns:
    """Whose turn it is, and how many steps each part has made since it was last sent.

    The training's thread alone uses it.
    """

    def __init__(self, parts: int):
        self.next = 0
        self.since = 0  # steps since the last turn
        self.unsent = [0] * parts
        self._taken: tuple[int, int, int] | None = None  # the last turn: its part, and both counts before it

    @property
    def mid_round(self) -> bool:
        """Whether this rank has made steps that it has not sent."""
        return any(self.unsent)

    def count_step(self) -> None:
        """Count a step of this rank."""
        self.since += 1
        self.unsent = [steps + 1 for steps in self.unsent]

    def is_due(self, every: int) -> bool:
        """Return whether the next part is to be exchanged now, if each is once in `every` steps."""
        return self.since >= self.gap(every)

    def gap(self, every: int) -> int:
        """Return the steps between the last turn and the next one."""
        parts = len(self.unsent)
        return max(1, -(-every * (self.next + 1) // parts) - -(-every * self.next // parts))

    def least_gap(self, every: int) -> int:
        """Return the fewest steps between two turns."""
        return max(1, every // len(self.unsent))

    def take_turn(self) -> int:
        """Return the part whose turn it is, which is sent now; then it is the next one's."""
        part, self.next = self.next, (self.next + 1) % len(self.unsent)
        self._taken = part, self.since, self.unsent[part]
        self.since = self.unsent[part] = 0
        return part

    def keep(self) -> None:
        """Let the last turn count, whose exchange has ended well: no later failure takes it back."""
        self._taken = None

    def take_back(self) -> None:
        """Undo the last turn, whose exchange has failed; the steps since then count on."""
        if self._taken is not None:
            part, since, unsent = self._taken
            self.next, self._taken = part, None
            self.since += since
            self.unsent[part] += unsent

    def send_nothing(self) -> None:
        """Forget the steps that were made: this rank has gone back to the common parameters."""
        self.unsent = [0] * len(self.unsent)

    def load(self, following: int, since: int, unsent: Sequence[int]) -> None:
        """Go on from a saved place, which was checked."""
        self.next, self.since, self.unsent = following, since, list(unsent)
