"""Parameters that are complex, or lie in memory in another order than their dimensions have.

All ranks stay alike, nothing of a gradient is lost, and a state that was saved means the same whoever made it: error
memory has the order of the parameter's dimensions, and two reals for a complex entry.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.correct.complex_pairs import as_reals
from gradwire.frame import headers
from support.frames_seen import frames_seen
from support.rank_pool import RankPool, Scenario, named
from support.ranks import Tensors, digest, gathered
from support.torch_versions import GLOO_TAKES_COMPLEX

pytestmark = pytest.mark.skipif(not GLOO_TAKES_COMPLEX, reason="plain DDP cannot train complex parameters over Gloo")

WORLD = 2
DECAY = float(torch.tensor(0.9))


class Convolutions(nn.Module):
    """A convolution in channels_last, a transposed matrix and a complex one; large ones and small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(16, 40, 3)
        self.last = nn.Conv2d(40, 8, 1)
        self.mixed = nn.Parameter(0.1 * torch.randn(60, 32, dtype=torch.complex64))
        self.turned = nn.Parameter(0.1 * torch.randn(120, 40).t())
        self.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.last(torch.relu(self.first(x))).flatten(1)
        x = torch.view_as_real(x.to(torch.complex64) @ self.mixed.t()).flatten(1)
        return x @ self.turned.t()


def make() -> Convolutions:
    torch.manual_seed(0)
    return Convolutions()


def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return model(torch.randn(4, 16, 4, 4, generator=generator)).pow(2).mean()


def own_gradients(model: nn.Module, rank: int, step: int) -> Tensors:
    alone = copy.deepcopy(model)
    alone.zero_grad()
    loss(alone, rank, step).backward()
    return {name: as_reals(p.grad).contiguous() for name, p in alone.named_parameters()}


def mean_of(tensors: Tensors) -> Tensors:
    everyone = gathered(tensors)
    return {name: sum(other[name].double() for other in everyone) / len(everyone) for name in tensors}


def check_alike(tensors: Tensors) -> None:
    digests = gathered(digest({name: t.contiguous() for name, t in tensors.items()}))
    assert len(set(digests)) == 1


def by_attach(inner: nn.Module, spec: str, **options: object) -> tuple[nn.Module, object]:
    model = DistributedDataParallel(inner, bucket_cap_mb=0.01)
    return model, gradwire.ddp.attach(model, spec, **options)


def by_attach_in_views(inner: nn.Module, spec: str, **options: object) -> tuple[nn.Module, object]:
    model = DistributedDataParallel(inner, gradient_as_bucket_view=True)
    return model, gradwire.ddp.attach(model, spec, **options)


def by_data_parallel(inner: nn.Module, spec: str, **options: object) -> tuple[nn.Module, object]:
    model = gradwire.DataParallel(inner, spec, **options)
    return model, model.gradwire


WRAPPERS: dict[str, Callable[..., tuple[nn.Module, object]]] = {
    "attach": by_attach,
    "bucket views": by_attach_in_views,
    "DataParallel": by_data_parallel,
}


def gradients_of(inner: nn.Module) -> Tensors:
    return {name: as_reals(p.grad).clone() for name, p in inner.named_parameters()}


def nothing_is_lost(rank: int, spec: str = "co3", *later: str) -> None:
    """mean + Σe′/W = Σ(g + γe)/W, entry for entry in the order of the dimensions, however frames meet."""
    for aggregate in ("all_gather", "scatter_reduce"):
        for name, wrap in WRAPPERS.items():
            inner = make()
            model, handle = wrap(inner, spec, aggregate=aggregate)
            before: Tensors = {}
            for step, other in enumerate(("", *(later or ("", "")))):
                if other:
                    handle.gradients.tuner.use(other)
                true = mean_of(own_gradients(inner, rank, step))
                model.zero_grad()
                loss(model, rank, step).backward()
                found, state = gradients_of(inner), handle.state_dict()
                check_alike(found)
                left = mean_of({n: state["memory"].get(n, torch.zeros_like(t)) for n, t in found.items()})
                if "shards" in state:
                    shards = mean_of({n: state["shards"].get(n, torch.zeros_like(t)) for n, t in found.items()})
                    left = {n: left[n] + WORLD * shards[n] for n in left}
                for parameter, mean in found.items():
                    assert left[parameter].shape == mean.shape
                    in_all = true[parameter] + DECAY * before.get(parameter, torch.zeros(1))
                    error = (mean.double() + left[parameter] - in_all).abs().max()
                    assert error <= 4e-6 * in_all.abs().max(), (name, aggregate, step, parameter)
                before = left


