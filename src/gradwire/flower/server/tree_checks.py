"""Whether Flower's FedXgbBagging can add the trees of a reply to its model.

It reads them with nothing but `json.loads`, and whatever it does not find there ends the training.
"""

from __future__ import annotations

import json
from typing import Any

from flwr.app import ArrayRecord

from gradwire.errors import GradwireError
from gradwire.flower.shared import arrays


def check_trees(record: ArrayRecord) -> None:
    """Raise a GradwireError unless the only array of a record holds what XGBoost saves as JSON."""
    if list(record) != ["0"]:
        raise GradwireError("FedXgbBagging takes one array, which is named '0'")
    try:
        is_sound = _is_sound(json.loads(bytearray(arrays.tensor("0", record["0"]).numpy().tobytes())))
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError):  # whatever JSON holds in place of it
        is_sound = False
    if not is_sound:
        raise GradwireError("its trees are not what XGBoost saves as JSON, so that they cannot be added to the model")


def _is_sound(saved: Any) -> bool:
    model = saved["learner"]["gradient_booster"]["model"]
    parameters, trees, ends = model["gbtree_model_param"], model["trees"], model["iteration_indptr"]
    return (
        int(parameters["num_trees"]) == len(trees)
        and 1 <= int(parameters["num_parallel_tree"]) <= len(trees)
        and isinstance(trees, list)
        and all(isinstance(tree, dict) for tree in trees)
        and isinstance(model["tree_info"], list)
        and len(model["tree_info"]) == len(trees)
        and isinstance(ends, list)
        and all(isinstance(end, int) for end in ends)
        and ends[-1] == len(trees)
    )
