"""Plots of benchmarks/backward_policies.py: a panel for each problem, a colour for each policy."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from backward_policies import CENTRED, EXACT
from backward_problems import PROBLEMS

COLOURS = {"topk": "tab:blue", "weightedk": "tab:green", "randk": "tab:red"}
SMALL = 1 / 8  # K/M, where a plot has something else below
Case = tuple[str, float, float]  # policy, decay, share
Curves = list[list[float]]  # of the seeds
Results = dict[tuple[str, str], dict[Case, Curves]]  # by problem and optimizer
Draw = Callable[[Any, str, dict[Case, Curves]], None]


def finals(curves: Curves) -> list[float]:
    return [curve[-1] for curve in curves]


def draw_policies(axes: Any, name: str, cases: dict[Case, Curves]) -> None:
    """The last score over K/M: solid with memory, dashed without, dotted with memory and centred."""
    for policy, colour in COLOURS.items():
        for how, decay, style in (("", 1.0, "-o"), ("", 0.0, "--o"), (CENTRED, 1.0, ":s")):
            shares = sorted(share for p, d, share in cases if (p, d) == (policy + how, decay))
            ends = [finals(cases[policy + how, decay, share]) for share in shares]
            label = policy + (how if decay else ", no memory")
            axes.errorbar(range(-len(shares), 0), [np.mean(e) for e in ends], [np.std(e) for e in ends], label=label,
                          fmt=style, color=colour, markersize=4, capsize=2, alpha=0.85)  # fmt: skip
    shares = sorted({case[2] for case in cases if case[0] != EXACT})
    axes.set_xticks(range(-len(shares), 0), [str(Fraction(share).limit_denominator(144)) for share in shares])
    axes.set_xlabel("K/M")


def draw_decays(axes: Any, name: str, cases: dict[Case, Curves]) -> None:
    for policy, colour in COLOURS.items():
        decays = sorted(d for p, d, share in cases if (p, share) == (policy, SMALL))
        ends = [finals(cases[policy, decay, SMALL]) for decay in decays]
        axes.errorbar(decays, [np.mean(e) for e in ends], [np.std(e) for e in ends], label=policy, fmt="-o",
                      color=colour, markersize=4, capsize=2, alpha=0.85)  # fmt: skip
    axes.set_xlabel("decay (0: no memory), K/M = 1/8")


def draw_curves(axes: Any, name: str, cases: dict[Case, Curves]) -> None:
    for (policy, decay, share), curves in cases.items():
        plain = policy.removesuffix(CENTRED)
        if share == SMALL and (decay == 1 or (decay == 0 and policy == plain)):
            style = {"color": COLOURS[plain], "linestyle": ":" if policy != plain else "-" if decay else "--"}
            axes.plot(epochs(name, curves), np.mean(curves, axis=0), label=policy + ("" if decay else ", no memory"),
                      **style)  # fmt: skip
    exact = cases[EXACT, 0.0, 1.0]
    axes.plot(epochs(name, exact), np.mean(exact, axis=0), color="black", linewidth=2)
    axes.set_xlabel("epoch, K/M = 1/8")


def epochs(name: str, curves: Curves) -> list[int]:
    points = len(curves[0])
    return [round(PROBLEMS[name].epochs * (i + 1) / points) for i in range(points)]


def plot(results: Results, draw: Draw, path: Path) -> None:
    """A panel for each problem, by SGD; the end of the exact training as a band of ± σ."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    panels = {name: cases for (name, optimizer), cases in results.items() if optimizer == "sgd"}
    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure, grid = pyplot.subplots(rows, columns, figsize=(5 * columns, 3.8 * rows), squeeze=False)
    for axes, (name, cases) in zip(grid.flat, panels.items(), strict=False):
        ends = finals(cases[EXACT, 0.0, 1.0])
        axes.axhspan(np.mean(ends) - np.std(ends), np.mean(ends) + np.std(ends), color="grey", alpha=0.4, label=EXACT)
        draw(axes, name, cases)
        axes.set(title=PROBLEMS[name].title, ylabel=PROBLEMS[name].measure)
        axes.title.set_fontsize(10)
        if PROBLEMS[name].measure == "MSE":  # what is far worse than exact leaves the panel: it would hide the others
            axes.set(yscale="log", ylim=(0.95 * min(ends), 5 * max(ends)))
        axes.grid(alpha=0.3)
    for axes in grid.flat[len(panels) :]:
        axes.axis("off")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncol=math.ceil(len(labels) / 2))
    figure.tight_layout(rect=(0, 0.12 / rows, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90, metadata={"Software": None})
    pyplot.close(figure)


DRAWINGS: dict[str, Draw] = {"policies": draw_policies, "decays": draw_decays, "curves": draw_curves}
