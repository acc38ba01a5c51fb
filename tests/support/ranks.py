"""What scenarios on several ranks have in common: a small model, its losses, checks. rank_pool.py has the processes."""

from __future__ import annotations

import functools
import gc
import hashlib
import math
import os
import signal
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire import AggregateError
from gradwire.catalogue import all_recipes, spec
from gradwire.catalogue.spec import Entry, Parameter
from gradwire.convert import stored
from gradwire.convert.conversion import Conversion, Converter
from gradwire.frame import headers
from support.helpers import bits

SMALL_BUCKETS = 0.001  # MB: three of them for this model
Tensors = dict[str, torch.Tensor]
Loss = tuple[str, float]  # how a rank learned that another was lost, and after how many seconds
# Left to itself, it may choose another aggregation after two steps, by the clock, and with it other roundings.
attach = functools.partial(gradwire.ddp.attach, aggregate="all_gather")


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


def cpu_mesh() -> DeviceMesh:
    """A mesh of all ranks. Without one fully_shard takes a GPU where it sees one, which Gloo cannot serve."""
    return init_device_mesh("cpu", (dist.get_world_size(),))


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


# ── what scenarios check themselves with ──────────────────────────────────────────────────────────


def be_quiet() -> None:
    """Without warnings of torch's about its own names."""
    warnings.filterwarnings("ignore", category=FutureWarning)


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
    families = ("quantize",)

    def __init__(self, p: float):
        self.p = p

    def encode(self, conversion: Conversion, out: torch.Tensor) -> int:
        conversion.require_finite()
        u = conversion.compensated()
        kept = u.abs().topk(math.ceil(self.p * len(u))).indices
        sent = torch.zeros_like(u).index_copy_(0, kept, u[kept])
        if conversion.memory_out is not None:
            torch.sub(u, sent, out=conversion.memory_out)
        return stored.store(sent.to(conversion.dtype), out)


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


def lose_rank_1(block: AbstractContextManager[object], rank: int, at: int, step: Callable[[int], None]) -> list[Loss]:
    """Make steps within the block, until rank 1 dies after step `at` and rank 2 leaves; how the others learn that."""
    start, found = 0.0, []
    try:
        with block:
            for number in range(3 * at):
                step(number)
                if number == at:
                    start = time.monotonic()
                    if rank == 1:
                        os.kill(os.getpid(), signal.SIGKILL)
                    if rank == 2:
                        break
        raise AssertionError("nobody was missed")
    except AggregateError as error:
        found = [(str(error), time.monotonic() - start)]
    gc.collect()
    dist.destroy_process_group()
    return found


def check_that_rank_1_was_missed(first: list[Loss], killed: object, last: list[Loss]) -> None:
    assert killed is None
    for message, seconds in (*first, *last):
        assert "rank 1 is gone: its process was killed" in message and seconds < 10
