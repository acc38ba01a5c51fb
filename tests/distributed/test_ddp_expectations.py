"""What PyTorch expects of DDP with any hook: the same training as without one, where the codec loses nothing.

Every case trains a model twice, with plain DDP and with gradwire under the codec `none`, and compares gradients
(whether there are any, too) and parameters: two ranks bit for bit, since a sum of two has only one order; some on
three ranks, to rounding. The cases are those of PyTorch's own tests of hooks, and what users do to their models.

All run on three ranks, of which two are a process group of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import gradwire
from gradwire.correct.complex_pairs import as_reals
from support.rank_pool import RankPool, Scenario, named
from support.ranks import Layers, Tensors
from support.torch_versions import GLOO_TAKES_COMPLEX

# ── what is compared ──────────────────────────────────────────────────────────────────────────────


def plain(model: nn.Module, group: dist.ProcessGroup, **options: object) -> nn.Module:
    return DistributedDataParallel(model, process_group=group, **{"bucket_cap_mb": 0.001, **options})


def attached(model: nn.Module, group: dist.ProcessGroup, **options: object) -> nn.Module:
    ddp = plain(model, group, **options)
    gradwire.ddp.attach(ddp, "none")
    return ddp


def scattered(model: nn.Module, group: dist.ProcessGroup, **options: object) -> nn.Module:
    ddp = plain(model, group, **options)
    gradwire.ddp.attach(ddp, "none", aggregate="scatter_reduce")
    return ddp


def data_parallel(model: nn.Module, group: dist.ProcessGroup, **options: object) -> nn.Module:
    """Options of DDP are not needed here."""
    return gradwire.DataParallel(model, "none", process_group=group)


Wrapper = Callable[..., nn.Module]
WRAPPERS: dict[str, Wrapper] = {"ddp.attach": attached, "scatter_reduce": scattered, "DataParallel": data_parallel}


@dataclass
class Run:
    """One training of a case, on one rank of a group."""

    wrapper: Wrapper
    group: dist.ProcessGroup
    seen: list[Tensors] = field(default_factory=list)

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    def wrap(self, model: nn.Module, **options: object) -> nn.Module:
        return self.wrapper(model, self.group, **options)

    def look(self, model: nn.Module) -> None:
        """Remember parameters and gradients."""
        self.seen.append(
            {name: as_reals(p.detach()).clone() for name, p in model.named_parameters()}
            | {
                f"grad of {name}": as_reals(p.grad).clone()
                for name, p in model.named_parameters()
                if p.grad is not None
            }
        )

    def batch(self, step: int, width: int = 12) -> torch.Tensor:
        return torch.randn(8, width, generator=torch.Generator().manual_seed(100 * step + self.rank))

    def train(self, model: nn.Module, steps: int = 4, lr: float = 0.05, set_to_none: bool = True) -> None:
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr, momentum=0.9)
        for step in range(steps):
            optimizer.zero_grad(set_to_none)
            model(self.batch(step)).float().pow(2).mean().backward()
            optimizer.step()
            self.look(model)


def rounding(expected: Tensors, wrapper: Wrapper, world: int) -> float:
    """How far trainings may part, relative to the largest entry of a tensor: two ranks not at all, three by some
    roundings of the coarsest dtype, which reach all layers. Scatter-reduce adds halves of fp16 entries in fp32."""
    coarsest = max(torch.finfo(t.dtype).eps for t in expected.values())
    exact = world == 2 and not (wrapper is scattered and coarsest > torch.finfo(torch.float32).eps)
    return 0.0 if exact else 32 * coarsest


def check_same_training(case: Case, wrapper: Wrapper, group: dist.ProcessGroup) -> None:
    trainings = []
    for wrap in (plain, wrapper):
        torch.manual_seed(0)
        run = Run(wrap, group)
        case(run)
        trainings.append(run.seen)
    assert len(trainings[0]) == len(trainings[1]) > 0
    for step, (expected, found) in enumerate(zip(*trainings, strict=True)):
        assert set(found) == set(expected), f"step {step}: {set(found) ^ set(expected)}"
        for name, value in expected.items():
            where = f"{name}, step {step}, {dist.get_world_size(group)} ranks"
            assert (found[name].shape, found[name].dtype) == (value.shape, value.dtype), where
            if value.numel():
                gap = (found[name].double() - value.double()).abs().max()
                assert gap <= rounding(expected, wrapper, dist.get_world_size(group)) * value.double().abs().max(), (
                    where
                )


# ── models ────────────────────────────────────────────────────────────────────────────────────────


# ── cases ─────────────────────────────────────────────────────────────────────────────────────────

Case = Callable[[Run], None]
CASES: dict[str, Case] = {}
OF_DDP: set[str] = set()  # cases that are DDP's own, or take their time


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def case_of_ddp(function: Case) -> Case:
    OF_DDP.add(function.__name__)
    return case(function)


@case
def usual(run: Run) -> None:
    """The buckets are rebuilt after the first step."""
    run.train(run.wrap(Layers()))


@case
def accumulation(run: Run) -> None:
    model = run.wrap(Layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(4):
        optimizer.zero_grad()
        with model.no_sync():
            for part in range(2):
                model(run.batch(10 * step + part)).sum().backward()
        model(run.batch(10 * step + 9)).sum().backward()
        optimizer.step()
        run.look(model)


@case
def accumulation_without_no_sync(run: Run) -> None:
    """What is in .grad already is averaged again, as DDP does it."""
    model = run.wrap(Layers())
    for step in range(3):
        model(run.batch(step)).sum().backward()
        run.look(model)


@case
def accumulation_in_bucket_views(run: Run) -> None:
    model = run.wrap(Layers(), gradient_as_bucket_view=True)
    for step in range(4):
        model.zero_grad(set_to_none=step % 2 == 0)
        with model.no_sync():
            model(run.batch(step)).sum().backward()
        model(run.batch(step + 50)).sum().backward()
        run.look(model)


@case
def bucket_views(run: Run) -> None:
    run.train(run.wrap(Layers(), gradient_as_bucket_view=True), set_to_none=False)


@case
def gradients_set_to_zero(run: Run) -> None:
    run.train(run.wrap(Layers()), set_to_none=False)


def train_with_parts_left_out(run: Run, model: nn.Module, set_to_none: bool) -> None:
    """Other layers on every rank and in every step; in the fourth and the sixth, layer 1 on all ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(8):
        optimizer.zero_grad(set_to_none)
        without = {3: (1,), 5: (1, 3)}.get(step, ((run.rank + step) % 4,))
        model(run.batch(step), without).pow(2).mean().backward()
        optimizer.step()
        run.look(model)


