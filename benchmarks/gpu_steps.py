"""Whole training steps on a GPU: no hook, PyTorch's hooks and gradwire, GPT-2 small and ResNet-50.

python benchmarks/gpu_steps.py                          one rank over NCCL: what a hook costs without any link
python benchmarks/gpu_steps.py --ranks 2 --models gpt2  two ranks that share the GPU, over Gloo
python benchmarks/gpu_steps.py --json benchmarks/results/gpu_steps.json --seconds 170

Times are medians of whole steps (forward, backward, optimizer), by the clock with the GPU synchronized around some ten
steps at a time. Every hook runs in a process of its own, after the same warm-up; the next one imports its modules in
the meantime, and touches the GPU when its turn has come. `gw:dgc` is timed without its warm-up, which sends more. The
file of --json is written after every row, and with --seconds rows that would begin later are left out.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from gpu_programs import architecture, start_compiling

HOOKS = ["none", "fp16", "powersgd", "gw:auto", "gw:co3", "gw:sbc", "gw:dgc"]
SPECS = {"dgc": "dgc:warmup=0"}


class Block(nn.Module):
    """One layer of GPT-2."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.expand, self.contract = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.attend(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.contract(functional.gelu(self.expand(self.norm2(x)), approximate="tanh"))


class GPT2(nn.Module):
    """GPT-2 small: 124 M parameters, 148 tensors."""

    def __init__(self, width: int = 768, layers: int = 12, vocabulary: int = 50257, length: int = 1024):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, width // 64) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.tokens(x) + self.places.weight[: x.shape[1]]
        for block in self.blocks:
            y = block(y)
        return self.head(self.norm(y))


def build(name: str, batch: int, length: int) -> tuple[nn.Module, Any, Any, Any]:
    """Return model, inputs, targets and optimizer."""
    torch.manual_seed(0)
    if name == "gpt2":
        model: nn.Module = GPT2().cuda()
        x = torch.randint(0, 50257, (batch, length + 1), device="cuda")
        optimizer: Any = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
        return model, x[:, :-1].contiguous(), x[:, 1:].reshape(-1), optimizer
    import torchvision

    model = torchvision.models.resnet50().cuda().to(memory_format=torch.channels_last)
    images = torch.randn(batch, 3, 224, 224, device="cuda").to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    return model, images, torch.randint(0, 1000, (batch,), device="cuda"), optimizer


def attach(hook: str, model: DistributedDataParallel, optimizer: Any) -> Any:
    if hook == "fp16":
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif hook == "powersgd":
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif hook.startswith("gw:"):
        import gradwire

        spec = SPECS.get(hook[3:], hook[3:])
        if spec.partition(":")[0] in ("sbc", "dgc", "stc") and not isinstance(optimizer, torch.optim.SGD):
            spec += ("," if ":" in spec else ":") + "mask=off"  # it takes over SGD's momentum; others keep theirs
        return gradwire.ddp.attach(model, spec, optimizer=optimizer)
    return None


def worker(options: argparse.Namespace) -> None:
    for name in ["gradwire"] * options.hook.startswith("gw:") + ["torchvision"] * (options.model == "resnet50"):
        importlib.import_module(name)
    sys.stdin.readline()  # the one before has ended
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(0)
    dist.init_process_group("nccl" if world == 1 else "gloo", rank=rank, world_size=world)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    model, x, targets, optimizer = build(options.model, options.batch, options.length)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    handle = attach(options.hook, ddp, optimizer)

    def step() -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = ddp(x)
            loss = functional.cross_entropy(out.view(-1, out.shape[-1]).float(), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    for _ in range(options.warmup):
        step()
    times = []
    for _ in range(options.rounds):
        torch.cuda.synchronize()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(options.steps):
            loss = step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / options.steps * 1e3)
    if options.profile and rank == 0:
        profile(step)
    if rank == 0:
        figures = {"model": options.model, "hook": options.hook, "batch": options.batch, "length": options.length}
        figures |= {"ms": statistics.median(times), "least": min(times)}
        figures |= {"loss": float(loss), "memory_GB": torch.cuda.max_memory_allocated() / 1e9}
        if handle is not None:
            figures["stats"] = {k: v for k, v in handle.stats().items() if isinstance(v, (int, float))}
            figures["steps"] = options.warmup + options.rounds * options.steps
        print("RESULT " + json.dumps(figures), flush=True)
    dist.barrier()
    os._exit(0)


