"""How long structured frames take, beside co3, ecq and a plain copy of the same tensors in the same run.

One thread, CPU time, error memory included, as in a training. Each kind of tensor comes as many times as fill 128 MB,
so that no cache holds them between two steps (small ones 64 times). Milliseconds a tensor are told too: with small ones
the fixed work counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

import gradwire

FILLED = 1 << 27  # bytes: more than a cache holds
ROUNDS = 5
MOST = 64  # tensors of a kind
RECIPES = ("co3", "ecq:nmse=0.03", "structured:rank=0", "structured:rank=4")


def scaled(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Gaussian entries, whose rows and columns have scales of their own."""
    x = torch.randn(shape, generator=generator)
    for axis in (0, 1):
        size = [shape[i] if i == axis else 1 for i in range(len(shape))]
        x *= torch.exp(0.7 * torch.randn(size, generator=generator))
    return x


def smooth_kernels(outputs: int, inputs: int, generator: torch.Generator) -> torch.Tensor:
    """3×3 kernels whose mean has four times the energy of what varies."""
    x = scaled((outputs, inputs, 3, 3), generator)
    return x / 2 + x.mean((2, 3), keepdim=True) * 3


def low_rank(rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    """Four directions, which have nine tenths of the energy, and a remainder."""
    rest = scaled((rows, columns), generator)
    found = torch.randn(rows, 4, generator=generator) @ torch.randn(4, columns, generator=generator)
    return found * 1.5 + rest / rest.std()


def blocks(count: int, generator: torch.Generator) -> torch.Tensor:
    """A vector whose entries have scales of their own in blocks of 64."""
    scales = torch.exp(torch.randn(count // 64, generator=generator)).repeat_interleave(64)
    return torch.randn(count, generator=generator) * scales


KINDS: dict[str, Callable[[torch.Generator], torch.Tensor]] = {
    "convolution 512 × 512 × 3 × 3": lambda g: smooth_kernels(512, 512, g),
    "convolution 64 × 64 × 3 × 3": lambda g: smooth_kernels(64, 64, g),
    "matrix 1024 × 2304, full rank": lambda g: scaled((1024, 2304), g),
    "matrix 1024 × 2304, rank 4 and noise": lambda g: low_rank(1024, 2304, g),
    "matrix 256 × 256, rank 4 and noise": lambda g: low_rank(256, 256, g),
    "vector of 2²¹": lambda g: blocks(1 << 21, g),
}


@dataclass
class Speed:
    """Nanoseconds of CPU time an entry: of each tensor in its fastest round, and of a copy in the same rounds."""

    kind: str
    recipe: str
    count: int
    encode: float
    decode: float
    copy: float
    bits: float


def measure(threads: int = 1) -> list[Speed]:
    """Time all recipes on all kinds of tensors."""
    torch.set_num_threads(threads)
    found = []
    for kind, make in KINDS.items():
        generator = torch.Generator().manual_seed(0)
        first = make(generator)
        number = max(2, min(MOST, FILLED // (4 * first.numel())))
        tensors = [first] + [make(generator) for _ in range(number - 1)]
        found += _measured(kind, tensors)
    return found


def _measured(kind: str, tensors: list[torch.Tensor]) -> list[Speed]:
    count = tensors[0].numel()
    memories = [torch.zeros(count) for _ in tensors]
    outs = [torch.empty_like(x) for x in tensors]
    codecs = {recipe: gradwire.codec(recipe) for recipe in RECIPES}
    frames = {recipe: [codec.encode(x) for x in tensors] for recipe, codec in codecs.items()}
    room = torch.empty(max(codec.max_frame_bytes(tensors[0]) for codec in codecs.values()), dtype=torch.uint8)
    work: dict[tuple[str, str], Callable[[int], object]] = {("copy", ""): lambda i: outs[i].copy_(tensors[i])}
    for recipe, codec in codecs.items():
        work[recipe, "encode"] = lambda i, codec=codec: codec.encode_into(
            tensors[i], room, residual=memories[i], residual_out=outs[i].view(-1), decay=1.0
        )
        work[recipe, "decode"] = lambda i, recipe=recipe: gradwire.decode(frames[recipe][i], out=outs[i])
    spent = {name: [float("inf")] * len(tensors) for name in work}
    for _ in range(ROUNDS):
        for name, each in work.items():
            for i in range(len(tensors)):
                started = time.process_time()
                each(i)
                spent[name][i] = min(spent[name][i], time.process_time() - started)
    fastest = {name: sum(times) / len(times) / count * 1e9 for name, times in spent.items()}
    return [
        Speed(kind, recipe, count, fastest[recipe, "encode"], fastest[recipe, "decode"], fastest["copy", ""],
              8 * sum(map(len, frames[recipe])) / len(tensors) / count)
        for recipe in RECIPES
    ]  # fmt: skip


def table(found: list[Speed]) -> str:
    """The figures in Markdown. Beside each is how fast that is for a copy of 1."""
    lines = [
        "| tensor | recipe | bits | copy, ns an entry | encode | × copy | decode | × copy | ms a tensor |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for s in found:
        whole = (s.encode + s.decode) * s.count / 1e6
        lines.append(
            f"| {s.kind} | `{s.recipe}` | {s.bits:.2f} | {s.copy:.2f} | {s.encode:.2f} | {s.copy / s.encode:.2f} "
            f"| {s.decode:.2f} | {s.copy / s.decode:.2f} | {whole:.2f} |"
        )
    return "\n".join(lines)
