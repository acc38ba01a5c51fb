"""Quantizers with a few levels: error at equal numbers of levels, error at equal real bits, and speed on one core.

    python benchmarks/quantizers.py [CORPUS] [--entries 16777216] [--save]

CORPUS is a folder of NAME.npz, each with fp32 arrays of gradients and `layers`, the lengths of the layers laid end to
end in them. Every layer is a frame of its own, and bits are the bits of whole frames. Speeds are multiples of torch's
own copy of the same tensor and of each method written in eager torch, measured in the same loop.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

import gradwire
from machine import processor

BUCKET = 2048  # where methods are compared at equal numbers of levels
Curve = list[tuple[float, float]]  # (bits per entry, NMSE), ascending


# ── the corpus ────────────────────────────────────────────────────────────────────────────────────


def layers(path: Path) -> list[torch.Tensor]:
    """All layers of the first worker's gradients."""
    with np.load(path) as arrays:
        cuts = np.cumsum(arrays["layers"])[:-1]
        names = [name for name in arrays.files if name != "layers" and not name.endswith("worker1")]
        return [torch.from_numpy(part.copy()) for name in names for part in np.split(arrays[name], cuts)]


def measure(spec: str, tensors: list[torch.Tensor]) -> tuple[float, float]:
    """(bits per entry, NMSE) over all of them; the error of decoded frames, not an expectation."""
    codec = gradwire.codec(spec)
    length = error = energy = 0.0
    for seed, tensor in enumerate(tensors):
        frame = codec.encode(tensor, seed=seed << 32)
        length += 8 * len(frame)
        error += float((gradwire.decode(frame).double() - tensor.double()).square().sum())
        energy += float(tensor.double().square().sum())
    return length / sum(t.numel() for t in tensors), error / energy


def equal_levels(tensors: list[torch.Tensor]) -> dict[str, dict[str, float]]:
    """NMSE of unbiased methods with the same number of levels in the same buckets."""
    table = {}
    for s in (3, 5, 9):
        common = f"bucket={BUCKET},precision=bf16"
        specs = {
            "orq": f"orq:levels={s},{common}",
            "orq polished": f"orq:levels={s},search=polished,{common}",
            "orq exact": f"orq:levels={s},search=exact,{common}",
            "linear": f"linear:levels={s},{common}",
            "qsgd max": f"qsgd:levels={s},norm=max,{common}",
            "qsgd l2": f"qsgd:levels={s},norm=l2,{common}",
        }
        if s == 3:
            specs["terngrad"] = f"terngrad:{common}"
        table[str(s)] = {name: measure(spec, tensors)[1] for name, spec in specs.items()}
    return table


def curves(tensors: list[torch.Tensor]) -> dict[str, Curve]:
    """What each method makes of its bits, over its own range of levels or rates."""
    many = (3, 5, 7, 9, 13, 17, 21, 25, 33, 41, 49, 65, 81, 97, 129, 161, 193, 225, 255)
    specs = {
        "orq": [f"orq:levels={s}" for s in (3, 5, 9, 17, 33)],
        "qsgd": [f"qsgd:levels={s},bucket=0" for s in many],
        "linear": [f"linear:levels={s},bucket=0" for s in many],
    }
    if any(entry.name == "ecq" for entry in gradwire.recipes()):
        specs["ecq"] = [f"ecq:rate={rate}" for rate in (0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5)]
    return {name: sorted(measure(spec, tensors) for spec in given) for name, given in specs.items()}


def at_bits(curve: Curve, bits: float) -> float | None:
    """NMSE at these bits, log-linear between the points of the curve; None outside."""
    if not curve[0][0] <= bits <= curve[-1][0]:
        return None
    return float(np.exp(np.interp(bits, [b for b, _ in curve], [np.log(e) for _, e in curve])))


def equal_bits(tensors: list[torch.Tensor]) -> dict[str, dict[str, float | None]]:
    found = curves(tensors)
    anchors = {f"orq-{s}": measure(f"orq:levels={s}", tensors) for s in (3, 5, 9)}
    anchors["co3 fp4"] = measure("co3", tensors)
    table: dict[str, dict[str, float | None]] = {}
    for name, (bits, error) in anchors.items():
        row: dict[str, float | None] = {"bits": bits} | {method: at_bits(c, bits) for method, c in found.items()}
        row["co3 fp4"] = error if name == "co3 fp4" else None
        table[name] = row
    return table


# ── speed ─────────────────────────────────────────────────────────────────────────────────────────


