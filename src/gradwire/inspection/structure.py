"""What the shape of a tensor says of its entries, and what that saves: the recipes `co3`, `ecq` and `structured`.

All three are compared at the squared error that `co3` makes, so that their lengths mean the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from gradwire import codecs, kernels
from gradwire.catalogue.parse_recipe import codec
from gradwire.convert.tensor_view import as_kernels
from gradwire.inspection import frames

LEAST_ERROR, MOST_ERROR = 1e-5, 0.99  # the range of the recipes' parameter nmse


@dataclass
class Structure:
    """The structure of one tensor as a frame of `structured` has it, and its price."""

    view: str
    gain: float | None  # bits an entry that the transform of kernels saves; None without kernels
    rank: int
    factor_bits: float  # an entry
    classes: int
    class_bits: float  # an entry, of the scales that classes are known by
    nmse: float  # of all three recipes
    bits: dict[str, float]  # an entry, of the whole frame, by recipe
    estimated: bool  # from the first rows

    @property
    def saves(self) -> float:
        """How many times shorter the frame is than the shorter one of the others."""
        return min(bits for name, bits in self.bits.items() if name != "structured") / self.bits["structured"]


def structure_of(tensor: torch.Tensor, most: int) -> Structure | None:
    """Return the structure of a finite tensor, of whose rows at most `most` entries are looked at.

    It is None if there is none to speak of: the tensor is zero, or so short that its frame is another one.
    """
    x = _some_rows(tensor.detach().to_dense().float().contiguous(), most)
    co3 = codec("co3").encode(x)
    error = _relative_error(x, co3)
    if error is None:
        return None
    target = min(max(error, LEAST_ERROR), MOST_ERROR)
    found = {"co3": co3, **{name: codec(f"{name}:nmse={target:.6g}").encode(x) for name in ("ecq", "structured")}}
    report = frames.describe(found["structured"])
    if report.codec != "structured":
        return None
    details = report.details
    return Structure(
        view=str(details["view"]),
        gain=_transform_gain(x),
        rank=int(details["rank"]),
        factor_bits=8 * int(details["factor bytes"]) / x.numel(),
        classes=int(details.get("classes", 0)),
        class_bits=8 * int(details.get("scale bytes", 0)) / x.numel(),
        nmse=target,
        bits={name: 8 * len(frame) / x.numel() for name, frame in found.items()},
        estimated=x.numel() < tensor.numel(),
    )


def _some_rows(x: torch.Tensor, most: int) -> torch.Tensor:
    if x.numel() <= most:
        return x
    rows = most * len(x) // x.numel()
    return x[:rows] if rows else x.view(-1)[:most]


def _relative_error(x: torch.Tensor, frame: bytes) -> float | None:
    energy = float(x.double().square().sum())
    return float((codecs.decode(frame) - x).double().square().sum()) / energy if energy else None


def _transform_gain(x: torch.Tensor) -> float | None:
    """Return the bits an entry that are saved by knowing the energy of each coefficient of a kernel."""
    view = as_kernels(tuple(x.shape))
    if view is None:
        return None
    _, _, energies = kernels.prepare(torch.empty_like(x).view(-1), (x.view(-1), None, 0.0), view.shape, view.matrices)
    mean = float(energies.mean())
    if not 0 < mean < math.inf:
        return None
    return sum(-math.log2(max(float(energy) / mean, 2.0**-20)) / 2 for energy in energies) / len(energies)
