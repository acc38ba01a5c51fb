"""Replies that must not reach a strategy because they differ from the others of their round.

Flower's own strategies average replies that have the same records, arrays and metrics, and give up the whole training
if a single one differs. `LayoutVote` finds the ones that differ, so that they are left out instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

from flwr.app import ArrayRecord, Message, MetricRecord

from gradwire.flower.shared.arrays import NUMPY
from gradwire.flower.shared.message import category

NUMBERS = ("bool", "int", "uint", "float")


def reply_layout(reply: Message, model: ArrayRecord) -> Hashable:
    """Return what has to be the same in all replies of a round. `model` is the model that this client was sent."""
    arrays: list[Hashable] = []
    if category(reply) == "train":
        for key, record in reply.content.array_records.items():
            arrays.append((key, frozenset((name, _array_kind(a, model.get(name))) for name, a in record.items())))
    metrics = [
        (key, frozenset((name, len(v) if isinstance(v, list) else None) for name, v in record.items()))
        for key, record in reply.content.items()
        if isinstance(record, MetricRecord)
    ]
    return reply.metadata.message_type, frozenset(arrays), frozenset(metrics)


def _array_kind(array: Any, sent: Any) -> Hashable:
    """Return what has to be the same in all replies of an array that the client was sent as `sent`.

    Floats are averaged entry by entry, and so are integers that became floats by an earlier average: their shapes have
    to be the same. Other arrays may have any length, as Flower's trees do.
    """
    kind = "number" if array.dtype.startswith(NUMBERS) else array.dtype
    is_averaged = any(each is not None and each.dtype.startswith("float") for each in (array, sent))
    shape: Hashable = tuple(array.shape) if is_averaged else None
    if is_averaged and sent is not None and shape == tuple(sent.shape):
        shape = "as sent"
    return array.stype == NUMPY, kind, shape


class LayoutVote:
    """Finds, round after round, the replies whose layout is not the most common one."""

    def __init__(self) -> None:
        self._usual: Hashable = None  # the most common layout of the last round

    def outvoted(self, layouts: Sequence[Hashable]) -> list[int]:
        """Return the indexes of the layouts that differ from the most common one.

        A tie is decided in favour of the layout that was usual in the round before.
        """
        counts = Counter(layouts)
        if not counts:
            return []
        self._usual = max(counts, key=lambda layout: (counts[layout], layout == self._usual))
        return [i for i, layout in enumerate(layouts) if layout != self._usual]