@case
def unused(run: Run) -> None:
    train_with_parts_left_out(run, run.wrap(Layers(), find_unused_parameters=True), True)


@case
def unused_with_gradients_of_zero(run: Run) -> None:
    train_with_parts_left_out(run, run.wrap(Layers(), find_unused_parameters=True), False)


@case
def unused_in_bucket_views(run: Run) -> None:
    model = run.wrap(Layers(), find_unused_parameters=True, gradient_as_bucket_view=True)
    train_with_parts_left_out(run, model, True)


@case
def unused_under_accumulation(run: Run) -> None:
    """Layer 2 is used only under no_sync, layer 3 only outside of it, layer 1 never."""
    model = run.wrap(Layers(), find_unused_parameters=True)
    for step in range(3):
        model.zero_grad()
        with model.no_sync():
            model(run.batch(step), (1, 3)).sum().backward()
        model(run.batch(step + 50), (1, 2)).sum().backward()
        run.look(model)


@case
def ignored_output(run: Run) -> None:
    """A forward pass without a backward pass."""
    model = run.wrap(Layers(), find_unused_parameters=True)
    model(run.batch(0))
    run.train(model, steps=2)


@case
def several_backwards_of_one_forward(run: Run) -> None:
    """Each of its own half of the parameters: the second finishes the buckets of the first."""

    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = Layers(2), Layers(2)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.left(x), self.right(x)

    model = run.wrap(Halves())
    for step in range(3):
        model.zero_grad()
        left, right = model(run.batch(step))
        right.sum().backward()
        left.sum().backward()
        run.look(model)