class Eager:
    """The methods as a careful user of torch writes them: few passes, in place, symbols as bytes, no packing."""

    def __init__(self, gradient: torch.Tensor):
        self.x = gradient
        self.memory = torch.zeros_like(gradient)

    def qsgd(self, steps: int = 4, bucket: int = 1024) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.x.view(-1, bucket)
        norm = x.abs().amax(1, keepdim=True)
        scaled = (x * (steps / norm)).add_(torch.rand_like(x))
        return scaled.floor_().to(torch.int8), norm

    def terngrad(self, bucket: int = 512) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.x.view(-1, bucket)
        norm = x.abs().amax(1, keepdim=True)
        return (x / norm).add_(torch.rand_like(x)).floor_().to(torch.int8), norm

    def signsgd(self, bucket: int = 512) -> tuple[torch.Tensor, torch.Tensor]:
        u = torch.add(self.x, self.memory).view(-1, bucket)
        scale = u.abs().mean(1, keepdim=True)
        signs = u >= 0
        torch.sub(u, torch.where(signs, scale, -scale), out=self.memory.view(-1, bucket))
        return signs, scale

    def linear(self, levels: int = 9, bucket: int = 512) -> tuple[torch.Tensor, ...]:
        x = self.x.view(-1, bucket)
        low, high = x.aminmax(dim=1, keepdim=True)
        scaled = (x - low).mul_((levels - 1) / (high - low)).add_(torch.rand_like(x))
        return scaled.floor_().to(torch.uint8), low, high


OURS = ("orq:levels=3", "orq", "orq:levels=9", "bingrad", "bingrad:form=pb", "qsgd", "terngrad", "signsgd", "linear")


def speed(entries: int, rounds: int) -> dict[str, dict[str, float]]:
    torch.manual_seed(0)
    magnitude = torch.distributions.Gamma(1.5, 1.0).sample((entries,)).pow(1.5)
    gradient = magnitude * torch.sign(torch.randn(entries)) * 1e-3
    spare, memory, eager = torch.empty(entries), torch.zeros(entries), Eager(gradient)
    frame = torch.empty(gradwire.codec("orq").max_frame_bytes(gradient), dtype=torch.uint8)
    tasks: dict[str, Callable[[], object]] = {"torch copy": lambda: spare.copy_(gradient)}
    frames = {}
    for spec in OURS:
        codec = gradwire.codec(spec)
        frames[spec] = frame[: codec.encode_into(gradient, frame)].clone()
        residual = memory if gradwire.recipe(spec).decay else None
        tasks[f"{spec} encode"] = lambda c=codec, e=residual: c.encode_into(gradient, frame, residual=e, seed=1)  # type: ignore[misc]
        tasks[f"{spec} decode"] = lambda f=frames[spec]: gradwire.decode(f, out=spare)  # type: ignore[misc]
    for name in ("qsgd", "terngrad", "signsgd", "linear"):
        tasks[f"{name} eager"] = getattr(eager, name)
    seconds = dict.fromkeys(tasks, float("inf"))
    for _ in range(rounds):
        for name, task in tasks.items():
            start = time.thread_time()
            task()
            seconds[name] = min(seconds[name], time.thread_time() - start)
    table = {}
    for name, t in seconds.items():
        table[name] = {"ms": 1e3 * t, "gb_per_s": 4e-9 * entries / t, "times_copy": seconds["torch copy"] / t}
        spec, _, way = name.rpartition(" ")
        if way == "encode":
            table[name]["bits_per_entry"] = 8 * len(frames[spec]) / entries
            if f"{spec} eager" in seconds:
                table[name]["times_eager"] = seconds[f"{spec} eager"] / t
    return table


# ── report ────────────────────────────────────────────────────────────────────────────────────────


def _show(value: float | None) -> str:
    return f"{'':>10s}" if value is None else f"{value:10.4f}"


def print_rows(title: str, rows: dict[str, dict]) -> None:
    columns = list(dict.fromkeys(key for row in rows.values() for key in row))
    print(f"\n{title}\n{'':24s}" + "".join(f"{c:>16s}" for c in columns))
    for name, row in rows.items():
        print(f"{name:24s}" + "".join(f"{_show(row.get(c)):>16s}" for c in columns))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", nargs="?", type=Path, help="folder of recorded gradients")
    parser.add_argument("--entries", type=int, default=1 << 24)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="keep the result in benchmarks/results/quantizers.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, object] = {"machine": processor(), "torch": torch.__version__, "entries": options.entries}
    for path in sorted(options.corpus.glob("*.npz")) if options.corpus else []:
        tensors = layers(path)
        levels, real_bits = equal_levels(tensors), equal_bits(tensors)
        print_rows(f"{path.stem}: NMSE at equal numbers of levels (bucket {BUCKET})", levels)
        print_rows(f"{path.stem}: NMSE at equal bits, entropy-coded, everything counted", real_bits)
        result[path.stem] = {"equal_levels": levels, "equal_bits": real_bits}
    result["speed"] = rows = speed(options.entries, options.rounds)
    print_rows(f"one core, {options.entries / 1e6:.1f} M entries", rows)
    if options.save:
        path = Path(__file__).parent / "results" / "quantizers.json"
        path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
