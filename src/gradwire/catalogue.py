"""Every recipe on one screen: "co3:format=fp8,decay=0.9" → codec + corrector."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from . import compress
from .codecs import Codec
from .convert.cast import Cast
from .convert.ecq import DEFAULT_RATE, Ecq
from .convert.job import Converter
from .convert.minifloat import Minifloat
from .convert.stored import Stored
from .errors import SpecError, unknown_name
from .formats import parse_format

Values = dict[str, str | float]


def _number(low: float, high: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not low <= value <= high:
            raise SpecError(f"{text!r} is not a number from {low:g} to {high:g}")
        return value

    return parse


def _one_of(*allowed: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in allowed:
            raise unknown_name("value", text, allowed)
        return text

    return parse


def _format(text: str) -> str:
    return str(parse_format(text))


@dataclass(frozen=True)
class Parameter:
    default: str
    parse: Callable[[str], str | float]
    of_corrector: bool = False


@dataclass(frozen=True)
class Entry:
    """A line of the catalogue."""

    name: str
    description: str
    paper: str
    build: Callable[[Values], Converter] = field(repr=False)
    parameters: dict[str, Parameter] = field(default_factory=dict, repr=False)


def _minifloat(fmt: str, coder: str, decay: str) -> dict[str, Parameter]:
    return {
        "format": Parameter(fmt, _format),
        "coder": Parameter(coder, _one_of(*compress.CODERS)),
        "model": Parameter("auto", _one_of(*compress.MODELS)),
        "rounding": Parameter("nearest", _one_of("nearest", "stochastic")),
        "decay": Parameter(decay, _number(0, 1), of_corrector=True),
    }


def _build_minifloat(v: Values) -> Converter:
    return Minifloat(parse_format(str(v["format"])), str(v["coder"]), str(v["model"]), str(v["rounding"]))


def _or(word: str, parse: Callable[[str], float]) -> Callable[[str], str | float]:
    return lambda text: word if text == word else parse(text)


_ECQ = {
    "rate": Parameter("auto", _or("auto", _number(0.001, 8))),
    "nmse": Parameter("off", _or("off", _number(1e-5, 0.99))),
    "rounding": Parameter("nearest", _one_of("nearest", "stochastic")),
    "decay": Parameter("0.9", _number(0, 1), of_corrector=True),
}


def _build_ecq(v: Values) -> Converter:
    rate, nmse = v["rate"], v["nmse"]
    if rate != "auto" and nmse != "off":
        raise SpecError("ecq: give either rate=, bits an entry, or nmse=, the relative squared error, not both")
    if nmse != "off":
        return Ecq(None, float(nmse), str(v["rounding"]))
    return Ecq(DEFAULT_RATE if rate == "auto" else float(rate), None, str(v["rounding"]))


_ENTRIES = [
    Entry("none", "fp32 as it is: the baseline", "", lambda v: Stored()),
    Entry("fp16", "half precision, saturating: twice as small", "", lambda v: Cast(torch.float16)),
    Entry("bf16", "bfloat16: twice as small, full range", "", lambda v: Cast(torch.bfloat16)),
    Entry(
        "co3", "4-bit floats, entropy-coded, with error feedback: the default for thin links",
        "CO3, arXiv 2203.09044", _build_minifloat, _minifloat("fp4", "rans", "0.9"),
    ),
    Entry(
        "gennorm", "8-bit floats under a GenNorm Huffman code: where no error feedback can be kept",
        "arXiv 2111.07599", _build_minifloat, _minifloat("fp8", "huffman", "0"),
    ),
    Entry(
        "ecq", "an even grid made for the entropy coder, at the rate or error you name: the fewest bytes of a dense "
        "gradient; co3 where you want the paper's own conversion",
        "Gish and Pierce 1968; Sullivan 1996", _build_ecq, _ECQ,
    ),
]  # fmt: skip
CATALOGUE = {entry.name: entry for entry in _ENTRIES}


@dataclass(frozen=True)
class Recipe:
    """A codec and how its error is corrected: memory decays by `decay` each step; 0 means no memory."""

    codec: Codec
    decay: float
    spec: str

    def __str__(self) -> str:
        return self.spec


def recipe(spec: str) -> Recipe:
    """Parse `name[:key=value,…]`."""
    if not isinstance(spec, str):
        raise SpecError(f"a spec is a string such as 'co3:format=fp4', not {type(spec).__name__}")
    name, colon, rest = spec.strip().partition(":")
    if name not in CATALOGUE:
        raise unknown_name("recipe", name, CATALOGUE)
    entry = CATALOGUE[name]
    given = _split(name, rest) if colon else {}
    for key in given:
        if key not in entry.parameters:
            raise unknown_name(f"parameter of {name}", key, entry.parameters or ["none at all"])
    values: Values = {}
    for key, parameter in entry.parameters.items():
        try:
            values[key] = parameter.parse(given.get(key, parameter.default))
        except SpecError as error:
            raise SpecError(f"{name}: {key}: {error}") from None
    codec_keys = [k for k, p in entry.parameters.items() if not p.of_corrector]
    codec = Codec(_spell(name, values, codec_keys), entry.build(values))
    return Recipe(codec, float(values.get("decay", 0)), _spell(name, values, list(values)))


def _split(name: str, rest: str) -> dict[str, str]:
    given: dict[str, str] = {}
    for item in rest.split(","):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not (key and equals and value) or key in given:
            raise SpecError(
                f"cannot read {item!r} in the spec of {name!r}: write {name}:key=value,key=value, each key once"
            )
        given[key] = value
    return given


def _spell(name: str, values: Values, keys: list[str]) -> str:
    text = ",".join(f"{k}={values[k]}" for k in keys)
    return f"{name}:{text}" if text else name


def codec(spec: str) -> Codec:
    """The stateless part of a recipe; parameters of its corrector are accepted and have no effect."""
    return recipe(spec).codec


def recipes() -> list[Entry]:
    """All names, each with its one-line description and paper."""
    return list(CATALOGUE.values())
