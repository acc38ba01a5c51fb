"""Gradients that are added up on their way, with real processes: Gloo over loopback, three workers."""

from __future__ import annotations

import functools
import math
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire import SpecError
from gradwire.aggregate.sums.word_sums import ProcessGroupSums
from gradwire.aggregate.transport.link import Link
from support.rank_pool import RankPool, Scenario, named
from support.ranks import Net, Tensors, check_alike, check_raises, gathered, loss_of

WORLD = 3
SIZES = {"table": 40_000, "layer": 9_001, "bias": 37}


class Given(nn.Module):
    """Its gradients are what it is given."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for name, size in SIZES.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(size, dtype=dtype)))

    def forward(self, gradients: Tensors) -> torch.Tensor:
        return sum((getattr(self, name) * gradient).sum() for name, gradient in gradients.items())


def gradients(rank: int, step: int, density: float = 0.05, scale: float = 1.0) -> Tensors:
    """Entries of very different magnitudes, the same share of each tensor on every rank, elsewhere zeros."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    made = {}
    for name, size in SIZES.items():
        values = torch.randn(size, generator=generator) * torch.rand(size, generator=generator) ** 8
        kept = torch.rand(size, generator=generator) < (density if size > 100 else 1)
        made[name] = scale * values * kept
    return made


def step_of_grid(name: str, step: int) -> float:
    """Of 32 bits for three ranks, sixteen times as wide as the largest entry of the step before."""
    largest = max(float(gradients(rank, max(0, step - 1))[name].abs().max()) for rank in range(WORLD))
    return 2.0 ** (math.floor(math.log2(largest)) + 1 + 4 - 29)


def make(spec: object, wrap: str = "DataParallel", dtype: torch.dtype = torch.float32, **options: object) -> nn.Module:
    if wrap == "DataParallel":
        return gradwire.DataParallel(Given(dtype), spec, **options)
    model = DistributedDataParallel(Given(dtype), bucket_cap_mb=0.05)
    model.gradwire = gradwire.ddp.attach(model, spec, **options)
    return model


def step_of(model: nn.Module, given: Tensors) -> Tensors:
    model.zero_grad()
    model(given).backward()
    found = {name: p.grad.clone() for name, p in model.module.named_parameters() if p.grad is not None}
    assert len({tuple(t.double().sum().item() for t in other.values()) for other in gathered(found)}) == 1
    return found


def check_kept(model: nn.Module, sent: Tensors, given: Tensors, slack: float = 1e-6) -> None:
    """What ranks sent in all, and what they remember, is what they had: W·Σmean + Σe = Σg over all steps and ranks."""
    memory = {name: e.clone() for name, e in model.gradwire.state_dict()["memory"].items()}
    for name, total in given.items():
        everywhere = total.double().clone()
        dist.all_reduce(everywhere)
        left = memory.get(name, torch.zeros(SIZES[name])).double()
        dist.all_reduce(left)
        wrong = (WORLD * sent[name].double() + left - everywhere).abs().max()
        assert wrong <= slack * everywhere.abs().max(), (name, float(wrong))


def run_steps(model: nn.Module, steps: list[Tensors]) -> tuple[Tensors, Tensors]:
    sent, given = ({name: torch.zeros(size).double() for name, size in SIZES.items()} for _ in range(2))
    for own in steps:
        for name, found in step_of(model, own).items():
            sent[name] += found.double()
            given[name] += own[name].double()
    return sent, given


# ── scenarios ─────────────────────────────────────────────────────────────────────────────────────


def all_nonzero_entries(rank: int) -> None:
    """p=all is the mean of all ranks' gradients, but for what is below the grid."""
    for wrap in ("DataParallel", "attach"):
        model = make("homomorphic:p=all", wrap)
        for step in range(5):
            own = gradients(rank, step)
            found = step_of(model, own)
            for name, gradient in own.items():
                true = gradient.double()
                dist.all_reduce(true)
                error = (found[name].double() - true / WORLD).abs()
                # What this grid rounds off, and what one before it did, which is sent along.
                bound = step_of_grid(name, step) / 2 + max(step_of_grid(name, s) for s in range(step + 1)) / 2
                assert bool((error <= bound + 2**-24 * true.abs()).all()), (wrap, name)
        assert model.gradwire.aggregate == "sum"


def nothing_is_lost(rank: int) -> None:
    for spec in (
        "homomorphic:p=0.01",
        "homomorphic:p=0.01,rounds=2",
        "homomorphic:p=all,rounds=2",
        "homomorphic:p=all",
        "homomorphic:p=all,bits=8",
        "homomorphic:p=0.1,bits=16",
    ):
        model = make(spec)
        sent, given = run_steps(model, [gradients(rank, step) for step in range(30)])
        check_kept(model, sent, given)
        assert max(float(t.abs().max()) for t in sent.values()) > 0.1, spec


