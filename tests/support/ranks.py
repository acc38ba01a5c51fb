"""Ranks in processes of their own, which meet over Gloo on the loopback interface, and a small model for them."""

from __future__ import annotations

import datetime
import functools
import gc
import hashlib
import math
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.catalogue import all_recipes, spec
from gradwire.catalogue.spec import Entry, Parameter
from gradwire.convert import stored
from gradwire.convert.conversion import Converter, Job
from gradwire.frame import headers
from support.helpers import bits

WORLD = 3
SMALL_BUCKETS = 0.001  # MB: three of them for this model
Tensors = dict[str, torch.Tensor]
# Left to itself, it may choose another aggregation after two steps, by the clock, and with it other roundings.
attach = functools.partial(gradwire.ddp.attach, aggregate="all_gather")


def launch(work: Callable[[int, Path], object], folder: Path, seconds: float, world: int = WORLD) -> list[object]:
    """What `work(rank, folder)` returned in each process; None where the process was killed."""
    # Forked from a server that has no more than imported them, so that a rank need not: torch alone takes seconds.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "gradwire"])  # the first is what DDP imports when it is made
    processes = [context.Process(target=_run, args=(work, rank, folder)) for rank in range(world)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(0, deadline - time.monotonic()))
    late = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        if process.is_alive():
            process.kill()
            process.join()
    results = []
    for rank, process in enumerate(processes):
        path = folder / f"{rank}.pt"
        result = torch.load(path, weights_only=False) if path.exists() else None
        assert not isinstance(result, str), f"rank {rank}:\n{result}"
        assert result is not None or process.exitcode == -signal.SIGKILL, f"rank {rank} left {process.exitcode}"
        results.append(result)
    assert not late, f"ranks {late} did not end within {seconds} seconds"
    return results


def _run(work: Callable[[int, Path], object], rank: int, folder: Path) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    gc.freeze()  # what was imported stays: scenarios collect their garbage, and need not look through all of torch
    try:
        result = work(rank, folder)
    except BaseException:
        result = traceback.format_exc()
    torch.save(result, folder / f"{rank}.pt")


def connect(rank: int, folder: Path, name: str, seconds: float = 60, world: int = WORLD) -> None:
    """A process group of its own for each scenario that breaks it; meeting in a file needs no free port."""
    timeout = datetime.timedelta(seconds=seconds)
    dist.init_process_group("gloo", f"file://{folder / name}", rank=rank, world_size=world, timeout=timeout)
    dist.barrier()  # a rank that has met all others and leaves at once breaks it for those that have not yet


class Net(nn.Module):
    """Parameters above and below the size from which they travel alone (4096 entries)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(20, 70)
        self.big = nn.Linear(70, 64)
        self.norm = nn.LayerNorm(64)
        self.last = nn.Linear(64, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(torch.relu(self.big(torch.tanh(self.first(x))))))


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    dtype = next(model.parameters()).dtype
    x = torch.randn(16, 20, generator=generator).to(dtype)
    y = torch.randint(5, (16,), generator=generator)
    return nn.functional.cross_entropy(model(x).float(), y)


class Layers(nn.Module):
    """Linear layers, of which some can be left out; several buckets."""

    def __init__(self, count: int = 4, width: int = 12):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, x: torch.Tensor, without: tuple[int, ...] = ()) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            x = x if i in without else torch.tanh(layer(x))
        return x


def make_ddp(dtype: torch.dtype = torch.float32, cap: float = SMALL_BUCKETS) -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(Net().to(dtype), bucket_cap_mb=cap)


def backward(model: DistributedDataParallel, rank: int, step: int, scale: float = 1.0) -> Tensors:
    """The aggregated gradients."""
    model.zero_grad()
    (scale * loss_of(model, rank, step)).backward()
    return {name: p.grad.clone() for name, p in model.module.named_parameters()}


def digest(tensors: Tensors) -> str:
    whole = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        whole.update(name.encode() + bits(tensor))
    return whole.hexdigest()


# ── scenarios that check themselves ───────────────────────────────────────────────────────────────


def run_scenarios(
    scenarios: list[Callable[[int], None]], rank: int, folder: Path, seconds: float, world: int = WORLD
) -> dict[str, str]:
    """Run each in a process group of its own, so that one that fails does not spoil the next; what went wrong."""
    failures = {}
    for scenario in scenarios:
        connect(rank, folder, scenario.__name__, seconds, world)
        try:
            scenario(rank)
            failures[scenario.__name__] = ""
        except BaseException:
            failures[scenario.__name__] = traceback.format_exc()
        gc.collect()  # DDP models keep the group
        dist.destroy_process_group()
    return failures


def gathered(value: object) -> list[object]:
    """The value of every rank."""
    values: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def check_alike(model: nn.Module) -> str:
    """All ranks have the same parameters and float buffers, bit for bit."""
    state = {name: t for name, t in model.state_dict().items() if t.is_floating_point()}
    digests = gathered(digest(state))
    assert digests[0] == digests[1] == digests[2], digests
    return digests[0]


def check_raises(error: type[Exception], message: str, work: Callable[[], object]) -> None:
    try:
        work()
    except error as caught:
        assert message in str(caught), str(caught)
    else:
        raise AssertionError(f"no {error.__name__}: {message}")


class LargestShare(Converter):
    """The share p of entries with the largest magnitudes, stored as they are among zeros."""

    wire_id = headers.STORED

    def __init__(self, p: float):
        self.p = p

    def encode(self, job: Job, out: torch.Tensor) -> int:
        job.require_finite()
        u = job.compensated()
        kept = u.abs().topk(math.ceil(self.p * len(u))).indices
        sent = torch.zeros_like(u).index_copy_(0, kept, u[kept])
        if job.memory_out is not None:
            torch.sub(u, sent, out=job.memory_out)
        return stored.store(sent.to(job.dtype), out)


def add_toy_recipe() -> None:
    """`toy`: sparse, and with all that correctors can be asked for. In worker processes only."""
    share, switch = spec.number(1e-6, 1), spec.one_of("on", "off")
    corrector = {
        "decay": Parameter("1", spec.number(0, 1), True),
        "mask": Parameter("off", switch, True),
        "warmup": Parameter("0", spec.number(0, 1e9), True),
        "start": Parameter("0.25", share, True),
        "small": Parameter("same", spec.one_of("same", "none", "bf16"), True),
        "scope": Parameter("tensor", spec.one_of("tensor", "model"), True),
        "clip_norm": Parameter("0", spec.number(0, 1e9), True),
        "sync_every": Parameter("1", spec.number(1, 1e9), True),
        "outer_lr": Parameter("1", spec.number(0, 10), True),
        "outer_momentum": Parameter("0", spec.number(0, 1), True),
    }
    all_recipes.CATALOGUE["toy"] = Entry(
        "toy", "", "", lambda v: LargestShare(float(v["p"])), {"p": Parameter("0.1", share), **corrector}
    )


def check_scenario(results: list[dict], scenario: str) -> None:
    """It failed on no rank."""
    failures = [f"rank {rank}:\n{result[scenario]}" for rank, result in enumerate(results) if result[scenario]]
    assert not failures, "\n".join(failures)
