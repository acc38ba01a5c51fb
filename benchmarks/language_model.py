"""A GPT under AdamW: what each way to exchange costs in loss, and how many bits it sends for a parameter.

    python benchmarks/language_model.py --runs none co3 ecq structured powersgd:2 --seeds 0 1
    python benchmarks/language_model.py --delayed --lrs 1e-3 2e-3 --json results.jsonl --plot plot.png
    python benchmarks/language_model.py --delayed --size 10m --device cuda --workers 8 --batch 16 --steps 1500

Workers are simulated in one process; what they exchange travels as real frames, with error memories, and all that
counts as a byte is in a frame. A run is a recipe, whose gradients are averaged in every step, or a delayed method: one
of the rows in `delayed.py` (DiLoCo, Streaming DiLoCo, SparseLoCo and ours), `every:SPEC` for the plain mean of updates
of `--every` steps, `outer:SPEC` with DiLoCo's outer optimizer, or `streaming:SPEC` as Streaming DiLoCo, in three parts.
The text is the source of Python's own standard library, as bytes; a tenth of the files are held out. `powersgd:R` is
PowerSGD of rank R (arXiv 1905.13727), with error feedback and warm start, matrices alone; its factors count in fp32, as
PyTorch's hook sends them. On a GPU, networks compute in bf16 autocast, and frames are made on the CPU.

With `--json`, runs that the file has already are not made again, so that a stopped command goes on. The default model
has 0.8 million parameters and takes some minutes for a run on two cores.
"""

from __future__ import annotations

import argparse
import glob
import json
import math
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch import nn
from torch.nn import functional

import gradwire
from delayed import ROWS, Delayed, DelayedWorkers, row
from gradwire.aggregate.messages.frame_coding import frame_seed
from gradwire.correct.adam_units import measure_units, power_of_two
from gradwire.engine.shared_units import is_due
from language_model_report import plot, read, table
from powersgd import PowerSGD

# Width, layers and context; 10.8 million parameters are the largest.
SIZES = {"tiny": (64, 2, 64), "1m": (128, 4, 128), "10m": (384, 6, 256)}
SETTINGS = ("workers", "steps", "every", "warmup", "batch", "context", "width", "layers")
SMALL = 4096  # entries: smaller tensors share a frame
HEAD = 32  # entries of an attention head


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(2, (-1, HEAD)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, width: int, layers: int, context: int):
        super().__init__()
        self.embedding, self.position = nn.Embedding(256, width), nn.Parameter(0.02 * torch.randn(context, width))
        self.blocks = nn.Sequential(*[Block(width) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.embedding(x) + self.position[: x.shape[1]])))


class Frames:
    """Workers whose gradients are averaged through frames of a recipe, each with an error memory."""

    def __init__(self, spec: str, model: nn.Module, workers: int, optimizer: torch.optim.Optimizer):
        self.recipe, self.optimizer = gradwire.recipe(spec), optimizer
        self.factors = {name: torch.ones((), dtype=torch.float32, device="cpu") for name, _ in model.named_parameters()}
        named = self.named = [(name, p) for name, p in model.named_parameters()]
        self.large = [[entry] for entry in named if entry[1].numel() >= SMALL]
        self.groups = [*self.large, [entry for entry in named if entry[1].numel() < SMALL]]
        self.memories = [[None] * len(self.groups) for _ in range(workers)]
        self.bytes = 0

    def average(self, gradients: list[dict[str, torch.Tensor]], step: int) -> dict[str, torch.Tensor]:
        mean = {}
        codec = self.recipe.at(step)
        if self.recipe.in_adam_units and is_due(step):
            self.renew_units()
        for number, group in enumerate(self.groups):
            names, total = [name for name, _ in group], None
            for worker, of_worker in enumerate(gradients):
                alone = len(names) == 1
                scaled = [of_worker[name].cpu() * self.factors[name] for name in names]
                joined = scaled[0].contiguous() if alone else torch.cat([t.flatten() for t in scaled])
                memory = self.memories[worker][number]
                if memory is None and self.recipe.decay:
                    memory = self.memories[worker][number] = torch.zeros(joined.numel())
                segments = [] if alone else [p.numel() for _, p in group]
                out = torch.empty(codec.max_frame_bytes(joined) + 12 * len(segments), dtype=torch.uint8)
                seed = frame_seed(step, str(worker), names[0])
                length = codec.encode_into(
                    joined, out, residual=memory, decay=self.recipe.decay, seed=seed, segments=segments
                )
                self.bytes += length
                decoded = gradwire.decode(out[:length])
                total = decoded if total is None else total.add_(decoded)
            total /= len(gradients)
            parts = [total.flatten()] if len(group) == 1 else total.split([p.numel() for _, p in group])
            for (name, p), part in zip(group, parts, strict=True):
                mean[name] = (part.view(p.shape) / self.factors[name]).to(p.device)
        return mean

    def renew_units(self) -> None:
        """Let units follow the optimizer, and memories the units, as gradwire.ddp.attach does."""
        units = {name: u.cpu() for name, u in measure_units(self.optimizer, self.named).items()}
        changes = {name: power_of_two(u).float() / self.factors[name] for name, u in units.items()}
        for number, group in enumerate(self.groups):
            change = torch.cat([changes.get(name, torch.ones(1)).expand(p.shape).flatten() for name, p in group])
            for of_worker in self.memories:
                if of_worker[number] is not None:
                    of_worker[number] *= change
        for name, change in changes.items():
            self.factors[name] = self.factors[name] * change


