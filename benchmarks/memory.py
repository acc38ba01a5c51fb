"""Memory that compression takes beyond plain DDP: the peak of resident memory, in bytes a parameter.

    python benchmarks/memory.py [--parameters 60] [--ranks 2] [--steps 4] [--only TEXT] [--save]

Every way of training runs in processes of its own, on a model of that many million parameters with SGD and momentum,
whose largest tensor has a quarter of them. The peak is what Linux counts for the process (VmHWM), of the rank that has
the highest; what plain DDP takes in the same steps is subtracted. `kept` is what is resident between two steps, and the
difference is room for messages, and scratch.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from machine import processor

RESULTS = Path(__file__).parent / "results/memory.md"
PLAIN = "plain DDP"
BATCH = 4
Train = Callable[[], float]

# What is measured: the wrapper, the spec, and more options.
WAYS: dict[str, tuple[str, str, dict[str, Any]]] = {
    PLAIN: ("ddp", "", {}),
    "co3": ("ddp", "co3", {}),
    "ecq": ("ddp", "ecq", {}),
    "qsgd (no memory)": ("ddp", "qsgd", {}),
    "topk": ("ddp", "topk", {}),
    "sbc": ("ddp", "sbc", {}),
    "dgc": ("ddp", "dgc:warmup=0", {}),
    'co3, memory="bf16"': ("ddp", "co3", {"memory": "bf16"}),
    "co3, scatter_reduce": ("ddp", "co3", {"aggregate": "scatter_reduce"}),
    "DataParallel, co3": ("data_parallel", "co3", {}),
    "LocalSGD, co3": ("local_sgd", "co3", {}),
    "LocalSGD, stc2": ("local_sgd", "stc2", {}),
}


def build(parameters: int) -> nn.Sequential:
    """A quarter of the entries in one matrix, the rest in twelve."""
    torch.manual_seed(0)
    wide, narrow = round((parameters / 4) ** 0.5), round((parameters / 16) ** 0.5)
    layers = [nn.Linear(wide, wide), nn.Linear(wide, narrow), *(nn.Linear(narrow, narrow) for _ in range(11))]
    return nn.Sequential(*layers)


def resident(what: str) -> int:
    """VmHWM, the peak, or VmRSS, what is resident now, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(what):
            return int(line.split()[1]) * 1024
    raise OSError("this benchmark needs Linux's /proc/self/status")


def work(way: str, parameters: int, steps: int) -> dict[str, float]:
    """Train on this rank, and return what it took."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    wrapper, spec, options = WAYS[way]
    model: nn.Module = build(parameters)
    count = sum(p.numel() for p in model.parameters())
    x = torch.randn(BATCH, model[0].in_features, generator=torch.Generator().manual_seed(dist.get_rank()))  # type: ignore[index]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    inside: Any = None
    if wrapper == "ddp":
        model = DistributedDataParallel(model)
        if spec:
            masked = {"optimizer": optimizer} if spec.startswith(("sbc", "dgc")) else {}
            gradwire.ddp.attach(model, spec, **{"aggregate": "all_gather", **options}, **masked)
    elif wrapper == "data_parallel":
        model = gradwire.DataParallel(model, spec, aggregate="all_gather")
    else:
        inside = gradwire.LocalSGD(model, optimizer, spec, sync_every=2)
        inside.__enter__()
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    gc.collect()
    peaks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(peaks, (resident("VmHWM"), resident("VmRSS")))
    return {"parameters": count, "peak": max(p for p, _ in peaks), "kept": max(k for _, k in peaks)}


def run(way: str, options: argparse.Namespace) -> dict[str, float]:
    """Start the ranks of one way, and return what rank 0 reports."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(options.ranks),
        "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        arguments = [__file__, "--work", way, "--parameters", str(options.parameters), "--steps", str(options.steps)]
        processes = [
            subprocess.Popen(
                [sys.executable, *arguments, "--report", f"{folder}/{rank}"], env=environment | {"RANK": str(rank)}
            )
            for rank in range(options.ranks)
        ]
        if sum(process.wait() != 0 for process in processes):
            raise SystemExit(f"{way}: a rank failed")
        return json.loads(Path(folder, "0").read_text())


def table(found: dict[str, dict[str, float]], options: argparse.Namespace) -> str:
    """The results as Markdown."""
    plain = found[PLAIN]
    count = plain["parameters"]
    only = f" --only {options.only}" if options.only else ""
    lines = [
        "# Memory beyond plain DDP", "",
        f"`python benchmarks/memory.py --parameters {options.parameters:g} --ranks {options.ranks}{only} --save`, on "
        f"{processor()}, torch {torch.__version__.partition('+')[0]}: resident memory of a rank beyond that of plain "
        f"DDP, in bytes a parameter, with {count / 1e6:.1f} million parameters and {options.ranks} ranks.", "",
        "| training | at its peak | kept between steps |", "|---|---|---|",
    ]  # fmt: skip
    for way, of in found.items():
        if way == PLAIN:
            peak, kept = (f"{of[key] / count:.1f} in all" for key in ("peak", "kept"))
        else:
            peak, kept = (f"{(of[key] - plain[key]) / count:+.1f}" for key in ("peak", "kept"))
        lines.append(f"| {way} | {peak} | {kept} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=60, help="millions")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--only", default="", help="of the ways to train, those whose names contain this")
    parser.add_argument("--save", action="store_true", help=f"write the table to {RESULTS.name}")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        options.report.write_text(json.dumps(work(options.work, int(options.parameters * 1e6), options.steps)))
        os._exit(0)  # a benchmark of memory has nothing to clean up
    found = {}
    for way in WAYS:
        if way == PLAIN or options.only in way:
            print(f"{way} …", end="", flush=True, file=sys.stderr)
            found[way] = run(way, options)
            peak, kept = (
                (found[way][key] - found[PLAIN][key]) / found[PLAIN]["parameters"] for key in ("peak", "kept")
            )
            print(f" {peak:+.2f} bytes a parameter, {kept:+.2f} between steps", flush=True, file=sys.stderr)
    text = table(found, options)
    print(text)
    if options.save:
        RESULTS.write_text(text)


if __name__ == "__main__":
    main()
