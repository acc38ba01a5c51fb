"""The names of metrics and records, of which the server cannot know what they should be: clients vote on them.

Flower's strategies give up the training if two replies of a round name other metrics. Which of them is wrong, only the
other clients can tell. A minority is rejected. Where there is none, as between two clients, nobody is: the strategy
then gets what their replies have in common.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from flwr.app import ArrayRecord, Message, MetricRecord

from gradwire.flower.server.client_table import ClientTable
from gradwire.flower.shared.message import with_records


@dataclass(frozen=True)
class Layout:
    """The names in a reply that have to be the same in all replies of a round."""

    arrays: str | None  # key of the ArrayRecord
    metrics: str  # key of the MetricRecord
    names: frozenset[tuple[str, int | None]]  # of metrics, with the lengths of those that are lists

    @classmethod
    def of(cls, reply: Message, kind: str) -> Layout:
        """Return the layout of a reply to a message of this kind that `ReplyRules` have found to be in order."""
        (key,) = (key for key, record in reply.content.items() if isinstance(record, MetricRecord))
        values = reply.content.metric_records[key].items()
        names = frozenset((name, len(value) if isinstance(value, list) else None) for name, value in values)
        array_keys = [key for key, record in reply.content.items() if isinstance(record, ArrayRecord)]
        return cls(array_keys[0] if kind == "train" else None, key, names)


class LayoutVote:
    """Finds, round after round, the replies whose layout is not that of most clients of the training.

    Every client has one vote, its last reply. It is used in the thread of the server app.
    """

    def __init__(self) -> None:
        self._votes: ClientTable[int] = ClientTable()  # a hash of the last layout of each client

    def outvoted(self, layouts: Sequence[tuple[int, Layout]]) -> list[int]:
        """Take the (node id, layout) pairs of a round, and return the indexes of those in the minority."""
        for node, layout in layouts:
            self._votes.put(node, hash(layout))
        if len({hash(layout) for _, layout in layouts}) < 2:
            return []
        votes = Counter(self._votes.values())
        most = max(votes[hash(layout)] for _, layout in layouts)
        return [i for i, (_, layout) in enumerate(layouts) if votes[hash(layout)] < most]


def in_common_layout(replies: Sequence[Message], layouts: Sequence[Layout], arrays_key: str) -> list[Message]:
    """Return the replies with the same names everywhere, and only those metrics that all of them have.

    Their arrays are then under `arrays_key`, the name under which clients were sent the model.
    """
    common = frozenset.intersection(*(layout.names for layout in layouts))
    metrics_key = min({layout.metrics for layout in layouts} - {arrays_key}, default="metrics")
    result = []
    for reply, layout in zip(replies, layouts, strict=True):
        values = reply.content.metric_records[layout.metrics]
        metrics = MetricRecord({name: values[name] for name in sorted(name for name, _ in common)})
        left_alone = {k: r for k, r in reply.content.items() if k not in (layout.arrays, layout.metrics)}
        arrays = {} if layout.arrays is None else {arrays_key: reply.content[layout.arrays]}
        result.append(with_records(reply, {**left_alone, **arrays, metrics_key: metrics}))
    return result