def kernels_keep_their_shape(rank: int) -> None:
    """A codec that uses the shape gets that of the parameter, in whatever order a bucket has the entries."""
    with frames_seen() as seen:
        nothing_is_lost(rank, "structured")
    shapes = {shape for codec, shape in seen if codec == headers.STRUCTURED}
    assert shapes >= {(40, 16, 3, 3), (40, 120)} and not shapes & {(40, 3, 3, 16), (120, 40)}, shapes


def recipes_that_use_the_shape_and_others(rank: int) -> None:
    """One after the other, as `auto` tries them: memories follow into the order, and the shards, that count."""
    nothing_is_lost(rank, "ecq:nmse=0.03", "structured", "co3")


def states_fit_every_wrapper(rank: int) -> None:
    """A run goes on to the same bits where its state is loaded, in whatever memory format and by whatever wrapper."""
    spec, options = "topk:p=0.2,values=fp32,small=same", {"aggregate": "all_gather"}
    states = []
    for wrap in WRAPPERS.values():
        model, handle = wrap(make(), spec, **options)
        for step in range(2):
            model.zero_grad()
            loss(model, rank, step).backward()
        states.append(handle.state_dict())
        assert all(torch.equal(e, states[0]["memory"][n]) for n, e in states[-1]["memory"].items())
    results = []
    for wrap in WRAPPERS.values():
        for layout in (torch.channels_last, torch.contiguous_format):
            inner = make().to(memory_format=layout)
            model, handle = wrap(inner, spec, **options)
            handle.load_state_dict(states[0])
            loss(model, rank, 2).backward()
            results.append(gradients_of(inner))
    for result in results[1:]:
        for name, gradient in result.items():
            gap = (gradient - results[0][name]).abs().max()
            assert gap <= 1e-5 * results[0][name].abs().max(), name  # convolutions round by memory format


def the_memory_format_changes_after_wrapping(rank: int) -> None:
    """DDP builds its buckets anew after the first step, in the order that parameters have then."""
    inner = nn.Conv2d(16, 40, 3)
    model, handle = by_attach(inner, "topk:p=0.2,values=fp32,small=same", aggregate="all_gather")
    gradient = torch.randn(40, 16, 3, 3, generator=torch.Generator().manual_seed(rank))
    unsent = torch.zeros(40, 16, 3, 3)
    for step in range(3):
        model.zero_grad()
        unused = 0 * model(torch.zeros(1, 16, 3, 3)).sum()
        (unused + (inner.weight * gradient).sum()).backward()
        memory = handle.state_dict()["memory"]["weight"]
        waiting = memory != 0
        assert bool((memory == gradient + unsent)[waiting].all()), step
        unsent = memory
        if step == 0:
            inner.to(memory_format=torch.channels_last)


def every_kind_of_recipe(rank: int) -> None:
    """All ranks stay alike, and states have the shapes of the parameters: hosts that share memories, sums, bf16."""
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    for spec, options in (
        ("co3", {"aggregate": "hierarchical"}), ("co3", {"memory": "bf16"}), ("homomorphic", {}), ("qsgd", {}),
    ):  # fmt: skip
        for name, wrap in WRAPPERS.items():
            inner = make()
            model, handle = wrap(inner, spec, **options)
            for step in range(2):
                model.zero_grad()
                loss(model, rank, step).backward()
                handle.load_state_dict(handle.state_dict())
            check_alike(gradients_of(inner))
            memory = handle.state_dict()["memory"]
            assert all(e.shape == as_reals(inner.get_parameter(n)).shape for n, e in memory.items()), (spec, name)


