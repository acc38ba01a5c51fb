"""Probability models: how likely each symbol is, whichever coder makes bits of it.

Adding a model takes one file with a `ProbabilityModel` and one entry in `MODELS`; the coding byte has room for three.
"""

from __future__ import annotations

from collections.abc import Iterable

from gradwire.models.gennorm import GenNorm
from gradwire.models.histogram import Histogram
from gradwire.models.probability_model import ProbabilityModel

LARGEST_NUMBER = 3  # a model's number has two bits in the coding byte, and 0 means that there is none


def numbered(models: Iterable[ProbabilityModel]) -> dict[int, ProbabilityModel]:
    """Return the models by wire number, and make sure that the numbers are 1, 2, … in the order of the list."""
    listed = list(models)
    if len(listed) > LARGEST_NUMBER or [model.wire_number for model in listed] != list(range(1, len(listed) + 1)):
        raise ValueError(f"wire numbers of models are not 1, 2, 3 in turn: {[m.wire_number for m in listed]}")
    if len({"auto", *(model.name for model in listed)}) <= len(listed):
        raise ValueError(f"names of models occur twice: {[m.name for m in listed]}")
    return {model.wire_number: model for model in listed}


# Every model there is. Where two take equally many bits, the first one is chosen.
MODELS: dict[int, ProbabilityModel] = numbered([GenNorm(), Histogram()])


def names() -> list[str]:
    """Return what users may write for `model=` in a spec."""
    return ["auto", *(model.name for model in MODELS.values())]


def by_name(name: str) -> tuple[ProbabilityModel, ...]:
    """Return the models that an encoder may choose from: the one of this name, or all of them for `auto`."""
    return tuple(model for model in MODELS.values() if name in ("auto", model.name))