def a_jump_waits_in_the_memory(rank: int) -> None:
    """Gradients a thousand times larger than the grid was made for arrive in the next steps."""
    model = make("homomorphic:p=all")
    steps = [gradients(rank, step, scale=1e3 if step == 3 else 1.0) for step in range(6)]
    sent, given = run_steps(model, steps)
    check_kept(model, sent, given)
    clipped = max(float(e.abs().max()) for e in model.gradwire.state_dict()["memory"].values())
    assert clipped > 1, "entries that are zero in the steps after the jump wait"


def a_growing_union_is_repaired(rank: int) -> None:
    model = make("homomorphic:p=all")
    densities = [0.002, 0.002, 0.3, 0.002, 0.9]
    sent, given = run_steps(model, [gradients(rank, step, d) for step, d in enumerate(densities)])
    check_kept(model, sent, given)
    assert model.gradwire.stats()["repairs"] >= 1


def not_finite_reaches_all(rank: int) -> None:
    for spec in ("homomorphic:p=0.01", "homomorphic:p=all", "homomorphic:p=all,bits=8"):
        model = make(spec)
        step_of_all = functools.partial(gradients, rank)
        sent, given = run_steps(model, [step_of_all(0), step_of_all(1)])
        before = {name: e.clone() for name, e in model.gradwire.state_dict()["memory"].items()}
        bad = step_of_all(2)
        if rank == 1:
            bad["layer"][5] = float("inf")
        model.zero_grad()
        model(bad).backward()
        assert all(bool(p.grad.isnan().any()) for p in [model.module.layer]), spec
        after = model.gradwire.state_dict()["memory"]
        assert all(torch.equal(before[name], after[name]) for name in before), "memory is rolled back"
        more_sent, more_given = run_steps(model, [step_of_all(3)])
        check_kept(
            model,
            {n: sent[n] + more_sent[n] for n in sent},
            {n: given[n] + more_given[n] for n in given},
        )


def unbiased_without_memory(rank: int) -> None:
    """Stochastic rounding without a memory: nothing is limited, also after a jump, and errors average out."""
    model = make("homomorphic:p=all,bits=8,rounding=stochastic,decay=0")
    own = {name: torch.linspace(-1, 1, size) * (1 + rank) for name, size in SIZES.items()}
    total = {name: torch.zeros(size).double() for name, size in SIZES.items()}
    steps = 60
    for _ in range(steps):
        for name, found in step_of(model, own).items():
            total[name] += found.double()
    coarseness = 4.0 / 42  # of the grid: 2^2 over the largest code of three ranks
    true = {name: gradient.double() / (1 + rank) * (1 + WORLD) / 2 for name, gradient in own.items()}
    for name in own:
        error = total[name] / steps - true[name]
        assert float(error.abs().mean()) < coarseness / (steps * WORLD) ** 0.5, name
        assert abs(float(error.mean())) < 3 * coarseness / (steps * WORLD * SIZES[name]) ** 0.5, name
    for name, found in step_of(model, {n: 64 * g for n, g in own.items()}).items():
        assert float((found / 64 - true[name]).abs().max()) <= 1.01 * coarseness, "limited"


def beside_other_recipes(rank: int) -> None:
    for wrap in ("DataParallel", "attach"):
        model = make({"table": "homomorphic:p=all", "layer": "none", "*": "co3"}, wrap)
        for step in range(3):
            own = gradients(rank, step)
            found = step_of(model, own)
            for name in ("table", "layer"):
                true = own[name].double()
                dist.all_reduce(true)
                assert torch.allclose(found[name].double(), true / WORLD, atol=2**-20, rtol=2**-22), name


def unused_on_some_ranks(rank: int) -> None:
    model = make("homomorphic:p=all")
    for step in range(3):
        own = gradients(rank, step)
        if rank != step % WORLD:
            del own["layer"]
        found = step_of(model, own)
        true = own.get("layer", torch.zeros(SIZES["layer"])).double()
        dist.all_reduce(true)
        assert torch.allclose(found["layer"].double(), true / WORLD, atol=2**-20, rtol=2**-22)


def half_precision(rank: int) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        model = make("homomorphic:p=all", dtype=dtype)
        own = {name: g.to(dtype) for name, g in gradients(rank, 0).items()}
        for name, found in step_of(model, own).items():
            true = own[name].double()
            dist.all_reduce(true)
            assert found.dtype == dtype
            assert torch.allclose(found.double(), true / WORLD, atol=2**-20, rtol=2**-7), (dtype, name)