def profile(step: Any) -> None:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as found:
        step()
        torch.cuda.synchronize()
    print(found.key_averages().table(sort_by="cuda_time_total", row_limit=25, max_name_column_width=50), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--models", nargs="*", default=["gpt2", "resnet50"])
    parser.add_argument("--hooks", nargs="*", default=HOOKS)
    parser.add_argument("--batch", type=int, default=0)
    parser.add_argument("--length", type=int, default=0)
    parser.add_argument("--warmup", type=int, default=8)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=math.inf, help="no row begins later than this")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--hook", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.hook:
        worker(options)
        return
    for process in start_compiling(architecture()):  # or the first row of each recipe would wait for the compiler
        process.wait()
    rows = [(model, hook) for model in options.models for hook in options.hooks]
    results: list[dict[str, Any]] = []
    plain = dict.fromkeys(options.models, math.nan)
    begin, ready = time.time(), start_row(options, 0, *rows[0])
    for number, (model, hook) in enumerate(rows):
        ranks, ready = ready, []
        if time.time() - begin > options.seconds:
            print(f"{model:10} {hook:12} left out: {options.seconds:.0f} s are over", flush=True)
            end_row(ranks)
            break
        for rank in ranks:
            assert rank.stdin is not None
            rank.stdin.write("begin\n")
            rank.stdin.flush()
        if number + 1 < len(rows):
            ready = start_row(options, number + 1, *rows[number + 1])
        output = [rank.communicate()[0] for rank in ranks]
        found = [line for line in output[0].splitlines() if line.startswith("RESULT ")]
        if options.profile:
            print(output[0], flush=True)
        if not found:
            print(f"{model:10} {hook:12} failed:\n" + "\n".join(output[0].splitlines()[-12:]), flush=True)
            continue
        result = json.loads(found[0][7:]) | {"ranks": options.ranks}
        if hook == "none":
            plain[model] = result["ms"]
        result["over_no_hook"] = result["ms"] / plain[model]
        results.append(result)
        print(
            f"{model:10} {hook:12} {result['ms']:8.1f} ms  {result['over_no_hook']:6.3f}  "
            f"loss {result['loss']:7.4f}  {result['memory_GB']:6.1f} GB  {result.get('stats', '')}  "
            f"({time.time() - begin:.0f} s)", flush=True,
        )  # fmt: skip
        if options.json:
            options.json.write_text(json.dumps(results, indent=1) + "\n")


def start_row(options: argparse.Namespace, number: int, model: str, hook: str) -> list[subprocess.Popen[str]]:
    """Start the processes of one row of the table, which wait for a line on their standard input."""
    batch = options.batch or ({"gpt2": 16, "resnet50": 256}[model] // (1 if options.ranks == 1 else 2))
    length = options.length or (1024 if options.ranks == 1 else 512)
    command = [
        sys.executable, __file__, "--model", model, "--hook", hook, "--batch", str(batch), "--length", str(length),
        "--warmup", str(options.warmup), "--steps", str(options.steps), "--rounds", str(options.rounds),
        *(["--profile"] if options.profile else []),
    ]  # fmt: skip
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29600 + number), "WORLD_SIZE": str(options.ranks)}
    return [
        subprocess.Popen(command, env=os.environ | place | {"RANK": str(rank)}, stdin=subprocess.PIPE,
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in range(options.ranks)
    ]  # fmt: skip


def end_row(ranks: list[subprocess.Popen[str]]) -> None:
    for rank in ranks:
        rank.kill()
        rank.communicate()


if __name__ == "__main__":
    main()
