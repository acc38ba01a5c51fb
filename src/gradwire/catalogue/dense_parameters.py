"""Parameters of dense recipes, which send every entry coarsely, and how their converters are built."""

from __future__ import annotations

from collections.abc import Callable

from gradwire import compress, models
from gradwire.catalogue.spec import Parameter, Values, corrector, decay, float_format, number, one_of, whole, word_or
from gradwire.convert.conversion import Converter
from gradwire.convert.ecq import DEFAULT_RATE, Ecq
from gradwire.convert.level_numbers import PRECISIONS
from gradwire.convert.low_rank import MOST_TERMS
from gradwire.convert.minifloat import Minifloat
from gradwire.convert.structured import DEFAULT_NMSE, Structured
from gradwire.errors import SpecError
from gradwire.small_float_formats import parse_format

DITHERED_RATE = 1.5  # bits an entry; from here on the error of stochastic rounding is smaller than the tensor


def minifloat_parameters(fmt: str, coder: str, memory_decay: str) -> dict[str, Parameter]:
    """Return the parameters of recipes on small float formats, with these defaults."""
    return {
        "format": Parameter(fmt, float_format),
        "coder": Parameter(coder, one_of(*compress.CODERS)),
        "model": Parameter("auto", one_of(*models.names())),
        "rounding": Parameter("nearest", one_of("nearest", "stochastic")),
        "decay": decay(memory_decay),
    }


def build_minifloat(v: Values) -> Converter:
    """Build the converter to a small float format."""
    return Minifloat(parse_format(str(v["format"])), str(v["coder"]), str(v["model"]), str(v["rounding"]))


ECQ_PARAMETERS = {
    "rate": Parameter("auto", word_or("auto", number(0.001, 8))),
    "nmse": Parameter("off", word_or("off", number(1e-5, 0.99))),
    "rounding": Parameter("nearest", one_of("nearest", "stochastic")),
    "decay": decay("0.9"),
}


def build_ecq(v: Values) -> Converter:
    """Build the converter to an even grid; SpecError if both a rate and an error are named."""
    rate, nmse = v["rate"], v["nmse"]
    if rate != "auto" and nmse != "off":
        raise SpecError("ecq: give either rate=, bits an entry, or nmse=, the relative squared error, not both")
    if nmse != "off":
        return Ecq(None, float(nmse), str(v["rounding"]))
    return Ecq(DEFAULT_RATE if rate == "auto" else float(rate), None, str(v["rounding"]))


STRUCTURED_PARAMETERS = {
    "nmse": Parameter(f"{DEFAULT_NMSE:g}", number(1e-5, 0.99)),
    "rank": Parameter("auto", word_or("auto", whole(0, MOST_TERMS))),
    "transform": Parameter("on", one_of("on", "off")),
    "classes": Parameter("on", one_of("on", "off")),
    "decay": decay("0.9"),
}
ADAM_PARAMETERS = STRUCTURED_PARAMETERS | {
    "units": corrector("on", one_of("on", "off")),
    "start": corrector("0.001", number(1e-5, 0.99)),
    "warmup": corrector("200", whole(0, 10**6)),
}


def build_structured(v: Values) -> Converter:
    """Build the converter that takes structure out first; a `rank` limits how many terms predict a matrix."""
    rank = MOST_TERMS if v["rank"] == "auto" else int(v["rank"])
    return Structured(float(v["nmse"]), rank, v["transform"] == "on", v["classes"] == "on")


def levels_parameters(bucket: str, precision: str, decay: Parameter, **others: Parameter) -> dict[str, Parameter]:
    """Return the parameters of recipes with a few levels in each bucket, the `others` of the recipe first.

    A `clip` of 0 clips nothing; a `bucket` of 0 is the whole tensor.
    """
    return others | {
        "bucket": Parameter(bucket, whole(0, 2**30)),
        "precision": Parameter(precision, one_of(*PRECISIONS)),
        "coder": Parameter("auto", one_of("auto", *compress.CODERS)),
        "decay": decay,
    }


def build_levels(method: Callable[..., Converter]) -> Callable[[Values], Converter]:
    """Return what builds a converter whose arguments have the names of the parameters."""
    return lambda v: method(**{key: value for key, value in v.items() if key != "decay"})


def no_memory(text: str) -> float:
    """Parse the decay of an unbiased recipe, which must be 0."""
    if number(0, 1)(text) != 0:
        raise SpecError(
            f"{text} would keep a memory of errors that are random, unbiased and may exceed the gradient itself: they "
            "would pile up rather than cancel. Leave it at 0"
        )
    return 0.0


CLIP = Parameter("0", number(0, 100))  # in units of the standard deviation
UNBIASED = corrector("0", no_memory)