@case
def static_graph(run: Run) -> None:
    """With a layer that is never used, and one that is used twice."""

    class Static(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(super().forward(x, (2, 3)), (2,))

    run.train(run.wrap(Static(), static_graph=True))


@case
def static_graph_with_accumulation(run: Run) -> None:
    """DDP itself cannot have it in the first step."""
    model = run.wrap(Layers(), static_graph=True)
    for step in range(4):
        model.zero_grad()
        if step:
            with model.no_sync():
                model(run.batch(step)).sum().backward()
        model(run.batch(step + 50)).sum().backward()
        run.look(model)


@case
def frozen_in_mid_training(run: Run) -> None:
    model = run.wrap(Layers(), find_unused_parameters=True)
    run.train(model, steps=2)
    model.module.layers[1].requires_grad_(False)
    run.train(model, steps=2)
    model.module.layers[1].requires_grad_(True)
    run.train(model, steps=2)


@case_of_ddp
def parameters_that_ddp_ignores(run: Run) -> None:
    model = Layers()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["layers.1.weight", "layers.2.bias"])
    run.train(run.wrap(model))


@case
def two_models_interleaved(run: Run) -> None:
    """Their backward passes meet in one, then run in another order than their forward passes."""
    first, second = run.wrap(Layers()), run.wrap(Layers(3))
    for step in range(4):
        first.zero_grad(), second.zero_grad()
        if step % 2:
            (first(run.batch(step)).sum() * second(run.batch(step)).mean()).backward()
        else:
            a, b = first(run.batch(step)).sum(), second(run.batch(step)).sum()
            b.backward()
            with torch.no_grad():
                second.module.layers[0].weight -= 0.05 * second.module.layers[0].weight.grad
            a.backward()
        run.look(first), run.look(second)


@case
def one_model_feeds_another(run: Run) -> None:
    first, second = run.wrap(Layers()), run.wrap(Layers(3))
    for step in range(3):
        first.zero_grad(), second.zero_grad()
        second(first(run.batch(step))).sum().backward()
        run.look(first), run.look(second)


