"""Parameters of sparse recipes, which send few entries and keep the rest in the error memory (docs/sparse.md)."""

from __future__ import annotations

from gradwire.catalogue.spec import (
    Parameter,
    Values,
    corrector,
    decay,
    float_format,
    number,
    one_of,
    share,
    whole,
    word_or,
)
from gradwire.compress import positions
from gradwire.convert.conversion import Converter
from gradwire.convert.m22 import M22, MOST_BITS
from gradwire.convert.sbc import SBC
from gradwire.convert.sparseloco import LARGEST_CHUNK, SparseLoCo
from gradwire.convert.stc import STC
from gradwire.convert.topk import CASTS, TopK
from gradwire.errors import SpecError
from gradwire.models.weighted_lloyd import LARGEST_M

_RECIPES_OF_SMALL_TENSORS = ("same", "none", "fp16", "bf16", "co3", "ecq")


def sparse_parameters(**defaults: str) -> dict[str, Parameter]:
    """Return the parameters of a sparse recipe, with other defaults for those that are named."""
    parameters = {
        "p": Parameter("0.01", share),
        "k": Parameter("none", word_or("none", whole(1, 2**48))),  # entries of each tensor, whatever p says
        "values": Parameter("bf16", lambda text: text if text in CASTS else float_format(text)),
        "bits": Parameter("2", whole(1, MOST_BITS)),
        "m": Parameter("2", whole(0, LARGEST_M)),
        "positions": Parameter("auto", one_of(*positions.WAYS)),
        "decay": decay("1"),
        "mask": corrector("on", one_of("on", "off")),
        "small": corrector("ecq", one_of(*_RECIPES_OF_SMALL_TENSORS)),
        "scope": corrector("tensor", one_of("tensor", "model")),
        "power": corrector("1", number(0, 2)),
        "warmup": corrector("0", whole(0, 10**9)),
        "start": corrector("0.25", share),
        "clip_norm": corrector("0", number(0, 1e9)),
        "sync_every": corrector("1", whole(1, 10**6)),
        "warmup_sync": corrector("1000000", whole(1, 10**6)),
        "ahead": corrector("0", number(0, 1)),
        "flush": corrector("0", word_or("0", share)),
        "buffers": corrector("1", whole(1, 10**6)),
    }
    for key in {"values", "bits", "m"} - set(defaults):  # of some recipes only
        del parameters[key]
    for key, default in defaults.items():
        parameters[key] = Parameter(default, parameters[key].parse, parameters[key].of_corrector)
    return parameters


SPARSELOCO_PARAMETERS = {
    "k": Parameter("3", whole(1, LARGEST_CHUNK)),
    "chunk": Parameter("256", whole(2, LARGEST_CHUNK)),
    "bits": Parameter("1", whole(1, MOST_BITS)),
    "positions": Parameter("auto", one_of(*positions.WAYS)),
    "decay": decay("0.95"),
    "small": corrector("ecq", one_of(*_RECIPES_OF_SMALL_TENSORS)),
    "sync_every": corrector("30", whole(1, 10**6)),
}


def _selection(v: Values) -> tuple[float, int | None]:
    """Return p and k; SpecError if parameters contradict each other."""
    if not v["decay"] and (v["ahead"] or v["flush"] != "0"):
        raise SpecError("ahead and flush are about what the error memory holds: they need a decay above 0")
    if v["scope"] == "model" and v["power"] != 1:
        raise SpecError("scope=model selects over all tensors together: power, their parts of a budget, must be 1")
    if v["k"] != "none" and (v["warmup"] or v["power"] != 1):
        raise SpecError("k is the same count for every tensor in every step: warmup and power need p instead")
    return float(v["p"]), None if v["k"] == "none" else int(v["k"])


def build_sbc(v: Values) -> Converter:
    """Build the converter that sends one value for all selected entries."""
    return SBC(*_selection(v), str(v["positions"]))


def build_stc(v: Values) -> Converter:
    """Build the converter that sends one magnitude and signs."""
    return STC(*_selection(v), str(v["positions"]))


def build_topk(v: Values) -> Converter:
    """Build the converter that sends the values of the largest entries."""
    return TopK(*_selection(v), str(v["values"]), str(v["positions"]))


def build_m22(v: Values) -> Converter:
    """Build the converter that sends each selected entry as one of a few levels."""
    return M22(*_selection(v), int(v["bits"]), int(v["m"]), str(v["positions"]))


def build_sparseloco(v: Values) -> Converter:
    """Build the converter that sends the largest entries of every chunk."""
    return SparseLoCo(int(v["k"]), int(v["chunk"]), int(v["bits"]), str(v["positions"]))
