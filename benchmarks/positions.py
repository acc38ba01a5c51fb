"""Bits that the position of an entry costs: random positions beside the paper and the entropy, and recorded gradients.

    python benchmarks/positions.py [FOLDER]

FOLDER has files NAME.npz: flat fp32 arrays, and `layers`, the lengths of the layers laid end to end in each. All
sizes are whole frames, header and values included; layers of fewer than 50,000 entries are left out.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import torch

import gradwire
from gradwire.compress import golomb
from gradwire.convert.sparse import sent_positions

SHARES = (0.1, 0.01, 0.001)
SMALLEST = 50_000
WAYS = ("golomb", "rans", "auto")
METHODS = (
    "sbc", "stc", "topk", "topk:values=fp8", "topk:values=fp4", "m22:m=0", "m22", "m22:m=4", "m22:bits=3",
    "m22:bits=3,m=0",
)  # fmt: skip
DENSE = ("co3", "topk:p=0.2,values=fp4")  # where sparse meets dense


def entropy(p: float) -> float:
    """Bits per position, where each entry is sent with probability p whatever its neighbours do."""
    return (-p * math.log2(p) - (1 - p) * math.log2(1 - p)) / p


def spec(method: str, p: float, **more: str) -> str:
    name, _, rest = method.partition(":")
    return f"{name}:p={p}" + ("," + rest if rest else "") + "".join(f",{k}={v}" for k, v in more.items())


def bits_per_position(layers: list[torch.Tensor], p: float, way: str) -> float:
    frames = [gradwire.codec(spec("sbc", p, positions=way)).encode(layer) for layer in layers]
    return 8 * sum(map(len, frames)) / sum(sent_positions(frame).numel() for frame in frames)


def cost(layers: list[torch.Tensor], method: str) -> tuple[float, float]:
    """Bits per entry, and the squared error as a part of the squares."""
    size, error, square = 0, 0.0, 0.0
    for layer in layers:
        frame = gradwire.codec(method).encode(layer)
        size += 8 * len(frame)
        error += float((layer - gradwire.decode(frame)).double().square().sum())
        square += float(layer.double().square().sum())
    return size / sum(layer.numel() for layer in layers), error / square


def layers_of(path: Path) -> list[torch.Tensor]:
    with np.load(path) as file:
        lengths = file["layers"].tolist()
        tensors = [torch.from_numpy(file[name]) for name in file.files if name != "layers"]
    return [layer for tensor in tensors for layer in tensor.split(lengths) if layer.numel() >= SMALLEST]


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sources = {"random, 1 M entries": [torch.randn(1_000_000)]}
    if len(sys.argv) > 1:
        sources |= {path.stem: layers_of(path) for path in sorted(Path(sys.argv[1]).glob("*.npz"))}
    print("bits per position, sbc\n\n| | p | paper | entropy | " + " | ".join(WAYS) + " |\n|" + "---|" * 7)
    for name, layers in sources.items():
        for p in SHARES:
            sizes = " | ".join(f"{bits_per_position(layers, p, way):.3f}" for way in WAYS)
            print(f"| {name} | {p:.1%} | {golomb.expected_bits(p):.3f} | {entropy(p):.3f} | {sizes} |")
    recorded = list(sources.items())[1:]
    print("\nbits per entry / squared error\n\n| | p | " + " | ".join(METHODS) + " |\n|" + "---|" * (2 + len(METHODS)))
    for name, layers in recorded:
        for p in SHARES:
            print(f"| {name} | {p:.1%} | " + costs(layers, [spec(method, p) for method in METHODS]))
    print("\n| | " + " | ".join(DENSE) + " |\n|" + "---|" * 3)
    for name, layers in recorded:
        print(f"| {name} | " + costs(layers, list(DENSE)))


def costs(layers: list[torch.Tensor], specs: list[str]) -> str:
    return "".join(f"{size:.4f} / {error:.3f} | " for size, error in (cost(layers, one) for one in specs)).rstrip()


if __name__ == "__main__":
    main()