@case_of_ddp
def uneven_inputs(run: Run) -> None:
    """DDP's join: ranks that are out of data answer the collectives of the others."""
    model = run.wrap(Layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with Join([model]):
        for step in range(2 + run.rank):
            optimizer.zero_grad()
            model(run.batch(step)).sum().backward()
            optimizer.step()
    run.look(model)


@case
def collectives_of_the_user_in_the_backward_pass(run: Run) -> None:
    """As in synchronized batch norm: on the same process group, in the midst of the backward pass."""

    class MeanOverRanks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: torch.Tensor) -> torch.Tensor:
            x = x / dist.get_world_size(run.group)
            dist.all_reduce(x, group=run.group)
            return x

        @staticmethod
        def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
            grad = grad / dist.get_world_size(run.group)
            dist.all_reduce(grad, group=run.group)
            return grad

    class Synchronized(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = torch.tanh(layer(x))
                x = x - MeanOverRanks.apply(x.mean(0))
            return x

    run.train(run.wrap(Synchronized()))


def checkpointed(use_reentrant: bool) -> nn.Module:
    class Checkpointed(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.tanh(self.layers[0](x))
            for layer in self.layers[1:]:
                x = checkpoint(layer, x, use_reentrant=use_reentrant)
            return x

    return Checkpointed()


@case
def activation_checkpointing(run: Run) -> None:
    run.train(run.wrap(checkpointed(False)))


@case_of_ddp
def reentrant_activation_checkpointing(run: Run) -> None:
    run.train(run.wrap(checkpointed(True)))
    run.train(run.wrap(checkpointed(True), static_graph=True))


@case
def shared_parameter(run: Run) -> None:
    model = Layers()
    model.layers[3].weight = model.layers[0].weight
    run.train(run.wrap(model))


@case
def gradient_penalty(run: Run) -> None:
    """A backward pass through a backward pass."""
    model = run.wrap(Layers())
    for step in range(3):
        model.zero_grad()
        x = run.batch(step).requires_grad_()
        out = model(x).sum()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        (out + slope.pow(2).sum()).backward()
        run.look(model)


def cast(run: Run, dtype: torch.dtype) -> None:
    class Cast(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.to(dtype))

    run.train(run.wrap(Cast().to(dtype)))


@case
def float16(run: Run) -> None:
    cast(run, torch.float16)


@case
def bfloat16(run: Run) -> None:
    cast(run, torch.bfloat16)


@case
def float64(run: Run) -> None:
    cast(run, torch.float64)


@case
def mixed_dtypes(run: Run) -> None:
    """A bucket for each."""

    class Mixed(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = torch.tanh(layer(x.to(layer.weight.dtype)))
            return x

    model = Mixed()
    for layer, dtype in zip(model.layers, (torch.float32, torch.bfloat16, torch.float64, torch.float16), strict=True):
        layer.to(dtype)
    model.layers[0].bias.data = model.layers[0].bias.data.clone()
    run.train(run.wrap(model))


@case
def complex_parameters(run: Run) -> None:
    """Among real ones, also in bucket views."""

    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(12, 9, dtype=torch.complex64), nn.Linear(9, 3)
            self.filter = nn.Parameter(torch.randn(9, 9, dtype=torch.complex128).t())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.fft.fft(self.first(x.to(torch.complex64)))
            return self.last((x.to(torch.complex128) @ self.filter.conj()).abs().float())

    for options in ({}, {"gradient_as_bucket_view": True}):
        run.train(run.wrap(Complex(), **options), steps=3)


@case
def odd_shapes(run: Run) -> None:
    """Scalars, no entries at all, one entry."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.nothing = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.zeros(3, 0))
            self.one, self.layer = nn.Parameter(torch.ones(1, 1, 1)), nn.Linear(12, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) * self.scale + self.nothing.sum() - self.one.sum()

    run.train(run.wrap(Odd()))


@case
def channels_last(run: Run) -> None:
    class Convolutions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.view(8, 3, 8, 8).to(memory_format=torch.channels_last)
            return self.second(torch.relu(self.first(x)))

    model = Convolutions().to(memory_format=torch.channels_last)
    assert not model.first.weight.is_contiguous()
    for options in ({}, {"gradient_as_bucket_view": True}):
        wrapped = run.wrap(Convolutions().to(memory_format=torch.channels_last), **options)
        for step in range(3):
            wrapped.zero_grad()
            wrapped(run.batch(step, 192)).pow(2).mean().backward()
            run.look(wrapped)


@case
def transposed_parameters(run: Run) -> None:
    """Gradients with strides of their own."""
    model = Layers()
    for layer in model.layers:
        layer.weight = nn.Parameter(layer.weight.detach().clone().t())
    run.train(run.wrap(model))


@case
def many_tiny_parameters(run: Run) -> None:
    class Tiny(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ParameterList(nn.Parameter(torch.full((i % 4 + 1,), 0.1 * i)) for i in range(150))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([p.sum() * x[:, i % 12].mean() for i, p in enumerate(self.parts)])

    run.train(run.wrap(Tiny()), steps=3)


@case
def clipped_gradients(run: Run) -> None:
    model = run.wrap(Layers())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(4):
        optimizer.zero_grad()
        (5 * model(run.batch(step)).sum()).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert norm > 1
        optimizer.step()
        run.look(model)


@case
def tensor_hooks_of_the_user(run: Run) -> None:
    model = Layers()
    model.layers[1].weight.register_hook(lambda grad: 2 * grad)
    run.train(run.wrap(model))


@case_of_ddp
def detached_and_attached_again(run: Run) -> None:
    model = run.wrap(Layers())
    run.train(model, steps=2)
    if run.wrapper is not plain:
        gradwire.ddp.attach(model, "co3").detach()
    run.train(model, steps=2)
    if run.wrapper is not plain:
        gradwire.ddp.attach(model, "none")
    run.train(model, steps=2)


@case_of_ddp
def another_codec_in_between(run: Run) -> None:
    """Its error memory is not sent by the next one."""
    model = run.wrap(Layers())
    run.train(model, steps=2)
    if run.wrapper is not plain:
        gradwire.ddp.attach(model, "co3")
    model(run.batch(7)).sum().backward()
    if run.wrapper is not plain:
        gradwire.ddp.attach(model, "none")
    run.train(model, steps=2)


COMPILED = {"bucket_cap_mb": 25}  # torch.compile takes no buckets that are smaller than DDP's first


@case_of_ddp
def compiled_inside(run: Run) -> None:
    torch._dynamo.reset()
    run.train(run.wrap(torch.compile(Layers(2), backend="eager"), **COMPILED), steps=3)


@case
def compiled_around(run: Run) -> None:
    torch._dynamo.reset()
    run.train(torch.compile(run.wrap(Layers(2), **COMPILED), backend="aot_eager"), steps=3)


# Where it matters into which shards parameters fall; and of those, and of some more, how many ranks there are.
SHARDED = {
    "usual", "unused", "complex_parameters", "two_models_interleaved", "shared_parameter", "float16", "mixed_dtypes",
    "odd_shapes", "channels_last", "transposed_parameters", "many_tiny_parameters",
}  # fmt: skip
ON_THREE = SHARDED | {
    "accumulation", "unused_under_accumulation", "static_graph", "uneven_inputs", "clipped_gradients",
    "collectives_of_the_user_in_the_backward_pass", "detached_and_attached_again",
}  # fmt: skip


# ── scenarios: every case with every wrapper, on two ranks, and some on three ─────────────────────


def as_without_a_hook(wrapper_name: str, case_name: str, rank: int) -> None:
    dist.new_group([0, 2])  # trainings have groups of their own, and not all ranks are in them
    two = dist.new_group([0, 1])
    dist.barrier()  # before one that has nothing to do leaves, all are connected
    if rank < 2:
        check_same_training(CASES[case_name], WRAPPERS[wrapper_name], two)
    if case_name in ON_THREE:
        check_same_training(CASES[case_name], WRAPPERS[wrapper_name], dist.group.WORLD)


def scenarios() -> Iterator[tuple[str, Scenario]]:
    for wrapper_name, wrapper in WRAPPERS.items():
        for case_name in CASES:
            if case_name in OF_DDP and wrapper is not attached:
                continue
            if case_name in SHARDED or wrapper is not scattered:
                yield f"{wrapper_name} {case_name}", partial(as_without_a_hook, wrapper_name, case_name)


QUICK = {
    "ddp.attach usual", "ddp.attach unused", "ddp.attach static_graph", "ddp.attach mixed_dtypes",
    "scatter_reduce usual", "scatter_reduce odd_shapes", "DataParallel usual", "DataParallel accumulation",
}  # fmt: skip


@pytest.mark.parametrize("scenario", named(dict(scenarios()), QUICK))
def test_as_without_a_hook(ranks: RankPool, scenario: Scenario, request: pytest.FixtureRequest) -> None:
    if "complex_parameters" in request.node.name and not GLOO_TAKES_COMPLEX:
        pytest.skip("plain DDP of this torch cannot do it: its Gloo takes no complex tensors")
    ranks.check(scenario)