def beyond_half_precision(rank: int) -> None:
    """With what the memory holds, a mean may be beyond the dtype's range: infinite, and then nothing is left of it."""
    for dtype in (torch.float16, torch.bfloat16):
        for spec in ("homomorphic:p=all", "homomorphic:p=0.5", "homomorphic:p=all,bits=8", "homomorphic:p=0.5,bits=8"):
            model = make(spec, dtype=dtype)
            for factor in (1.0, 1.0, 1.0, 0.6, 0.6, 0.6, 1.0):
                large = torch.finfo(dtype).max * factor if factor < 1 else 1.0
                own = {name: torch.full((size,), large, dtype=dtype) for name, size in SIZES.items()}
                for name, found in step_of(model, own).items():
                    assert bool(found.isfinite().all()), (dtype, spec, name)


def infinite_from_the_start(rank: int) -> None:
    """As with a GradScaler, whose first scales are too large: the first step that is finite has its grid."""
    for spec in ("homomorphic:p=all", "homomorphic:p=0.1", "homomorphic:p=all,bits=8"):
        model = make(spec)
        for step in range(4):
            own = gradients(rank, step, density=1.0)
            if rank == 1 and step < 3:
                own["table"][5] = -float("inf")
            model.zero_grad()
            model(own).backward()
        assert float(model.module.table.grad.abs().max()) > 0.1, spec


def recipes_that_change_places(rank: int) -> None:
    """DDP has other tensors in its buckets after the first step, and so other recipes where those of before were."""
    model = make({"table": "homomorphic:p=all,bits=8", "layer": "homomorphic:p=all", "*": "homomorphic"}, "attach")
    sent, given = run_steps(model, [gradients(rank, step) for step in range(4)])
    check_kept(model, sent, given)


def trains_and_resumes(rank: int) -> None:
    """A resumed run is the one that never stopped, to the bit, though messages are others in its first step."""

    def trained(spec: str, steps: range, state: dict | None) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = gradwire.DataParallel(Net(), spec)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        if state:
            model.module.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            model.gradwire.load_state_dict(state["memory"])
        for step in steps:
            optimizer.zero_grad()
            loss_of(model, rank, step % 4).backward()
            optimizer.step()
        check_alike(model)
        return model, optimizer

    for spec in ("homomorphic:p=0.1", "homomorphic:p=all,bits=8"):
        torch.manual_seed(0)
        first = float(sum(gathered(float(loss_of(Net(), rank, 0)))))
        model, optimizer = trained(spec, range(40), None)
        assert sum(gathered(float(loss_of(model.module, rank, 0)))) < 0.7 * first
        state = {
            "model": model.module.state_dict(),
            "optimizer": optimizer.state_dict(),
            "memory": model.gradwire.state_dict(),
        }
        assert state["memory"]["steps"] == 40
        resumed, _ = trained(spec, range(40, 44), state)
        assert check_alike(resumed) == check_alike(trained(spec, range(44), None)[0]), spec


def hierarchical(rank: int) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    model = make("homomorphic:p=0.05", aggregate="hierarchical")
    sent, given = run_steps(model, [gradients(rank, step) for step in range(4)])
    check_kept(model, sent, given)
    del os.environ["LOCAL_WORLD_SIZE"]


def or_without_an_or(rank: int) -> None:
    """What takes the place of BOR on backends that have none."""
    link = Link.beside(None)
    link.can_or = False
    words = torch.arange(10, dtype=torch.int32) * (1 << (8 * rank))
    ored, added = ProcessGroupSums(link).finish(ProcessGroupSums(link).start(words, words))
    assert torch.equal(ored, sum(torch.arange(10, dtype=torch.int32) << (8 * r) for r in range(WORLD)))
    assert torch.equal(ored, added)


def says_what_is_wrong(rank: int) -> None:
    check_raises(SpecError, "decay", lambda: make("homomorphic:p=all,decay=0"))
    check_raises(SpecError, "homomorphic", lambda: make("co3", aggregator="localhost:9"))


SCENARIOS = [
    all_nonzero_entries, nothing_is_lost, a_jump_waits_in_the_memory, a_growing_union_is_repaired,
    not_finite_reaches_all, unbiased_without_memory, beside_other_recipes, unused_on_some_ranks, half_precision,
    beyond_half_precision, infinite_from_the_start, recipes_that_change_places, trains_and_resumes, hierarchical,
    or_without_an_or, says_what_is_wrong,
]  # fmt: skip
QUICK = {
    "all_nonzero_entries",
    "a_jump_waits_in_the_memory",
    "not_finite_reaches_all",
    "half_precision",
    "trains_and_resumes",
    "says_what_is_wrong",
}


@pytest.mark.parametrize("scenario", named(SCENARIOS, QUICK))
def test_summed_on_three_ranks(ranks: RankPool, scenario: Scenario) -> None:
    ranks.check(scenario, WORLD)
