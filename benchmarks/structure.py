"""What the structure of gradients is worth: bits an entry at equal squared error, layer by layer.

    python benchmarks/structure.py FOLDER [--nncodec PYTHON] [--markdown benchmarks/results/structure.md]
    python benchmarks/structure.py      # only how long it takes, on tensors made up, in half a minute

FOLDER holds NAME.npz files, one for each network, of fp32 gradients with their shapes; where a file has an array
`layers`, its other arrays are flat gradients of several layers, one after the other, which have these lengths; a flat
layer whose entries look like 3×3 kernels, one after the other, is taken for such. Frames are whole frames, headers
included. Every method is brought to the same relative squared error, within 1%: that of CO3's fp4, 6% and 20%. zstd
gets the symbols of ecq, packed to nibbles where they fit. NNCodec is measured where PYTHON is the interpreter of an
environment that has it (`pip install 'numpy<2' nncodec==2.1.3`); it gets matrices.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import zstandard
from rich.progress import track

import gradwire
import structure_speed
from gradwire import kernels
from gradwire.convert.grid_search import Curve

FEWEST = 4096  # entries of a layer that is looked at
OURS = {
    "structured": "",
    "without transform": ",transform=off",
    "without classes": ",classes=off",
    "without prediction": ",rank=0",
}
SMOOTH = 1.5
TARGETS = {"fp4": None, "6%": 0.06, "20%": 0.20}


@dataclass
class Layer:
    """One layer of a network."""

    network: str
    name: str
    gradient: torch.Tensor

    @property
    def kind(self) -> str:
        """What the shape says the layer is."""
        shape = self.gradient.shape
        if len(shape) > 2 and math.prod(shape[2:]) > 1:
            return "kernels " + "×".join(map(str, shape[2:]))
        return "matrix" if len(shape) > 1 else "flat"


def layers(folder: Path, worker: str, steps: list[str]) -> Iterator[Layer]:
    for path in sorted(folder.glob("*.npz")):
        with np.load(path) as file:
            lengths = file["layers"] if "layers" in file.files else None
            for key in file.files:
                if key == "layers" or worker not in key or (steps and not any(key.startswith(s) for s in steps)):
                    continue
                tensor = torch.from_numpy(file[key])
                parts = [tensor] if lengths is None else map(as_kernels, tensor.split(lengths.tolist()))
                for number, part in enumerate(parts):
                    if part.numel() >= FEWEST and part.any():
                        yield Layer(path.stem, key if lengths is None else f"{key} {number}", part.clone())


def as_kernels(flat: torch.Tensor) -> torch.Tensor:
    """A flat layer as 3×3 kernels, if the first cosine of each nine entries has more energy than it would by chance."""
    kernels_of = flat[: flat.numel() // 9 * 9].view(-1, 1, 3, 3)
    smooth = float(kernels_of.sum((1, 2, 3)).double().square().mean() / 9 / kernels_of.double().square().mean())
    return kernels_of.contiguous() if smooth > SMOOTH else flat


def error_of(frame: bytes, tensor: torch.Tensor) -> float:
    wide = tensor.double()
    return float((gradwire.decode(frame).double() - wide).square().sum() / wide.square().sum())


def at_error(spec: str, tensor: torch.Tensor, target: float) -> bytes:
    """A frame with this relative squared error, to 1% if three corrections are enough."""
    asked = target
    for _ in range(4):
        frame = gradwire.codec(spec.format(f"{min(max(asked, 1e-5), 0.99):.8f}")).encode(tensor)
        error = error_of(frame, tensor)
        if abs(error / target - 1) < 0.01:
            break
        asked *= target / error
    return frame


def by_zstd(tensor: torch.Tensor, target: float) -> int:
    """Bytes of zstd-19 on the symbols of the even grid that ecq would take, packed to nibbles if they fit."""
    flat = tensor.reshape(-1).contiguous()
    curve = Curve(kernels.sample(flat, None, 0.0).numpy())
    grid = curve.find(error=target * curve.energy)
    symbols = torch.sign(flat) * torch.floor(flat.abs() / grid.step + grid.shift)
    largest = int(symbols.abs().max())
    if largest <= 7:
        nibbles = torch.nn.functional.pad(symbols + 7, (0, flat.numel() % 2)).to(torch.uint8)
        packed = (nibbles[::2] | nibbles[1::2] << 4).numpy().tobytes()
    else:
        packed = symbols.to(torch.int8 if largest <= 127 else torch.int16).numpy().tobytes()
    return len(zstandard.ZstdCompressor(level=19).compress(packed))


def by_nncodec(python: str, layer_list: list[Layer], targets: list[float]) -> list[tuple[int, float, float]]:
    """Bytes, error and seconds of NNCodec for each layer and target, by a process of its own environment."""
    with tempfile.TemporaryDirectory() as folder:
        arrays = {str(i): layer.gradient.numpy() for i, layer in enumerate(layer_list)}
        np.savez(f"{folder}/in.npz", **arrays)
        Path(f"{folder}/targets.json").write_text(json.dumps(targets))
        script = Path(__file__).with_name("nncodec_peer.py")
        subprocess.run([python, str(script), folder], check=True)
        return [tuple(each) for each in json.loads(Path(f"{folder}/out.json").read_text())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="gradients; without it, speed is all that is measured")
    parser.add_argument("--worker", default="worker0", help="only arrays with this in their name")
    parser.add_argument("--step", action="append", default=[], help="only arrays that begin with this, such as step60.")
    parser.add_argument("--nncodec", metavar="PYTHON", help="an interpreter that has NNCodec")
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    if options.folder is None:
        print(structure_speed.table(structure_speed.measure()))
        return
    torch.set_num_threads(1)
    found = list(layers(options.folder, options.worker, options.step))
    if not found:
        sys.exit(f"no gradients of {FEWEST} entries or more in {options.folder}")
    bits: dict[tuple[str, str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])  # (group, target, method)
    seconds: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    errors = []
    for layer in track(found, "layers"):
        co3 = gradwire.codec("co3").encode(layer.gradient)
        fp4 = error_of(co3, layer.gradient)
        for name, value in TARGETS.items():
            target = fp4 if value is None else value
            sizes = {"co3": len(co3)} if value is None else {}
            sizes["ecq"] = len(at_error("ecq:nmse={}", layer.gradient, target))
            for method, parts in OURS.items():
                started = time.process_time()
                frame = at_error("structured:nmse={}" + parts, layer.gradient, target)
                seconds[method][0] += time.process_time() - started
                seconds[method][1] += layer.gradient.numel()
                sizes[method] = len(frame)
            sizes["zstd-19"] = by_zstd(layer.gradient, target)
            errors.append(target)
            for method, size in sizes.items():
                for group in (layer.network, layer.kind):
                    total = bits[group, name, method]
                    total[0] += 8 * size
                    total[1] += layer.gradient.numel()
    if options.nncodec:
        measured = by_nncodec(options.nncodec, found, errors)
        for i, (size, _, spent) in enumerate(measured):
            layer, name = found[i // len(TARGETS)], list(TARGETS)[i % len(TARGETS)]
            seconds["NNCodec"][0] += spent
            seconds["NNCodec"][1] += layer.gradient.numel()
            for group in (layer.network, layer.kind):
                bits[group, name, "NNCodec"][0] += 8 * size
                bits[group, name, "NNCodec"][1] += layer.gradient.numel()
    report(found, bits, seconds, options)


def report(found: list[Layer], bits: dict, seconds: dict, options: argparse.Namespace) -> None:
    methods = ["co3", "ecq", *OURS, "zstd-19"] + ["NNCodec"] * bool(options.nncodec)
    groups = list(dict.fromkeys([layer.network for layer in found])) + sorted({layer.kind for layer in found})
    lines = [
        "| gradients | error | " + " | ".join(methods) + " | structured / ecq |",
        "|---" * (len(methods) + 3) + "|",
    ]
    for group in groups:
        for name in TARGETS:
            row = {m: bits[group, name, m][0] / bits[group, name, m][1] for m in methods if bits[group, name, m][1]}
            shown = [f"{row[m]:.3f}" if m in row else "" for m in methods]
            lines.append(f"| {group} | {name} | " + " | ".join(shown) + f" | {row['structured'] / row['ecq']:.2f} |")
    text = "\n".join(lines)
    if options.nncodec:
        spent, entries = seconds["NNCodec"]
        text += f"\n\nNNCodec took {4 * entries / spent / 1e6:.0f} MB of fp32 a second."
    print(text)
    if options.markdown:
        arguments = " ".join(a for a in sys.argv[1:] if not a.startswith("/"))
        options.markdown.write_text(f"# Bits an entry at equal squared error\n\n`python benchmarks/structure.py "
                                    f"{arguments}`\n\n{text}\n")  # fmt: skip


if __name__ == "__main__":
    main()
