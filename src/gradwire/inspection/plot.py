"""A picture of the largest tensors: the histogram with the three fitted densities, and the tails."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import torch

from gradwire.errors import GradwireError
from gradwire.inspection import goodness

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST = 6
SUFFIXES = (".png", ".pdf", ".svg")
# Colours that stay apart for readers who do not see red and green, and dashes for print.
STYLES: dict[str, Any] = {
    "normal": {"label": "Normal", "color": "#0072b2", "linestyle": ":"},
    "laplace": {"label": "Laplace", "color": "#e69f00", "linestyle": "--"},
    "gennorm": {"label": "GenNorm", "color": "#d55e00", "linestyle": "-"},
}
DATA = "#8a8a8a"
NEAREST = 0.05  # the tail is drawn from this many σ on


def check(path: Path) -> None:
    """Fail before the work is done, not after."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise GradwireError("--plot needs the extra `plot`: pip install 'gradwire[plot]'") from None
    if path.suffix.lower() not in SUFFIXES:
        raise GradwireError(f"cannot plot to {path}: the name must end in {', '.join(SUFFIXES)}")


def save(file: BinaryIO, kind: str, tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Draw the `MOST` largest of these finite tensors and write them to a file of this kind, such as png."""
    from matplotlib.figure import Figure

    largest = sorted(tensors, key=lambda item: -item[1].numel())[:MOST]
    samples = [(name, t.numel(), _standardised(t)) for name, t in largest]
    drawable = [(name, entries, z) for name, entries, z in samples if z is not None]
    if not drawable:
        raise GradwireError("nothing to plot: no tensor has two different entries")
    figure = Figure(figsize=(10, 0.7 + 2.7 * len(drawable)), layout="constrained")
    rows = figure.subplots(len(drawable), 2, squeeze=False)
    for (name, entries, z), (body, tail) in zip(drawable, rows, strict=True):
        models = goodness.fit(*goodness.moments(z))
        short = name if len(name) <= 36 else f"…{name[-35:]}"
        title = f"{short}   ({entries:,} entries, β = {models['gennorm'].beta:.2f})"
        body.set_title(title, loc="left", fontsize=9, fontweight="bold")
        distances = {STYLES[family]["label"]: goodness.wasserstein2(z, m) for family, m in models.items()}
        listed = ", ".join(f"{label} {distance:.2f}" for label, distance in distances.items())
        tail.set_title(f"W2 distance: {listed}", loc="right", fontsize=9)
        _draw_body(body, z, models)
        _draw_tail(tail, z, models)
    rows[-1, 0].set_xlabel("entry / σ")
    rows[-1, 1].set_xlabel("t / σ")
    handles, labels = rows[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=4, fontsize=9, frameon=False)
    figure.savefig(file, format=kind, dpi=150)


def _standardised(tensor: torch.Tensor) -> np.ndarray | None:
    x = tensor.detach().to_dense().reshape(-1).float().numpy()
    return goodness.standardise(goodness.even_sample(x[x != 0]))


def _draw_body(axes: Axes, z: np.ndarray, models: dict[str, goodness.CentredGenNorm]) -> None:
    # Far outliers would squeeze the body into one bin: the tail has a picture of its own.
    reach = min(float(np.abs(z).max()), max(5.0, float(np.quantile(np.abs(z), 0.999))))
    edges = np.linspace(-reach, reach, 82)
    heights = np.histogram(z, edges)[0] / (len(z) * np.diff(edges))
    axes.stairs(heights, edges, fill=True, color=DATA, alpha=0.55, label="entries")
    x = np.linspace(-reach, reach, 2001)
    for name, model in models.items():
        axes.plot(x, model.density(x), linewidth=1.4, **STYLES[name])
    lowest = 1 / (len(z) * (edges[1] - edges[0]))  # one entry in a bin
    axes.set(yscale="log", xlim=(-reach, reach), ylabel="density")
    axes.set_ylim(lowest / 2, 4 * max(heights.max(), models["laplace"].density(np.zeros(1))[0]))


def _draw_tail(axes: Axes, z: np.ndarray, models: dict[str, goodness.CentredGenNorm]) -> None:
    magnitude = np.sort(np.abs(z))
    beyond = 1 - np.arange(len(z)) / len(z)  # the share of entries at least this large
    shown = magnitude > NEAREST
    axes.plot(magnitude[shown], beyond[shown], ".", markersize=3, color=DATA, rasterized=True)
    t = np.geomspace(NEAREST, magnitude[-1] * 1.3, 400)
    for name, model in models.items():
        axes.plot(t, model.survival(t), linewidth=1.4, **STYLES[name])
    axes.set(xscale="log", yscale="log", xlim=(t[0], t[-1]), ylabel="P(|entry| > t)")
    axes.set_ylim(0.3 / len(z), 2)
