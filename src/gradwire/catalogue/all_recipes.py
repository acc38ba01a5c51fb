"""Every recipe in one list. A line has the name, what it is for, the paper, how to build it, and its parameters."""

from __future__ import annotations

import torch

from gradwire.catalogue.dense_parameters import (
    ADAM_PARAMETERS,
    CLIP,
    ECQ_PARAMETERS,
    STRUCTURED_PARAMETERS,
    UNBIASED,
    build_ecq,
    build_levels,
    build_minifloat,
    build_structured,
    levels_parameters,
    minifloat_parameters,
)
from gradwire.catalogue.homomorphic_parameters import HOMOMORPHIC_PARAMETERS, build_homomorphic
from gradwire.catalogue.sparse_parameters import (
    SPARSELOCO_PARAMETERS,
    build_m22,
    build_sbc,
    build_sparseloco,
    build_stc,
    build_topk,
    sparse_parameters,
)
from gradwire.catalogue.spec import Entry, Parameter, corrector, decay, number, one_of, whole
from gradwire.convert import sketch
from gradwire.convert.bingrad import BinGrad
from gradwire.convert.cast import Cast
from gradwire.convert.levels import MOST_LEVELS
from gradwire.convert.linear import LinearLevels
from gradwire.convert.orq import ORQ, parse_levels
from gradwire.convert.qsgd import QSGD
from gradwire.convert.signsgd import SignSGD
from gradwire.convert.sketch import CountSketch
from gradwire.convert.stored import Stored
from gradwire.convert.terngrad import TernGrad
from gradwire.convert.tinyscript import TinyScript

# ── dense: every entry is sent, coarsely ──────────────────────────────────────────────────────────

_DENSE = [
    Entry("none", "fp32 as it is: the baseline, and right where links are fast", "", lambda v: Stored()),
    Entry("fp16", "half precision, saturating: twice as small; bf16 where gradients are tiny", "",
          lambda v: Cast(torch.float16)),
    Entry("bf16", "bfloat16: twice as small, full range; no more than that", "", lambda v: Cast(torch.bfloat16)),
    Entry(
        "co3", "4-bit floats, entropy-coded, with error feedback: the one to start with; ecq where bytes count more "
        "than time",
        "CO3, arXiv 2203.09044", build_minifloat, minifloat_parameters("fp4", "rans", "0.9"),
    ),
    Entry(
        "ecq", "an even grid made for the entropy coder, at the rate (2 bits an entry) or error you name: the least "
        "error for its bytes of all dense recipes; co3 is quicker, and a sparse one better below 100 Mbit/s",
        "Gish and Pierce 1968; Sullivan 1996", build_ecq, ECQ_PARAMETERS,
    ),
    Entry(
        "structured", "an even grid on what a transform of kernels, a low-rank prediction and the scales of rows and "
        "columns leave: the fewest bytes of all dense recipes by far, for links below 1 Gbit/s; co3 is quicker",
        "docs/structure.md", build_structured, STRUCTURED_PARAMETERS,
    ),
    Entry(
        "adam", "structured, in units of Adam's own steps and with a warm-up: for AdamW on thin links, where other "
        "recipes cost loss; with SGD use structured",
        "docs/adam.md", build_structured, ADAM_PARAMETERS,
    ),
    Entry(
        "gennorm", "8-bit floats under a GenNorm Huffman code: where no error feedback can be kept",
        "arXiv 2111.07599", build_minifloat, minifloat_parameters("fp8", "huffman", "0"),
    ),
    Entry(
        "bingrad", "two levels a bucket (form=b), or ±b (pb): where one bit an entry is all there is; not below that",
        "BinGrad, arXiv 2002.11082", build_levels(BinGrad),
        levels_parameters("512", "bf16", decay("0"), form=Parameter("b", one_of("b", "pb")), clip=CLIP),
    ),
    Entry(
        "orq", "unbiased, the best 3, 5, 9 … levels: where symbols are packed; a plain grid is better entropy-coded",
        "ORQ, arXiv 2002.11082", build_levels(ORQ),
        levels_parameters(
            "2048", "bf16", UNBIASED, levels=Parameter("5", parse_levels),
            search=Parameter("greedy", one_of("greedy", "polished", "exact")), clip=CLIP,
        ),
    ),
    Entry(
        "qsgd", "unbiased, evenly spaced around zero: the usual baseline; coarse wherever a bucket has outliers",
        "QSGD, arXiv 1610.02132", build_levels(QSGD),
        levels_parameters(
            "1024", "bf16", UNBIASED, levels=Parameter("9", whole(3, MOST_LEVELS, 2)),
            norm=Parameter("max", one_of("l2", "max")),
        ),
    ),
    Entry(
        "terngrad", "unbiased, −s, 0 or s: simple and noisy; clip=2.5 is calmer, and no longer unbiased",
        "TernGrad, arXiv 1705.07878", build_levels(TernGrad), levels_parameters("512", "bf16", UNBIASED, clip=CLIP),
    ),
    Entry(
        "signsgd", "signs times their mean magnitude, with error feedback: one bit; never without the memory",
        "EF-signSGD, arXiv 1901.09847", build_levels(SignSGD), levels_parameters("512", "bf16", decay("1")),
    ),
    Entry(
        "linear", "unbiased, evenly spaced from least to greatest: a baseline that entropy coding makes a good one",
        "", build_levels(LinearLevels),
        levels_parameters("512", "bf16", UNBIASED, levels=Parameter("9", whole(2, MOST_LEVELS))),
    ),
    Entry(
        "tinyscript", "Lloyd levels of a fitted double Weibull: a baseline of CO3; co3 does better at fewer bits",
        "TinyScript, ICML 2020", build_levels(TinyScript),
        levels_parameters("0", "bf16", decay("0"), levels=Parameter("8", whole(2, MOST_LEVELS))),
    ),
    Entry(
        "countsketch", "hashed sums, the largest estimates kept: a baseline of CO3; top-k sends such entries exactly",
        "count-sketch, 2002", build_levels(CountSketch),
        {
            "ratio": Parameter("10", number(1, 1e6)),
            "rows": Parameter("3", whole(sketch.ROWS[0], sketch.ROWS[-1], 2)),
            "p": Parameter("0.01", number(1e-6, 1)),
            "precision": Parameter("fp32", one_of(*sketch.PRECISIONS)),
            "decay": decay("1"),
        },
    ),
]  # fmt: skip


