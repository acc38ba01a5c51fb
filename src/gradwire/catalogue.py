"""Every recipe on one screen: "co3:format=fp8,decay=0.9" → codec + corrector."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from . import compress
from .codecs import Codec
from .convert import sketch
from .convert.bingrad import BinGrad
from .convert.cast import Cast
from .convert.job import Converter
from .convert.level_numbers import PRECISIONS
from .convert.levels import MOST_LEVELS
from .convert.linear import Linear
from .convert.minifloat import Minifloat
from .convert.orq import ORQ, parse_levels
from .convert.qsgd import QSGD
from .convert.signsgd import SignSGD
from .convert.sketch import CountSketch
from .convert.stored import Stored
from .convert.terngrad import TernGrad
from .convert.tinyscript import TinyScript
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


def _whole(low: int, high: int, step: int = 1) -> Callable[[str], float]:
    def parse(text: str) -> float:
        if not text.isdecimal() or int(text) not in range(low, high + 1, step):
            every = "" if step == 1 else f", in steps of {step}"
            raise SpecError(f"{text!r} is not a whole number from {low} to {high}{every}")
        return int(text)

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


def _levels(bucket: str, precision: str, decay: str, **own: Parameter) -> dict[str, Parameter]:
    """Parameters of quantizers with a few levels in each bucket; clip = 0 clips nothing, bucket = 0 is the tensor."""
    return own | {
        "bucket": Parameter(bucket, _whole(0, 2**30)),
        "precision": Parameter(precision, _one_of(*PRECISIONS)),
        "coder": Parameter("auto", _one_of("auto", *compress.CODERS)),
        "decay": Parameter(decay, _number(0, 1), of_corrector=True),
    }


def _build_plain(method: Callable[..., Converter]) -> Callable[[Values], Converter]:
    return lambda v: method(**{key: value for key, value in v.items() if key != "decay"})


_CLIP = Parameter("0", _number(0, 100))  # × σ
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
        "bingrad", "two levels a bucket (form=b), or ±b (pb): where one bit an entry is all there is; not below that",
        "BinGrad, arXiv 2002.11082", _build_plain(BinGrad),
        _levels("512", "bf16", "0", form=Parameter("b", _one_of("b", "pb")), clip=_CLIP),
    ),
    Entry(
        "orq", "unbiased, the best 3, 5, 9 … levels: where symbols are packed; a plain grid is better entropy-coded",
        "ORQ, arXiv 2002.11082", _build_plain(ORQ),
        _levels(
            "2048", "bf16", "0", levels=Parameter("5", parse_levels),
            search=Parameter("greedy", _one_of("greedy", "polished", "exact")), clip=_CLIP,
        ),
    ),
    Entry(
        "qsgd", "unbiased, evenly spaced around zero: the usual baseline; coarse wherever a bucket has outliers",
        "QSGD, arXiv 1610.02132", _build_plain(QSGD),
        _levels(
            "1024", "bf16", "0", levels=Parameter("9", _whole(3, MOST_LEVELS, 2)),
            norm=Parameter("max", _one_of("l2", "max")),
        ),
    ),
    Entry(
        "terngrad", "unbiased, −s, 0 or s: simple and noisy; clip=2.5 is calmer, and no longer unbiased",
        "TernGrad, arXiv 1705.07878", _build_plain(TernGrad), _levels("512", "bf16", "0", clip=_CLIP),
    ),
    Entry(
        "signsgd", "signs times their mean magnitude, with error feedback: one bit; never without the memory",
        "EF-signSGD, arXiv 1901.09847", _build_plain(SignSGD), _levels("512", "bf16", "1"),
    ),
    Entry(
        "linear", "unbiased, evenly spaced from least to greatest: a baseline that entropy coding makes a good one",
        "", _build_plain(Linear), _levels("512", "bf16", "0", levels=Parameter("9", _whole(2, MOST_LEVELS))),
    ),
    Entry(
        "tinyscript", "Lloyd levels of a fitted double Weibull: a baseline of CO3; co3 does better at fewer bits",
        "TinyScript, ICML 2020", _build_plain(TinyScript),
        _levels("0", "bf16", "0", levels=Parameter("8", _whole(2, MOST_LEVELS))),
    ),
    Entry(
        "countsketch", "hashed sums, the largest estimates kept: a baseline of CO3; top-k sends such entries exactly",
        "count-sketch, 2002", _build_plain(CountSketch),
        {
            "ratio": Parameter("10", _number(1, 1e6)),
            "rows": Parameter("3", _whole(sketch.ROWS[0], sketch.ROWS[-1], 2)),
            "p": Parameter("0.01", _number(1e-6, 1)),
            "precision": Parameter("fp32", _one_of(*sketch.PRECISIONS)),
            "decay": Parameter("1", _number(0, 1), of_corrector=True),
        },
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
