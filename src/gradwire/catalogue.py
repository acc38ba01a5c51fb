"""Every recipe on one screen: "co3:format=fp8,decay=0.9" → codec + corrector."""

from __future__ import annotations

from functools import lru_cache

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
from .recipe import Recipe
from .spec import Entry, Parameter, Values, float_format, number, one_of, split


def _minifloat(fmt: str, coder: str, decay: str) -> dict[str, Parameter]:
    return {
        "format": Parameter(fmt, float_format),
        "coder": Parameter(coder, one_of(*compress.CODERS)),
        "model": Parameter("auto", one_of(*compress.MODELS)),
        "rounding": Parameter("nearest", one_of("nearest", "stochastic")),
        "decay": Parameter(decay, number(0, 1), of_corrector=True),
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


def recipe(spec: str) -> Recipe:
    """Parse `name[:key=value,…]`."""
    if not isinstance(spec, str):
        raise SpecError(f"a spec is a string such as 'co3:format=fp4', not {type(spec).__name__}")
    return _recipe(spec)


@lru_cache(maxsize=1024)
def _recipe(spec: str) -> Recipe:
    name, given = split(spec)
    if name not in CATALOGUE:
        raise unknown_name("recipe", name, CATALOGUE)
    entry = CATALOGUE[name]
    values = entry.read(given)
    small = str(values.get("small", "same"))
    last = f"stc:p={values['flush']},decay={values['decay']},small={small}" if values.get("flush") else None
    return Recipe(
        entry.spell(values), entry.codec(values), entry, values,
        None if small == "same" else recipe(small), recipe(last) if last else None,
    )  # fmt: skip


def codec(spec: str) -> Codec:
    """The stateless part of a recipe; parameters of its corrector are accepted and have no effect."""
    return recipe(spec).codec


def recipes() -> list[Entry]:
    """All names, each with its one-line description and paper."""
    return list(CATALOGUE.values())