def momentum_is_that_of_the_parameter(rank: int) -> None:
    """Where all entries are sent, momentum that is taken over, and weight decay, are those of plain SGD."""
    for wrap in WRAPPERS.values():
        results = []
        for spec in ("none", "topk:k=1000000,values=fp32,mask=on,small=same"):
            inner = make()
            optimizer = torch.optim.SGD(inner.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
            loss(inner, 0, 0).backward()
            optimizer.step()
            model, handle = wrap(inner, spec, optimizer=optimizer)
            optimizer.zero_grad()
            loss(model, rank, 1).backward()
            optimizer.step()
            handle.detach()
            results.append({name: as_reals(p.detach()).clone() for name, p in inner.named_parameters()})
        for name, value in results[0].items():
            assert torch.allclose(results[1][name], value, rtol=1e-4, atol=1e-6), name


def complex_gradients_by_a_state_without_a_model(rank: int) -> None:
    inner = make()
    model = DistributedDataParallel(inner)
    model.register_comm_hook(gradwire.ddp.State("none"), gradwire.ddp.hook)
    true = mean_of(own_gradients(inner, rank, 0))
    loss(model, rank, 0).backward()
    found = gradients_of(inner)
    check_alike(found)
    assert all(bool((found[n] - t).abs().max() <= 1e-6 * t.abs().max()) for n, t in true.items())


def auto_and_plain_steps(rank: int) -> None:
    for wrap in WRAPPERS.values():
        inner = make()
        model, _ = wrap(inner, "auto")
        for step in range(4):
            true = mean_of(own_gradients(inner, rank, step))
            model.zero_grad()
            loss(model, rank, step).backward()
            found = gradients_of(inner)
            check_alike(found)
            assert all(bool((found[n] - t).norm() <= 0.7 * t.norm()) for n, t in true.items()), step


def local_sgd(rank: int) -> None:
    """With `none` and one step a round, the model is moved by the mean; sparse updates leave all ranks alike, too.

    Updates have the shapes of their parameters, for codecs that use them.
    """
    for spec, every in (("none", 1), ("sbc2", 2), ("structured", 2)):
        inner = make()
        inner.register_buffer("phase", torch.full((3,), complex(rank, 1)))
        optimizer = torch.optim.SGD(inner.parameters(), lr=0.05, momentum=0.9)
        with frames_seen() as seen, gradwire.LocalSGD(inner, optimizer, spec, sync_every=every):
            for step in range(4):
                before = {name: as_reals(p.detach()).clone() for name, p in inner.named_parameters()}
                optimizer.zero_grad()
                true = own_gradients(inner, rank, step)
                loss(inner, rank, step).backward()
                inner.phase.add_(complex(rank, 0))
                optimizer.step()
                if spec == "none" and step == 0:
                    for name, gradient in mean_of(true).items():
                        moved = (before[name] - 0.05 * gradient).float()
                        assert torch.allclose(as_reals(inner.get_parameter(name).detach()), moved, atol=1e-6), name
        check_alike({n: as_reals(t.detach()) for n, t in inner.state_dict().items()})
        if spec == "structured":
            assert {(headers.STRUCTURED, (40, 16, 3, 3)), (headers.STRUCTURED, (40, 120))} <= set(seen)


SCENARIOS = [
    nothing_is_lost, kernels_keep_their_shape, recipes_that_use_the_shape_and_others, every_kind_of_recipe,
    states_fit_every_wrapper, the_memory_format_changes_after_wrapping, momentum_is_that_of_the_parameter,
    complex_gradients_by_a_state_without_a_model, auto_and_plain_steps, local_sgd,
]  # fmt: skip


@pytest.mark.parametrize("scenario", named(SCENARIOS))
def test_on_two_ranks(ranks: RankPool, scenario: Scenario) -> None:
    ranks.check(scenario, WORLD)