def text() -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes to train on, and bytes that are held out."""
    files = [Path(f).read_bytes() for f in sorted(glob.glob(sysconfig.get_paths()["stdlib"] + "/*.py"))]
    held_out = b"".join(files[::10])
    training = b"".join(data for i, data in enumerate(files) if i % 10)
    return tuple(torch.frombuffer(bytearray(data), dtype=torch.uint8).long() for data in (training, held_out))


def batch(data: torch.Tensor, count: int, context: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    starts = torch.randint(0, len(data) - context - 1, (count,), generator=generator).tolist()
    rows = torch.stack([data[start : start + context + 1] for start in starts])
    return rows[:, :-1], rows[:, 1:]


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=x.is_cuda):
        logits = model(x)
    return functional.cross_entropy(logits.float().flatten(0, 1), y.flatten())


def train(spec: str, seed: int, o: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    method = row(spec)
    if method is not None:
        return train_delayed(spec, method, seed, o, progress)
    torch.manual_seed(seed)
    training, held_out = text()
    model = GPT(o.width, o.layers, o.context).to(o.device)
    optimizer = torch.optim.AdamW(model.parameters(), o.lr, weight_decay=0.1, betas=(0.9, 0.95))
    exchange = None
    if spec.startswith("powersgd:"):
        exchange = PowerSGD(int(spec.split(":")[1]), o.workers)
    elif spec != "none":
        exchange = Frames(spec, model, o.workers, optimizer)
    generators = [torch.Generator().manual_seed(1000 * seed + w) for w in range(o.workers)]
    count, started, curve = sum(p.numel() for p in model.parameters()), time.perf_counter(), []
    bar = progress.add_task(f"{spec}, seed {seed}", total=o.steps)
    for step in range(o.steps):
        factor = rate(step, o)
        optimizer.param_groups[0]["lr"] = o.lr * factor
        gradients = []
        for generator in generators:
            model.zero_grad()
            x, y = (t.to(o.device) for t in batch(training, o.batch, o.context, generator))
            loss_of(model, x, y).backward()
            gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
        if exchange is None:
            mean = {name: sum(g[name] for g in gradients) / o.workers for name in gradients[0]}
        else:
            mean = exchange.average(gradients, step)
        for name, p in model.named_parameters():
            p.grad = mean[name]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        progress.advance(bar)
        if (step + 1) % max(1, o.steps // 5) == 0:
            curve.append(round(evaluate(model, held_out, o), 4))
            sent = 32.0 if exchange is None else 8 * exchange.bytes / (o.workers * count * (step + 1))
            report(progress, spec, seed, step, curve[-1], sent)
    return {
        "loss": curve[-1], "curve": curve, "bits": sent, "parameters": count,
        "seconds": time.perf_counter() - started,
    }  # fmt: skip


def report(progress: Progress, spec: str, seed: int, step: int, loss: float, bits: float) -> None:
    """Print what is known at a fifth of a run, so that one that is stopped has not been for nothing."""
    text = f"{spec}, seed {seed}, after {step + 1} steps: loss {loss:.4f}, {bits:.4g} bits a parameter and step"
    progress.console.print(text, highlight=False, soft_wrap=True)


def rate(step: int, o: argparse.Namespace) -> float:
    """The part of the learning rate at this step: a linear warm-up, and a cosine down to a tenth."""
    return min(1.0, (step + 1) / o.warmup) * (0.55 + 0.45 * math.cos(math.pi * step / o.steps))


def train_delayed(spec: str, method: Delayed, seed: int, o: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """Train workers that exchange what `o.every` steps have changed; clipping and schedule as in every step."""
    torch.manual_seed(seed)
    training, held_out = text()
    model = GPT(o.width, o.layers, o.context).to(o.device)

    def adamw(m: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(m.parameters(), o.lr, weight_decay=0.1, betas=(0.9, 0.95))

    workers = DelayedWorkers(method, model, o.workers, o.every, adamw)
    generators = [torch.Generator().manual_seed(1000 * seed + w) for w in range(o.workers)]
    count, started, curve = sum(p.numel() for p in model.parameters()), time.perf_counter(), []
    bar = progress.add_task(f"{spec}, seed {seed}", total=o.steps)
    for step in range(o.steps):
        for worker, optimizer, generator in zip(workers.models, workers.optimizers, generators, strict=True):
            optimizer.param_groups[0]["lr"] = o.lr * rate(step, o)
            worker.zero_grad()
            x, y = (t.to(o.device) for t in batch(training, o.batch, o.context, generator))
            loss_of(worker, x, y).backward()
            nn.utils.clip_grad_norm_(worker.parameters(), 1.0)
            optimizer.step()
        workers.after_step(step + 1, last=step + 1 == o.steps)
        progress.advance(bar)
        if (step + 1) % max(1, o.steps // 5) == 0:
            with torch.no_grad():
                for name, p in model.named_parameters():
                    p.copy_(workers.common[name])
            curve.append(round(evaluate(model, held_out, o), 4))
            sent = workers.bits / (o.workers * count * (step + 1))
            report(progress, spec, seed, step, curve[-1], sent)
    return {
        "loss": curve[-1], "curve": curve, "bits": sent, "parameters": count,
        "seconds": time.perf_counter() - started,
    }  # fmt: skip


@torch.no_grad()
def evaluate(model: nn.Module, data: torch.Tensor, o: argparse.Namespace) -> float:
    generator = torch.Generator().manual_seed(0)
    losses = [loss_of(model, *(t.to(o.device) for t in batch(data, 32, o.context, generator))) for _ in range(8)]
    return float(torch.stack(losses).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", default=["none", "co3", "ecq", "structured", "powersgd:2"])
    parser.add_argument("--delayed", action="store_true", help="run `none` and all delayed methods")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--lrs", nargs="+", type=float, default=[2e-3], help="learning rates to try with every run")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--every", type=int, default=30, help="steps between exchanges of delayed methods")
    parser.add_argument("--warmup", type=int, default=25)
    parser.add_argument("--batch", type=int, default=8, help="sequences of a worker in a step")
    parser.add_argument("--size", choices=SIZES, help="in place of the next three")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, help="a file of JSON lines that results are added to")
    parser.add_argument("--plot", type=Path, help="a file for a plot of loss over bits")
    o = parser.parse_args()
    if o.size:
        o.width, o.layers, o.context = SIZES[o.size]
    runs = ["none", *ROWS] if o.delayed else o.runs
    known = read(o.json) if o.json else []
    results = []
    with Progress() as progress:
        for seed in o.seeds:
            for spec in runs:
                for lr in o.lrs:
                    results.append(result_of(spec, seed, lr, o, known, progress))
    print(table(results))
    if o.plot:
        plot(results, o.plot)


def result_of(
    spec: str, seed: int, lr: float, o: argparse.Namespace, known: list[dict[str, Any]], progress: Progress
) -> dict[str, Any]:
    """A run's result: from the file, if it is there, or by making it."""
    what = {"spec": spec, "seed": seed, "lr": lr, "settings": {key: getattr(o, key) for key in SETTINGS}}
    for result in known:
        if {key: result.get(key) for key in what} == what:
            return result
    o.lr = lr
    result = {**what, "delayed": row(spec) is not None, **train(spec, seed, o, progress)}
    if o.json:
        with o.json.open("a") as file:
            file.write(json.dumps(result) + "\n")
    return result


if __name__ == "__main__":
    main()
