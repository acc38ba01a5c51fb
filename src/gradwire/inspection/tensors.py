"""All figures about one tensor: how it is distributed, and how many bytes it would take."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from gradwire import kernels
from gradwire.catalogue.parse_recipe import codec
from gradwire.inspection import code_lengths, frames, goodness
from gradwire.inspection.structure import Structure, structure_of
from gradwire.small_float_formats import Format, parse_format

HUGE = 1 << 24  # entries; of larger tensors an even sample stands for the whole
SIZES = ("fp4", "fp8", "e2m1", "e4m3")


@dataclass
class Size:
    """A tensor in a frame of one format."""

    bytes: int
    nmse: float  # ‖x − decoded‖² / ‖x‖²
    estimated: bool  # from a sample


@dataclass
class TensorReport:
    """All figures about one tensor; those that it does not have are None or empty."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    entries: int
    dense_bytes: int
    note: str = ""  # why figures are missing
    zeros: float | None = None  # the share of exact zeros
    mean: float | None = None  # in units of the deviation; the models are centred at 0
    beta: float | None = None
    alpha: float | None = None
    w2: dict[str, float] = field(default_factory=dict)
    ks: dict[str, float] = field(default_factory=dict)
    step: float | None = None
    entropy: float | None = None
    bits: dict[str, dict[str, float]] = field(default_factory=dict)  # model → coder → bits per entry
    sizes: dict[str, Size] = field(default_factory=dict)  # by format
    structure: Structure | None = None  # of tensors that are not all zero, and not short

    def as_dict(self) -> dict[str, Any]:
        """Return all figures, as `gradwire inspect --json` writes them."""
        return asdict(self)


def analyse(name: str, tensor: torch.Tensor, fmt: str = "fp4") -> TensorReport:
    """The report of a float tensor; `fmt` is the format whose code lengths are compared."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    entries = tensor.numel()
    report = TensorReport(name, dtype, tuple(tensor.shape), entries, entries * tensor.dtype.itemsize)
    if not entries:
        report.note = "empty"
        return report
    flat = tensor.detach().to_dense().reshape(-1).float()
    if not np.isfinite(kernels.absmax(flat)):
        report.note = "non-finite"
        return report
    sample = torch.from_numpy(goodness.even_sample(flat.numpy(), HUGE))
    _describe_distribution(report, sample.numpy())
    for each in dict.fromkeys((*SIZES, fmt)):
        _code(report, sample, parse_format(each), compare=each == fmt)
    report.structure = structure_of(tensor, HUGE)
    return report


def _describe_distribution(report: TensorReport, x: np.ndarray) -> None:
    nonzero = x[x != 0]
    report.zeros = 1 - len(nonzero) / len(x)
    if not len(nonzero):
        report.note = "all zero"
        return
    model = goodness.fit(*goodness.moments(nonzero))["gennorm"]
    report.beta, report.alpha = model.beta, model.alpha
    deviation = float(nonzero.std(dtype=np.float64))
    report.mean = float(nonzero.mean(dtype=np.float64)) / deviation if deviation else None
    ordered = goodness.standardise(goodness.even_sample(nonzero))
    if ordered is None:
        report.note = "constant"
        return
    for name, fitted in goodness.fit(*goodness.moments(ordered)).items():
        report.w2[name] = goodness.wasserstein2(ordered, fitted)
        report.ks[name] = goodness.kolmogorov_smirnov(ordered, fitted)


def _code(report: TensorReport, x: torch.Tensor, fmt: Format, compare: bool) -> None:
    """Encode as one frame of this format; if asked for, compare the models on its symbols."""
    frame = codec(f"co3:format={fmt}").encode(x.view(report.shape) if x.numel() == report.entries else x)
    steps = frames.describe(frame).steps
    exact = x.double()
    error = 0.0
    if steps and report.beta:  # else the frame holds the entries themselves, or nothing but zeros
        symbols = kernels.to_symbols(x, steps[0], fmt)
        values = torch.from_numpy(fmt.levels * steps[0])
        error = float((exact - values[symbols.int()]).square().sum() / exact.square().sum())
        if compare:
            counts = kernels.histogram(symbols, fmt.symbols)
            report.step, report.entropy = steps[0], code_lengths.entropy(counts)
            for name, (frequencies, own) in code_lengths.models(fmt, exact.numpy(), steps[0], counts).items():
                report.bits[name] = code_lengths.bits_per_entry(counts, frequencies, own)
    length = round(len(frame) * report.entries / x.numel())
    report.sizes[str(fmt)] = Size(length, error, x.numel() < report.entries)