# ── sparse: few entries are sent, the rest wait in the error memory ───────────────────────────────

_SBC, _STC, _DGC = "SBC, arXiv 1805.08768", "STC, arXiv 1903.02891", "DGC, arXiv 1712.01887"
_SPARSE = [
    Entry(
        "topk", "1% of the entries with their values: the most accurate of the sparse; not where over 20% must be sent",
        _DGC, build_topk, sparse_parameters(values="bf16", mask="off"),
    ),
    Entry(
        "dgc", "0.1% of the entries, momentum on the worker's side, a warm-up: every step at a few hundredths of a bit",
        _DGC, build_topk, sparse_parameters(p="0.001", values="fp16", warmup="400"),
    ),
    Entry(
        "m22", "10% of the entries, each as one of four levels: updates of federated clients, where stc is too coarse "
        "and topk too long; bits=3,m=0 where tails are heavy",
        "M22, arXiv 2301.09269", build_m22, sparse_parameters(p="0.1", bits="2", m="2", mask="off"),
    ),
    Entry(
        "stc", "1% of the entries, one magnitude, signs: a bit per position more than sbc, and both sides in each step",
        _STC, build_stc, sparse_parameters(),
    ),
    Entry(
        "sbc", "1% of the entries, one value, no signs: the fewest bytes; long trainings only, few steps lose accuracy",
        _SBC, build_sbc, sparse_parameters(),
    ),
    Entry(
        "stc2", "1.2% of the update of two steps: some 500 times fewer bytes, even where steps are few",
        _STC, build_stc,
        sparse_parameters(p="0.012", sync_every="2", power="0.5", warmup="100", start="0.1", buffers="5"),
    ),
    Entry(
        "sbc1", "0.1% in every step, the rest kept in each worker's own model: for links of any delay",
        _SBC, build_sbc,
        sparse_parameters(p="0.001", power="0.5", ahead="1", warmup="200", start="0.02", buffers="10", flush="0.1"),
    ),
    Entry(
        "sbc2", "1% of the update of ten steps: 2000 times fewer bytes and more; some accuracy where steps are few",
        _SBC, build_sbc,
        sparse_parameters(sync_every="10", power="0.5", ahead="0.5", warmup="200", start="0.1", warmup_sync="5",
                          buffers="2", flush="0.1"),
    ),
    Entry(
        "sbc3", "1% of the update of a hundred steps: where bytes count and accuracy less; not for short trainings",
        _SBC, build_sbc,
        sparse_parameters(sync_every="100", power="0.5", ahead="0.5", warmup="200", warmup_sync="10", flush="0.1"),
    ),
    Entry("sbc1-paper", "sbc1 as the paper has it: to compare with", _SBC, build_sbc,
          sparse_parameters(p="0.001", small="same")),
    Entry("sbc2-paper", "sbc2 as the paper has it: to compare with", _SBC, build_sbc,
          sparse_parameters(sync_every="10", small="same")),
    Entry("sbc3-paper", "sbc3 as the paper has it: to compare with", _SBC, build_sbc,
          sparse_parameters(sync_every="100", small="same")),
    Entry(
        "sparseloco", "the 3 largest of every 256 entries of the update of thirty steps, with signs and one magnitude: "
        "large models and Adam over the thinnest links; its memory stands for an outer optimizer",
        "SparseLoCo, arXiv 2508.15706", build_sparseloco, SPARSELOCO_PARAMETERS,
    ),
    Entry(
        "diloco", "bf16 updates of fifty steps under an outer Nesterov optimizer: for large models and Adam",
        "DiLoCo, arXiv 2311.08105", lambda v: Cast(torch.bfloat16),
        {
            "sync_every": corrector("50", whole(1, 10**6)),
            "outer_lr": corrector("0.7", number(0, 10)),
            "outer_momentum": corrector("0.9", number(0, 0.999)),
        },
    ),
]  # fmt: skip


# ── sums that need no decompression on the way ────────────────────────────────────────────────────

_HOMOMORPHIC = [
    Entry(
        "homomorphic", "integers that an aggregator or an all-reduce adds up as they are, 1% of the entries (p=all: "
        "those that are not zero): for many workers, and for gradients that are sparse by nature; not for two workers",
        "LHC, arXiv 2402.07529", build_homomorphic,
        HOMOMORPHIC_PARAMETERS,
    ),
]  # fmt: skip
CATALOGUE = {entry.name: entry for entry in (*_DENSE, *_SPARSE, *_HOMOMORPHIC)}


def recipes() -> list[Entry]:
    """Return all recipes, each with its name, one-line description and paper."""
    return list(CATALOGUE.values())
