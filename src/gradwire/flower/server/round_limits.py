"""`RoundLimits`: finds the replies of a round that exceed `max_norm` or `max_weight`, and says by how much."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gradwire.errors import FrameError
from gradwire.flower.server.limits import AUTO, AUTO_MODEL, Limit, Median
from gradwire.flower.server.update_norm import GROUPS, PARAMETERS, UpdateNorm


@dataclass(frozen=True)
class ReplySize:
    """What is limited in one reply: its weight, None if it has none, and its norm, None if it is of no model."""

    node: int
    weight: float | None
    norm: UpdateNorm | None
    model_norms: dict[str, float]  # of the model that the client was sent, by group of tensors


class RoundLimits:
    """The limits of a training, with what it has to remember to take medians of small rounds.

    `too_large` is called once for each round, then `accept` with the replies that the strategy gets. With "auto", no
    update is decoded unless one of the round is suspiciously long. It is used in the thread of the server app.
    """

    def __init__(self, max_norm: float | str | None, max_weight: float | str | None):
        self.max_norm = Limit.parse("max_norm", max_norm)
        self.max_weight = Limit.parse("max_weight", max_weight)
        self._weights = {"train": Median(), "evaluate": Median()}
        self._norms = {group: Median() for group in GROUPS}

    def too_large(self, sizes: Sequence[ReplySize], kind: str) -> dict[int, str]:
        """Return the reasons to reject replies to messages of this kind, by their index in the round."""
        reasons = dict(self._too_heavy(sizes, self._weights[kind]))
        if kind == "train" and self.max_norm.is_set and not self.max_norm.is_auto:
            unmeasured = [i for i, size in enumerate(sizes) if size.norm is None]
            reasons |= dict.fromkeys(unmeasured, "its arrays are not the model's, so that it has no norm")
        for group in GROUPS if kind == "train" and self.max_norm.is_set else ():
            rest = [i for i in range(len(sizes)) if i not in reasons]
            reasons.update(self._too_long(group, {i: sizes[i] for i in rest}))
        return reasons

    def accept(self, sizes: Sequence[ReplySize], kind: str) -> None:
        """Remember the sizes of replies to messages of this kind that the strategy gets."""
        self._weights[kind].accept({size.node: size.weight for size in sizes if size.weight is not None})
        for group, median in self._norms.items():
            median.accept({size.node: size.norm.at_most(group) for size in sizes if size.norm is not None})

    def _too_heavy(self, sizes: Sequence[ReplySize], known: Median) -> Iterator[tuple[int, str]]:
        limit, weights = self.max_weight, {i: s.weight for i, s in enumerate(sizes) if s.weight is not None}
        median = known.of({sizes[i].node: weight for i, weight in weights.items()})
        for i, weight in weights.items():
            if weight > limit.most or (median and weight > limit.times * median):
                yield i, f"its weight of {weight:.6g} is above {_named('max_weight', limit, median)}"

    def _too_long(self, group: str, sizes: dict[int, ReplySize]) -> Iterator[tuple[int, str]]:
        limit = self._limit_of(group)
        norms = {i: size.norm for i, size in sizes.items() if size.norm is not None}
        # Updates up to this length pass without being decoded.
        short = {i: AUTO_MODEL * sizes[i].model_norms[group] if limit.is_auto else limit.most for i in norms}
        if limit.times < math.inf and not limit.is_auto:
            short = dict.fromkeys(norms, 0.0)
        if all(norm.at_most(group) <= short[i] for i, norm in norms.items()):
            return
        lengths: dict[int, float] = {}
        for i, norm in norms.items():
            try:
                lengths[i] = norm.measured(group)
            except FrameError as error:
                yield i, str(error)
        median = self._norms[group].of({sizes[i].node: length for i, length in lengths.items()})
        for i, length in lengths.items():
            if length > limit.most or (median and length > max(limit.times * median, short[i])):
                yield i, f"its update of {group} is {length:.3g} long, above {_named('max_norm', limit, median)}"

    def _limit_of(self, group: str) -> Limit:
        """Return the limit of a group: a number is one for parameters, of which statistics have not the scale."""
        is_number = self.max_norm.most < math.inf
        return Limit(times=AUTO, is_auto=True) if is_number and group != PARAMETERS else self.max_norm


def _named(name: str, limit: Limit, median: float | None) -> str:
    if limit.most < math.inf:
        return f"{name}={limit.most:g}"
    what = "of 'auto'" if limit.is_auto else f"={limit.times:g}x"
    return f"{name}{' ' if limit.is_auto else ''}{what}, {limit.times:g} times the median of {median:.3g}"
