"""What a reply must be to reach a strategy, judged by itself and by the model that its client was sent.

Flower's own strategies give up the whole training if a single reply has other records, arrays or metrics than the
others, and take over what a lone reply holds. So nothing here depends on the other replies of the round.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from flwr.app import Array, ArrayRecord, Message, MetricRecord

from gradwire.errors import GradwireError
from gradwire.flower.server.tree_checks import check_trees
from gradwire.flower.shared import arrays

LARGEST_WEIGHT = 2.0**53  # above it not even whole numbers can be told apart
LARGEST_METRIC = 2.0**60  # of those by which a strategy computes the next model
LONGEST_NAME = 60  # characters of a name that a client chose, in a reason


@dataclass(frozen=True)
class ReplyRules:
    """What the strategy needs of every reply.

    `weighted_by` is the metric by which it weights replies. With `same_layout` it averages them, as all strategies of
    Flower do: then a reply has exactly one MetricRecord with this metric in it and, after training, exactly one
    ArrayRecord with the arrays of the model. `needed_metrics` are others that the next model is computed from. With
    `adds_trees` the model is trees of XGBoost, to which the strategy adds those of the replies.
    """

    weighted_by: str = "num-examples"
    same_layout: bool = False
    needed_metrics: tuple[str, ...] = ()
    adds_trees: bool = False

    def check_records(self, reply: Message, kind: str) -> None:
        """Raise a GradwireError if the records or metrics of a reply to a message of this kind cannot be used."""
        if self.same_layout:
            _check_count(reply, MetricRecord, 1)
            if kind == "train":
                _check_count(reply, ArrayRecord, 1)
            if self.weighted_by not in metrics(reply):
                raise GradwireError(f"it has no metric {self.weighted_by!r}, by which replies are weighted")
        _check_number(self.weighted_by, metrics(reply).get(self.weighted_by), LARGEST_WEIGHT, "a weight")
        if kind == "train":
            self._check_needed_metrics(reply)
        elif self.same_layout:  # it holds nothing but metrics, of which a single NaN would be the mean of all
            _check_finite(reply)

    def check_arrays(self, reply: Message, kind: str) -> None:
        """Raise a GradwireError if the arrays of a reply, which have been found to be the model's, cannot be used."""
        if self.adds_trees and kind == "train":
            for record in reply.content.array_records.values():
                check_trees(record)

    def _check_needed_metrics(self, reply: Message) -> None:
        for name in self.needed_metrics:
            if name not in metrics(reply):
                raise GradwireError(f"it has no metric {name!r}, by which the strategy computes the next model")
            _check_number(name, metrics(reply)[name], LARGEST_METRIC, "a metric")


def metrics(reply: Message) -> dict[str, Any]:
    """Return the metrics of all records of a reply, by name."""
    records = [record for record in reply.content.values() if isinstance(record, MetricRecord)]
    return {key: value for record in records for key, value in record.items()}


def in_models_order(record: ArrayRecord, model: ArrayRecord) -> ArrayRecord:
    """Return the arrays of an uncompressed reply in the order of the model that the client was sent.

    Some strategies go by the order and not by the names. Raises a GradwireError if the arrays are not the model's, by
    name, shape or kind. Models that consist of nothing but rows of bytes, such as Flower's trees, may have any length.
    """
    if names := record.keys() ^ model.keys():
        name = min(names)
        raise GradwireError(f"the array {_short(name)} is only in the {'reply' if name in record else 'model'}")
    any_length = all(_is_row_of_bytes(array) for array in model.values())
    for name, sent in model.items():
        array = record[name]
        if not arrays.is_like(array, sent):
            raise GradwireError(f"the array {_short(name)} is {_short(array.dtype)}, not {sent.dtype}")
        same_shape = _is_row_of_bytes(array) if any_length else tuple(array.shape) == tuple(sent.shape)
        if not same_shape:
            shapes = f"{_short(tuple(array.shape))}, not {tuple(sent.shape)}"
            raise GradwireError(f"the array {_short(name)} has the shape {shapes}")
    return arrays.record({name: record[name] for name in model})


def _is_row_of_bytes(array: Array) -> bool:
    return array.dtype == "uint8" and len(array.shape) == 1


def _check_count(reply: Message, kind: type, count: int) -> None:
    found = sum(isinstance(record, kind) for record in reply.content.values())
    if found != count:
        raise GradwireError(f"it has {found} records of type {kind.__name__}, not {count}")


def _check_number(name: str, value: Any, largest: float, what: str) -> None:
    if value is None:
        return
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= largest:  # a NaN is not, either
        raise GradwireError(f"{what} ({name}) of {_short(value)}: it must be a number from 0 to {largest:.3g}")


def _check_finite(reply: Message) -> None:
    for name, value in metrics(reply).items():
        numbers = value if isinstance(value, list) else [value]
        if not all(isinstance(number, int) or math.isfinite(number) for number in numbers):
            raise GradwireError(f"its metric {_short(name)} holds a NaN or an infinity")


def _short(value: object) -> str:
    """Return how a value that a client chose is written, which may be of any length."""
    text = repr(value) if not isinstance(value, list) else f"a list of {len(value)}"
    return text if len(text) <= LONGEST_NAME else text[:LONGEST_NAME] + "…"
