"""Every recipe in one list: "co3:format=fp8,decay=0.9" → codec + corrector."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import lru_cache

import torch

from gradwire import compress, models
from gradwire.catalogue.recipe import Recipe
from gradwire.catalogue.spec import (
    Entry,
    Parameter,
    Parser,
    Values,
    float_format,
    number,
    one_of,
    share,
    split,
    whole,
    word_or,
)
from gradwire.codecs import Codec
from gradwire.compress import positions
from gradwire.convert import sketch
from gradwire.convert.bingrad import BinGrad
from gradwire.convert.cast import Cast
from gradwire.convert.conversion import Converter
from gradwire.convert.ecq import DEFAULT_RATE, Ecq
from gradwire.convert.homomorphic import Homomorphic
from gradwire.convert.level_numbers import PRECISIONS
from gradwire.convert.levels import MOST_LEVELS
from gradwire.convert.linear import LinearLevels
from gradwire.convert.m22 import M22, MOST_BITS
from gradwire.convert.minifloat import Minifloat
from gradwire.convert.orq import ORQ, parse_levels
from gradwire.convert.qsgd import QSGD
from gradwire.convert.sbc import SBC
from gradwire.convert.signsgd import SignSGD
from gradwire.convert.sketch import CountSketch
from gradwire.convert.stc import STC
from gradwire.convert.stored import Stored
from gradwire.convert.terngrad import TernGrad
from gradwire.convert.tinyscript import TinyScript
from gradwire.convert.topk import CASTS, TopK
from gradwire.errors import SpecError, unknown_name
from gradwire.float_formats import parse_format
from gradwire.homomorphic.grid import BITS
from gradwire.models.weighted_lloyd import LARGEST_M


def _corrector(default: str, parse: Parser) -> Parameter:
    return Parameter(default, parse, of_corrector=True)


def _decay(default: str) -> Parameter:
    return _corrector(default, number(0, 1))


def _no_memory(text: str) -> float:
    if number(0, 1)(text) != 0:
        raise SpecError(
            f"{text} would keep a memory of errors that are random, unbiased and may exceed the gradient itself: they "
            "would pile up rather than cancel. Leave it at 0"
        )
    return 0.0


# ── dense: every entry is sent, coarsely ──────────────────────────────────────────────────────────


def _minifloat(fmt: str, coder: str, decay: str) -> dict[str, Parameter]:
    return {
        "format": Parameter(fmt, float_format),
        "coder": Parameter(coder, one_of(*compress.CODERS)),
        "model": Parameter("auto", one_of(*models.names())),
        "rounding": Parameter("nearest", one_of("nearest", "stochastic")),
        "decay": _decay(decay),
    }


def _build_minifloat(v: Values) -> Converter:
    return Minifloat(parse_format(str(v["format"])), str(v["coder"]), str(v["model"]), str(v["rounding"]))


_ECQ = {
    "rate": Parameter("auto", word_or("auto", number(0.001, 8))),
    "nmse": Parameter("off", word_or("off", number(1e-5, 0.99))),
    "rounding": Parameter("nearest", one_of("nearest", "stochastic")),
    "decay": _decay("0.9"),
}


DITHERED_RATE = 1.5  # bits an entry; from here on the error is smaller than the tensor


def _build_ecq(v: Values) -> Converter:
    rate, nmse = v["rate"], v["nmse"]
    if rate != "auto" and nmse != "off":
        raise SpecError("ecq: give either rate=, bits an entry, or nmse=, the relative squared error, not both")
    if nmse != "off":
        return Ecq(None, float(nmse), str(v["rounding"]))
    return Ecq(DEFAULT_RATE if rate == "auto" else float(rate), None, str(v["rounding"]))


def _levels(bucket: str, precision: str, decay: Parameter, **own: Parameter) -> dict[str, Parameter]:
    """Of quantizers with a few levels in each bucket; clip = 0 clips nothing, bucket = 0 is the whole tensor."""
    return own | {
        "bucket": Parameter(bucket, whole(0, 2**30)),
        "precision": Parameter(precision, one_of(*PRECISIONS)),
        "coder": Parameter("auto", one_of("auto", *compress.CODERS)),
        "decay": decay,
    }


def _build_plain(method: Callable[..., Converter]) -> Callable[[Values], Converter]:
    return lambda v: method(**{key: value for key, value in v.items() if key != "decay"})


_CLIP = Parameter("0", number(0, 100))  # × σ
_UNBIASED = _corrector("0", _no_memory)

_DENSE = [
    Entry("none", "fp32 as it is: the baseline, and right where links are fast", "", lambda v: Stored()),
    Entry("fp16", "half precision, saturating: twice as small; bf16 where gradients are tiny", "",
          lambda v: Cast(torch.float16)),
    Entry("bf16", "bfloat16: twice as small, full range; no more than that", "", lambda v: Cast(torch.bfloat16)),
    Entry(
        "co3", "4-bit floats, entropy-coded, with error feedback: the one to start with; ecq where bytes count more "
        "than time",
        "CO3, arXiv 2203.09044", _build_minifloat, _minifloat("fp4", "rans", "0.9"),
    ),
    Entry(
        "ecq", "an even grid made for the entropy coder, at the rate (2 bits an entry) or error you name: the least "
        "error for its bytes of all dense recipes; co3 is quicker, and a sparse one better below 100 Mbit/s",
        "Gish and Pierce 1968; Sullivan 1996", _build_ecq, _ECQ,
    ),
    Entry(
        "gennorm", "8-bit floats under a GenNorm Huffman code: where no error feedback can be kept",
        "arXiv 2111.07599", _build_minifloat, _minifloat("fp8", "huffman", "0"),
    ),
    Entry(
        "bingrad", "two levels a bucket (form=b), or ±b (pb): where one bit an entry is all there is; not below that",
        "BinGrad, arXiv 2002.11082", _build_plain(BinGrad),
        _levels("512", "bf16", _decay("0"), form=Parameter("b", one_of("b", "pb")), clip=_CLIP),
    ),
    Entry(
        "orq", "unbiased, the best 3, 5, 9 … levels: where symbols are packed; a plain grid is better entropy-coded",
        "ORQ, arXiv 2002.11082", _build_plain(ORQ),
        _levels(
            "2048", "bf16", _UNBIASED, levels=Parameter("5", parse_levels),
            search=Parameter("greedy", one_of("greedy", "polished", "exact")), clip=_CLIP,
        ),
    ),
    Entry(
        "qsgd", "unbiased, evenly spaced around zero: the usual baseline; coarse wherever a bucket has outliers",
        "QSGD, arXiv 1610.02132", _build_plain(QSGD),
        _levels(
            "1024", "bf16", _UNBIASED, levels=Parameter("9", whole(3, MOST_LEVELS, 2)),
            norm=Parameter("max", one_of("l2", "max")),
        ),
    ),
    Entry(
        "terngrad", "unbiased, −s, 0 or s: simple and noisy; clip=2.5 is calmer, and no longer unbiased",
        "TernGrad, arXiv 1705.07878", _build_plain(TernGrad), _levels("512", "bf16", _UNBIASED, clip=_CLIP),
    ),
    Entry(
        "signsgd", "signs times their mean magnitude, with error feedback: one bit; never without the memory",
        "EF-signSGD, arXiv 1901.09847", _build_plain(SignSGD), _levels("512", "bf16", _decay("1")),
    ),
    Entry(
        "linear", "unbiased, evenly spaced from least to greatest: a baseline that entropy coding makes a good one",
        "", _build_plain(LinearLevels), _levels("512", "bf16", _UNBIASED, levels=Parameter("9", whole(2, MOST_LEVELS))),
    ),
    Entry(
        "tinyscript", "Lloyd levels of a fitted double Weibull: a baseline of CO3; co3 does better at fewer bits",
        "TinyScript, ICML 2020", _build_plain(TinyScript),
        _levels("0", "bf16", _decay("0"), levels=Parameter("8", whole(2, MOST_LEVELS))),
    ),
    Entry(
        "countsketch", "hashed sums, the largest estimates kept: a baseline of CO3; top-k sends such entries exactly",
        "count-sketch, 2002", _build_plain(CountSketch),
        {
            "ratio": Parameter("10", number(1, 1e6)),
            "rows": Parameter("3", whole(sketch.ROWS[0], sketch.ROWS[-1], 2)),
            "p": Parameter("0.01", number(1e-6, 1)),
            "precision": Parameter("fp32", one_of(*sketch.PRECISIONS)),
            "decay": _decay("1"),
        },
    ),
]  # fmt: skip


# ── sparse: few entries are sent, the rest wait in the error memory ───────────────────────────────

_SMALL = ("same", "none", "fp16", "bf16", "co3", "ecq")


def _sparse(**defaults: str) -> dict[str, Parameter]:
    """Parameters of sparse recipes (docs/sparse.md), with other defaults for some of them."""
    parameters = {
        "p": Parameter("0.01", share),
        "k": Parameter("none", word_or("none", whole(1, 2**48))),  # entries of each tensor, whatever p says
        "values": Parameter("bf16", lambda text: text if text in CASTS else float_format(text)),
        "bits": Parameter("2", whole(1, MOST_BITS)),
        "m": Parameter("2", whole(0, LARGEST_M)),
        "positions": Parameter("auto", one_of(*positions.WAYS)),
        "decay": _decay("1"),
        "mask": _corrector("on", one_of("on", "off")),
        "small": _corrector("ecq", one_of(*_SMALL)),
        "scope": _corrector("tensor", one_of("tensor", "model")),
        "power": _corrector("1", number(0, 2)),
        "warmup": _corrector("0", whole(0, 10**9)),
        "start": _corrector("0.25", share),
        "clip_norm": _corrector("0", number(0, 1e9)),
        "sync_every": _corrector("1", whole(1, 10**6)),
        "warmup_sync": _corrector("1000000", whole(1, 10**6)),
        "ahead": _corrector("0", number(0, 1)),
        "flush": _corrector("0", word_or("0", share)),
        "buffers": _corrector("1", whole(1, 10**6)),
    }
    for key in {"values", "bits", "m"} - set(defaults):  # of some recipes only
        del parameters[key]
    for key, default in defaults.items():
        parameters[key] = Parameter(default, parameters[key].parse, parameters[key].of_corrector)
    return parameters


def _selection(v: Values) -> tuple[float, int | None]:
    """p and k, after a look at what does not go together."""
    if not v["decay"] and (v["ahead"] or v["flush"] != "0"):
        raise SpecError("ahead and flush are about what the error memory holds: they need a decay above 0")
    if v["scope"] == "model" and v["power"] != 1:
        raise SpecError("scope=model selects over all tensors together: power, their parts of a budget, must be 1")
    if v["k"] != "none" and (v["warmup"] or v["power"] != 1):
        raise SpecError("k is the same count for every tensor in every step: warmup and power need p instead")
    return float(v["p"]), None if v["k"] == "none" else int(v["k"])


def _build_sbc(v: Values) -> Converter:
    return SBC(*_selection(v), str(v["positions"]))


def _build_stc(v: Values) -> Converter:
    return STC(*_selection(v), str(v["positions"]))


def _build_topk(v: Values) -> Converter:
    return TopK(*_selection(v), str(v["values"]), str(v["positions"]))


def _build_m22(v: Values) -> Converter:
    return M22(*_selection(v), int(v["bits"]), int(v["m"]), str(v["positions"]))


_SBC, _STC, _DGC = "SBC, arXiv 1805.08768", "STC, arXiv 1903.02891", "DGC, arXiv 1712.01887"
_SPARSE = [
    Entry(
        "topk", "1% of the entries with their values: the most accurate of the sparse; not where over 20% must be sent",
        _DGC, _build_topk, _sparse(values="bf16", mask="off"),
    ),
    Entry(
        "dgc", "0.1% of the entries, momentum on the worker's side, a warm-up: every step at a few hundredths of a bit",
        _DGC, _build_topk, _sparse(p="0.001", values="fp16", warmup="400"),
    ),
    Entry(
        "m22", "10% of the entries, each as one of four levels: updates of federated clients, where stc is too coarse "
        "and topk too long; bits=3,m=0 where tails are heavy",
        "M22, arXiv 2301.09269", _build_m22, _sparse(p="0.1", bits="2", m="2", mask="off"),
    ),
    Entry(
        "stc", "1% of the entries, one magnitude, signs: a bit per position more than sbc, and both sides in each step",
        _STC, _build_stc, _sparse(),
    ),
    Entry(
        "sbc", "1% of the entries, one value, no signs: the fewest bytes; long trainings only, few steps lose accuracy",
        _SBC, _build_sbc, _sparse(),
    ),
    Entry(
        "stc2", "1.2% of the update of two steps: some 500 times fewer bytes, even where steps are few",
        _STC, _build_stc, _sparse(p="0.012", sync_every="2", power="0.5", warmup="100", start="0.1", buffers="5"),
    ),
    Entry(
        "sbc1", "0.1% in every step, the rest kept in each worker's own model: for links of any delay",
        _SBC, _build_sbc,
        _sparse(p="0.001", power="0.5", ahead="1", warmup="200", start="0.02", buffers="10", flush="0.1"),
    ),
    Entry(
        "sbc2", "1% of the update of ten steps: 2000 times fewer bytes and more; some accuracy where steps are few",
        _SBC, _build_sbc,
        _sparse(sync_every="10", power="0.5", ahead="0.5", warmup="200", start="0.1", warmup_sync="5", buffers="2",
                flush="0.1"),
    ),
    Entry(
        "sbc3", "1% of the update of a hundred steps: where bytes count and accuracy less; not for short trainings",
        _SBC, _build_sbc,
        _sparse(sync_every="100", power="0.5", ahead="0.5", warmup="200", warmup_sync="10", flush="0.1"),
    ),
    Entry("sbc1-paper", "sbc1 as the paper has it: to compare with", _SBC, _build_sbc,
          _sparse(p="0.001", small="same")),
    Entry("sbc2-paper", "sbc2 as the paper has it: to compare with", _SBC, _build_sbc,
          _sparse(sync_every="10", small="same")),
    Entry("sbc3-paper", "sbc3 as the paper has it: to compare with", _SBC, _build_sbc,
          _sparse(sync_every="100", small="same")),
    Entry(
        "diloco", "bf16 updates of fifty steps under an outer Nesterov optimizer: for large models and Adam",
        "DiLoCo, arXiv 2311.08105", lambda v: Cast(torch.bfloat16),
        {
            "sync_every": _corrector("50", whole(1, 10**6)),
            "outer_lr": _corrector("0.7", number(0, 10)),
            "outer_momentum": _corrector("0.9", number(0, 0.999)),
        },
    ),
]  # fmt: skip


# ── sums that need no decompression on the way ────────────────────────────────────────────────────


def _build_homomorphic(v: Values) -> Converter:
    if not v["decay"] and (v["rounding"] != "stochastic" or v["p"] != "all"):
        raise SpecError(
            "homomorphic: without an error memory, what the grid does not hold would be lost: decay=0 needs "
            "rounding=stochastic and p=all, which lose nothing on average"
        )
    p = None if v["p"] == "all" else float(v["p"])
    return Homomorphic(p, int(v["bits"]), str(v["rounding"]))


_HOMOMORPHIC = [
    Entry(
        "homomorphic", "integers that an aggregator or an all-reduce adds up as they are, 1% of the entries (p=all: "
        "those that are not zero): for many workers, and for gradients that are sparse by nature; not for two workers",
        "LHC, arXiv 2402.07529", _build_homomorphic,
        {
            "p": Parameter("0.01", word_or("all", share)),
            "bits": Parameter("32", one_of(*map(str, BITS))),
            "rounding": Parameter("nearest", one_of("nearest", "stochastic")),
            "decay": _decay("1"),
            "rounds": _corrector("auto", one_of("auto", "1", "2")),
        },
    ),
]  # fmt: skip
CATALOGUE = {entry.name: entry for entry in (*_DENSE, *_SPARSE, *_HOMOMORPHIC)}


def recipe(spec: str) -> Recipe:
    """Parse `name[:key=value,…]`."""
    if not isinstance(spec, str):
        raise SpecError(f"a spec is a string such as 'co3:format=fp4', not {type(spec).__name__}")
    return _recipe(spec)


@lru_cache(maxsize=1024)
def _recipe(spec: str) -> Recipe:
    name, given = split(spec)
    if name == "auto":
        raise SpecError(
            "auto is a choice among recipes, made while training: it is for gradwire.ddp.attach and "
            "gradwire.DataParallel, and not part of a dict; elsewhere choose a recipe, such as co3"
        )
    if name not in CATALOGUE:
        raise unknown_name("recipe", name, CATALOGUE)
    entry = CATALOGUE[name]
    values = _settled(entry.read(given), given)
    small = str(values.get("small", "same"))
    last = f"stc:p={values['flush']},decay={values['decay']},small={small}" if values.get("flush", "0") != "0" else None
    return Recipe(
        entry.spell(values), entry.codec(values), entry, values,
        None if small == "same" else recipe(small), recipe(last) if last else None,
    )  # fmt: skip


def _settled(values: Values, given: Collection[str]) -> Values:
    """Defaults that give way to what is given, which must not contradict itself.

    A warm-up leads from start down to p, and from warmup_sync up to sync_every.
    """
    if values.get("rounding") == "stochastic" and values.get("rate", "auto") != "auto":
        return _without_noise(values, given)
    if "warmup_sync" not in values:
        return values
    start, every_first = max(values["start"], values["p"]), min(values["warmup_sync"], values["sync_every"])
    if "start" in given and values["warmup"] and start != values["start"]:
        raise SpecError(f"start={values['start']} is below p={values['p']}: a warm-up begins with more entries than p")
    if "warmup_sync" in given and every_first != values["warmup_sync"]:
        raise SpecError(
            f"warmup_sync={values['warmup_sync']} is above sync_every={values['sync_every']}: exchanges are more "
            "frequent during warm-up, not less"
        )
    return {**values, "start": start, "warmup_sync": every_first}


def _without_noise(values: Values, given: Collection[str]) -> Values:
    """Of stochastic rounding at a low rate, an error memory would feed on its own noise, and grow without end."""
    if float(values["rate"]) >= DITHERED_RATE or not values["decay"]:
        return values
    if "decay" in given:
        raise SpecError(
            f"ecq: at rates below {DITHERED_RATE} stochastic rounding adds more noise than an error memory can take: "
            "use decay=0, or rounding=nearest"
        )
    return {**values, "decay": 0.0}


def codec(spec: str) -> Codec:
    """The stateless part of a recipe; parameters of its corrector are accepted and have no effect."""
    return recipe(spec).codec


def recipes() -> list[Entry]:
    """All names, each with its one-line description and paper."""
    return list(CATALOGUE.values())
