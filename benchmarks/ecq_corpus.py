"""ecq beside CO3's fp4 at the same bytes, on recorded gradients.

    python benchmarks/ecq_corpus.py FOLDER [--markdown benchmarks/results/ecq.md]

FOLDER holds NAME.npz files, one for each network: arrays of gradients, several layers one after the other, and
`layers`, their lengths. Every layer is a frame. The rate of ecq is what CO3's frame of that layer takes, corrected
until ecq's own frame, header and all, is at most as long.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import gradwire

RATES = (1.0, 1.5, 2.0, 2.5)


@dataclass
class Coded:
    bytes: int
    error: float  # Σ(g − ĝ)²


@dataclass
class Layer:
    network: str
    entries: int
    energy: float
    co3: Coded
    equal: Coded  # ecq at CO3's bytes
    better: Coded  # ecq at CO3's error
    at_rate: dict[float, Coded]


def coded(spec: str, tensor: torch.Tensor) -> Coded:
    frame = gradwire.codec(spec).encode(tensor)
    return Coded(len(frame), float((gradwire.decode(frame).double() - tensor.double()).square().sum()))


def at_bytes(limit: int, tensor: torch.Tensor) -> Coded:
    """ecq at the largest rate that does not exceed as many bytes."""
    rate = 8 * (limit - 14) / tensor.numel()
    best = None
    for _ in range(6):
        found = coded(f"ecq:rate={rate:.6g}", tensor)
        if found.bytes <= limit and (best is None or found.error < best.error):
            best = found
        if 0.998 * limit <= found.bytes <= limit:
            break
        rate *= (0.9995 * limit - 14) / (found.bytes - 14)
    assert best is not None, "no rate fits"
    return best


def layers_of(file: Path) -> Iterator[Layer]:
    with np.load(file) as data:
        ends = np.cumsum(data["layers"])
        for name in data.files:
            if name == "layers":
                continue
            for piece in np.split(data[name], ends[:-1]):
                tensor = torch.from_numpy(piece.copy())
                energy = float(tensor.double().square().sum())
                if energy:
                    co3 = coded("co3", tensor)
                    yield Layer(
                        file.stem, tensor.numel(), energy, co3, at_bytes(co3.bytes, tensor),
                        coded(f"ecq:nmse={co3.error / energy:.6g}", tensor),
                        {rate: coded(f"ecq:rate={rate}", tensor) for rate in RATES},
                    )  # fmt: skip


def less(new: float, old: float) -> str:
    return f"{1 - new / old:.1%}"


def markdown(layers: list[Layer]) -> str:
    lines = [
        "# ecq beside CO3's fp4, on recorded gradients",
        "Written by `python benchmarks/ecq_corpus.py FOLDER`, which says what FOLDER holds. Every layer is a frame, "
        "and all its bytes are counted.",
        "## The same bytes",
        "Each layer has at most the bytes of its CO3 frame. NMSE of a network: the sum of the squared errors over the "
        "sum of the energies, and the mean over its layers.",
        "| network | layers | bits an entry, CO3 | ecq | NMSE, CO3 | ecq | less | mean NMSE of layers, CO3 | ecq "
        "| less | least gain of a layer | the same error in |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    networks = sorted({x.network for x in layers})
    for network in networks:
        own = [x for x in layers if x.network == network]
        entries, energy = sum(x.entries for x in own), sum(x.energy for x in own)
        bits = [8 * sum(getattr(x, k).bytes for x in own) / entries for k in ("co3", "equal")]
        total = [sum(getattr(x, k).error for x in own) / energy for k in ("co3", "equal")]
        mean = [float(np.mean([getattr(x, k).error / x.energy for x in own])) for k in ("co3", "equal")]
        worst = min(1 - x.equal.error / x.co3.error for x in own)
        fewer = less(sum(x.better.bytes for x in own), sum(x.co3.bytes for x in own))
        lines.append(
            f"| {network} | {len(own)} | {bits[0]:.3f} | {bits[1]:.3f} | {total[0]:.4f} | {total[1]:.4f} | "
            f"{less(total[1], total[0])} | {mean[0]:.4f} | {mean[1]:.4f} | {less(mean[1], mean[0])} | {worst:.1%} | "
            f"{fewer} fewer bytes |"
        )
    lines += [
        "## Rates",
        "Mean NMSE over the layers of a network, and real bits an entry.",
        "| network | CO3 |" + "".join(f" ecq:rate={r:g} |" for r in RATES),
        "|---|---|" + "---|" * len(RATES),
    ]
    for network in networks:
        own = [x for x in layers if x.network == network]
        cells = []
        for found in [[x.co3 for x in own], *[[x.at_rate[r] for x in own] for r in RATES]]:
            mean = np.mean([c.error / x.energy for c, x in zip(found, own, strict=True)])
            cells.append(f"{mean:.4f} at {8 * sum(c.bytes for c in found) / sum(x.entries for x in own):.2f}")
        lines.append(f"| {network} | " + " | ".join(cells) + " |")
    text = "\n".join(lines) + "\n"
    for mark in (
        "## The",
        "## Rates",
        "| network | layers",
        "| network | CO3 |",
        "Each layer has",
        "Mean NMSE over",
        "Written",
    ):
        text = text.replace(f"\n{mark}", f"\n\n{mark}")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--markdown", type=Path, help="write the tables to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    layers = [layer for file in sorted(options.folder.glob("*.npz")) for layer in layers_of(file)]
    if not layers:
        parser.error(f"no gradients in the files of {options.folder}")
    text = markdown(layers)
    if options.markdown:
        options.markdown.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
