"""`--backward`: which rows the weight gradients of linear layers are made of, as a spec such as topk:k=0.25,decay=0.9.

Specs are read like those of codecs: the name is a policy of gradwire.backward, or none for exact gradients.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from gradwire import backward
from gradwire.backward.layers import MEMORIES
from gradwire.backward.row_choice import Choice
from gradwire.catalogue.spec import number, one_of, split
from gradwire.errors import SpecError, unknown_name

EXACT = "none"


class Rows(NamedTuple):
    """What is given to `gradwire.backward.convert`."""

    policy: str
    k: int | float = 0.25
    decay: float = 1.0
    centre: bool = True

    def __str__(self) -> str:
        return f"{self.policy}:k={self.k},decay={self.decay:g},centre={'yes' if self.centre else 'no'}"


def parse(spec: str) -> Rows | None:
    """None where gradients are exact."""
    name, given = split(spec)
    if name not in (EXACT, *backward.POLICIES):
        raise unknown_name("--backward", name, (EXACT, *backward.POLICIES))
    allowed = ("k", "decay", "centre") if name != EXACT else ()
    for key in given:
        if key not in allowed:
            raise unknown_name(f"parameter of {name}", key, allowed or ["none at all"])
    if name == EXACT:
        return None
    rows = Rows(name)
    try:
        if "k" in given:
            rows = rows._replace(k=_count_or_share(given["k"]))
        if "decay" in given:
            rows = rows._replace(decay=number(0, 1)(given["decay"]))
        if "centre" in given:
            rows = rows._replace(centre=one_of("yes", "no")(given["centre"]) == "yes")
    except SpecError as error:
        raise SpecError(f"--backward {spec}: {error}") from None
    return rows


def spelled_out(spec: str) -> str:
    """The spec with every parameter."""
    return str(parse(spec) or EXACT)


def convert(model: nn.Module, spec: str) -> list[str]:
    """Convert the linear layers of the model; the names of those that were."""
    rows = parse(spec)
    if rows:
        backward.convert(model, rows.k, rows.policy, rows.decay, centre=rows.centre)
    return list(backward.converted(model))


def split_state(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The state of the plain model, and the row memories, which are different on every worker."""
    state = model.state_dict()
    memories = {name: tensor for name, tensor in state.items() if name.rpartition(".")[2] in MEMORIES}
    return {name: tensor for name, tensor in state.items() if name not in memories}, memories


def _count_or_share(text: str) -> int | float:
    """A whole number is a number of rows, as in Python: k=1 is one row, k=1.0 is all of them."""
    try:
        value = int(text) if text.isdecimal() else float(text)
    except ValueError:
        raise SpecError(f"k={text} is neither a share of the rows such as 0.25 nor a number of rows") from None
    return Choice(value).k
