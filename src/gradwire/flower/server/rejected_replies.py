"""Replies that are unlike the others of their round. Flower's own strategies average replies with the same records,
arrays and metrics, and give up the whole training for a single one that differs: so that one is left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

from flwr.app import ArrayRecord, Message, MetricRecord

from gradwire.flower.shared.arrays import NUMPY
from gradwire.flower.shared.message import category

NUMBERS = ("bool", "int", "uint", "float")


def layout(reply: Message, model: ArrayRecord) -> Hashable:
    """What has to be the same in all replies; `model` is what this client was sent."""
    arrays: list[Hashable] = []
    if category(reply) == "train":
        for key, record in reply.content.array_records.items():
            arrays.append((key, frozenset((name, _kind(a, model.get(name))) for name, a in record.items())))
    metrics = [
        (key, frozenset((name, len(v) if isinstance(v, list) else None) for name, v in record.items()))
        for key, record in reply.content.items()
        if isinstance(record, MetricRecord)
    ]
    return reply.metadata.message_type, frozenset(arrays), frozenset(metrics)


def _kind(array: Any, sent: Any) -> Hashable:
    """Floats are averaged entry by entry, and so are integers of which means were made before; other arrays may be of
    any length, as Flower's trees are."""
    kind = "number" if array.dtype.startswith(NUMBERS) else array.dtype
    averaged = any(each is not None and each.dtype.startswith("float") for each in (array, sent))
    shape: Hashable = tuple(array.shape) if averaged else None
    if averaged and sent is not None and shape == tuple(sent.shape):
        shape = "as sent"
    return array.stype == NUMPY, kind, shape


def odd_ones(layouts: Sequence[Hashable], usual: set[Hashable]) -> list[int]:
    """Which of them are not as most are; where as many are so as so, most are as they were in the round before."""
    counts = Counter(layouts)
    if not counts:
        return []
    most = max(counts, key=lambda each: (counts[each], each in usual))
    usual.clear()
    usual.add(most)
    return [i for i, each in enumerate(layouts) if each != most]
