"""States that a handle must not go on from: it says why, names the fix, and is as it was before.

One process stands for all ranks where they do not differ: its gradients go through the codec like any others.
"""

from __future__ import annotations

import copy
import functools
import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire import AggregateError, CheckpointError
from gradwire.checkpoints import rank_states
from gradwire.flower.client.client_memory import ClientMemory
from support.rank_pool import RankPool, Scenario, named
from support.ranks import be_quiet, check_raises, cpu_mesh, digest
from support.torch_versions import HAS_FSDP2

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning")


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """A process group of this process only, for all tests of this file."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    gc.collect()  # DDP models keep the group
    dist.destroy_process_group()


class Run:
    """A model that takes a few steps, whichever way its gradients go."""

    def __init__(self, wrapper: str, spec: Any, **options: Any) -> None:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(70, 80), nn.Tanh(), nn.Linear(80, 3))
        self.optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        self.inside = False
        if wrapper == "ddp":
            self.model: nn.Module = DistributedDataParallel(module)
            self.handle: Any = gradwire.ddp.attach(self.model, spec, optimizer=self.optimizer, **options)
        elif wrapper == "data_parallel":
            self.model = gradwire.DataParallel(module, spec, optimizer=self.optimizer, **options)
            self.handle = self.model.gradwire
        elif wrapper == "fsdp":
            be_quiet()
            self.model = fully_shard(module, mesh=cpu_mesh())
            self.handle = gradwire.fsdp.attach(self.model, spec, **options)
        else:
            self.model, self.inside = module, True
            self.handle = gradwire.LocalSGD(module, self.optimizer, spec, **options)

    def train(self, steps: int = 3) -> Run:
        if self.inside:
            with self.handle:
                return self._train(steps)
        return self._train(steps)

    def _train(self, steps: int) -> Run:
        for step in range(steps):
            self.optimizer.zero_grad()
            x = torch.randn(8, 70, generator=torch.Generator().manual_seed(step))
            self.model(x).square().mean().backward()
            self.optimizer.step()
        return self


def flat(state: Any) -> str:
    leaves = {".".join(map(str, path)): leaf for path, leaf in rank_states.leaves(state)}
    tensors = digest({name: leaf for name, leaf in leaves.items() if isinstance(leaf, torch.Tensor)})
    return tensors + str({name: leaf for name, leaf in leaves.items() if not isinstance(leaf, torch.Tensor)})


def refused(run: Run, state: Any, expected: str) -> None:
    """It raises, and everything is as it was: the state, and what the next steps make of it."""
    before = flat(run.handle.state_dict())
    with pytest.raises(CheckpointError, match=expected):
        run.handle.load_state_dict(state)
    assert flat(run.handle.state_dict()) == before


def state_of(wrapper: str, spec: Any) -> Any:
    state = Run(wrapper, spec).train().handle.state_dict()
    if wrapper == "fsdp":  # which sends nothing to itself
        state["memory"] = {"0.weight": torch.ones(80, 70)}
    return state


def possible(cases: dict[str, tuple[str, Any, Any]]) -> list[str]:
    """Return the names of the cases whose wrapper this torch can do."""
    return [name for name, (wrapper, _, _) in cases.items() if wrapper != "fsdp" or HAS_FSDP2]


# ── another recipe ────────────────────────────────────────────────────────────────────────────────

OTHERS = {
    "stc into co3": ("ddp", "stc", "co3"),
    "co3 into stc": ("ddp", "co3", "stc"),
    "co3 into ecq": ("ddp", "co3", "ecq"),
    "co3 into none": ("ddp", "co3", "none"),
    "a dict": ("ddp", {"0.*": "topk", "*": "co3"}, {"2.*": "topk", "*": "co3"}),
    "momentum": ("ddp", "topk:mask=on", "topk:mask=off"),
    "memory off": ("ddp", "co3", "co3:decay=0"),
    "DataParallel": ("data_parallel", "stc", "co3"),
    "FSDP2": ("fsdp", "topk", "co3"),
    "LocalSGD": ("local_sgd", "stc2", "co3"),
    "LocalSGD without memory": ("local_sgd", "diloco", "co3"),
    "LocalSGD, ahead": ("local_sgd", "sbc:ahead=1", "sbc:ahead=0.5"),
    "LocalSGD, outer": ("local_sgd", "diloco", "diloco:outer_lr=0.5"),
}


@pytest.mark.parametrize("name", possible(OTHERS))
def test_another_recipe_is_refused(one_rank: None, name: str) -> None:
    wrapper, saved, present = OTHERS[name]
    state = state_of(wrapper, saved)
    fix = r"was saved under the recipe '\w+.*', and its recipe is '\w+.*' now.*use the recipe '\w+.*' to go on"
    refused(Run(wrapper, present).train(1), state, fix)


SAME_MEMORY = {
    "decay": ("ddp", "co3:decay=0.9", "co3:decay=0.5"),
    "format": ("ddp", "co3:format=fp4", "co3:format=fp8,coder=huffman"),
    "entries": ("ddp", "stc:p=0.01", "stc:p=0.05,clip_norm=1,warmup=10"),
    "another spelling": ("ddp", "co3", {"0.*": "co3", "*": "co3:decay=0.8"}),
    "from nothing": ("ddp", "none", "stc"),
    "FSDP2": ("fsdp", "topk:p=0.01", "topk:p=0.05"),
    "LocalSGD": ("local_sgd", "stc2", "stc2:p=0.05,sync_every=3"),
    "auto": ("ddp", "co3", "auto"),
}


@pytest.mark.parametrize("name", possible(SAME_MEMORY))
def test_parameters_that_leave_memories_their_meaning(one_rank: None, name: str) -> None:
    wrapper, saved, present = SAME_MEMORY[name]
    state = state_of(wrapper, saved)
    run = Run(wrapper, present)
    run.handle.load_state_dict(state)
    assert digest(run.handle.state_dict()["memory"]) == digest(state["memory"])
    run.train(1)


def test_states_without_recipes_are_taken_as_they_are(one_rank: None) -> None:
    """Those of versions that did not save them; but velocities tell of a recipe that masks momentum."""
    of_co3, of_stc = (Run("ddp", spec).train().handle.state_dict() for spec in ("co3", "stc"))
    for state in (of_co3, of_stc):
        del state["recipes"]
    run = Run("ddp", "co3")
    run.handle.load_state_dict(of_co3)
    refused(run, of_stc, "velocities, of a recipe that masks momentum")


def test_a_state_of_another_wrapper(one_rank: None) -> None:
    of_ddp, of_local = (Run(wrapper, "co3").train().handle.state_dict() for wrapper in ("ddp", "local_sgd"))
    refused(Run("ddp", "co3"), of_local, "of a LocalSGD")
    refused(Run("local_sgd", "co3"), of_ddp, "not the state of a LocalSGD")
    if HAS_FSDP2:
        refused(Run("fsdp", "co3", memory="none"), of_ddp, "memory='none'")


def test_dcp_refuses_another_recipe(one_rank: None, tmp_path: Path) -> None:
    saved, other = Run("ddp", "stc").train(), Run("ddp", "co3").train(1)
    torch_dcp.save({"gradwire": gradwire.dcp.shard(saved.handle)}, checkpoint_id=tmp_path)
    before = flat(other.handle.state_dict())
    with pytest.raises(CheckpointError, match=r"'stc'.*'co3'"):
        gradwire.dcp.load(other.handle, tmp_path)
    assert flat(other.handle.state_dict()) == before
    again = Run("ddp", "stc")
    gradwire.dcp.load(again.handle, tmp_path)
    assert flat(again.handle.state_dict()) == flat(saved.handle.state_dict())


class DictStore(dict):
    """A store of a Flower client in memory."""

    def read(self, name: str) -> Any:
        return self.get(name)

    def write(self, name: str, content: Any) -> None:
        self[name] = content

    def move(self, name: str, new: str) -> None:
        self[new] = self.pop(name)

    def drop(self, name: str) -> None:
        self.pop(name, None)


def test_flower_clients_refuse_another_recipe() -> None:
    store, left_out = DictStore(), {"w": torch.ones(5000)}
    memory, of = ClientMemory(store), gradwire.catalogue.spec_by_name.parse_spec
    memory.propose(b"1", left_out, of("stc"))
    with pytest.raises(CheckpointError, match=r"'stc'.*'co3'"):
        memory.settle([b"1"], of("co3"))
    assert torch.equal(memory.settle([b"1"], of("stc:p=0.1"))["w"], left_out["w"]), "it is still there"
    memory.propose(b"2", left_out)  # under instructions of the server, which may change in every round
    assert memory.settle([b"2"], of("co3"))


# ── damaged, or not a state at all ────────────────────────────────────────────────────────────────


def changed(path: tuple[str, ...], value: Any) -> Callable[[Any], None]:
    def change(state: Any) -> None:
        for key in path[:-1]:
            state = state[key]
        state[path[-1]] = value(state[path[-1]]) if callable(value) else value

    return change


WEIGHT = "0.weight"
DAMAGE: dict[str, tuple[Callable[[Any], None], str]] = {
    "not finite": (changed(("memory", WEIGHT), lambda t: t.index_fill(0, torch.tensor([3]), float("nan"))), "finite"),
    "too large for fp32": (changed(("memory", WEIGHT), lambda t: t.double() + 1e300), "finite"),
    "shape": (changed(("memory", WEIGHT), lambda t: t.reshape(-1)), "shape"),
    "a shape that fits no memory": (changed(("memory", WEIGHT), torch.ones(1).expand(2**45)), "shape"),
    "integers": (changed(("memory", WEIGHT), lambda t: t.long()), "tensor of torch.int64"),
    "sparse": (changed(("memory", WEIGHT), lambda t: t.to_sparse()), "floats that can be read"),
    "no tensor": (changed(("memory", WEIGHT), 3.0), "no tensor"),
    "no dict": (changed(("memory",), []), "'memory' is not a dict"),
    "another model": (changed(("memory",), lambda m: {f"x.{name}": t for name, t in m.items()}), "does not have"),
    "velocity": (changed(("velocity", WEIGHT), lambda t: t * float("inf")), "velocity of '0.weight'"),
    "steps": (changed(("steps",), -1), "'steps' is -1"),
    "steps in words": (changed(("steps",), "4"), "'steps' is '4'"),
    "recipes": (changed(("recipes",), {"*": "co4"}), "does not know"),
    "no recipes": (changed(("recipes",), 7), "does not know"),
    "recipes of others": (changed(("recipes",), {"head.*": "stc"}), "none of its recipes is for"),
    "shards": (lambda state: state.update(shards={WEIGHT: torch.ones(3)}), "shards of '0.weight'"),
    "grids": (lambda state: state.update(grids={WEIGHT: torch.ones(9)}), "grids"),
    "grids of any size": (lambda state: state.update(grids={WEIGHT: torch.tensor([0, 400])}), "no gradient can have"),
    "gathered": (lambda state: state.update(ranks=[1], format=rank_states.FORMAT), "not a gathered state"),
}


@pytest.fixture(scope="module")
def saved_state(one_rank: None) -> Any:
    return Run("ddp", "stc").train().handle.state_dict()


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_state_changes_nothing(one_rank: None, saved_state: Any, name: str) -> None:
    damage, expected = DAMAGE[name]
    state = copy.deepcopy(saved_state)
    damage(state)
    refused(Run("ddp", "stc").train(2), state, expected)


def test_states_of_ranks_that_do_not_fit_together() -> None:
    one, other = {"memory": {"a": torch.ones(3)}}, {"memory": {"a": torch.ones(4)}}
    for states in ([one, other], [one, {"memory": 3}], [{"memory": 3}, one], [one, {"memory": {"a": 1.0}}]):
        with pytest.raises(CheckpointError, match="do not fit together"):
            rank_states.own_part({"format": rank_states.FORMAT, "ranks": states})


def test_loading_keeps_nothing_of_the_caller(one_rank: None, saved_state: Any) -> None:
    run, state = Run("ddp", "stc"), copy.deepcopy(saved_state)
    run.handle.load_state_dict(state)
    run.train(2)
    assert flat(state) == flat(saved_state)


OUTER = {
    "lr": changed(("outer", "param_groups"), lambda groups: [{**groups[0], "lr": "high"}]),
    "not finite": changed(("outer", "param_groups"), lambda groups: [{**groups[0], "lr": float("nan")}]),
    "parameters": changed(("outer", "param_groups"), lambda groups: [{**groups[0], "params": [0]}]),
    "groups": changed(("outer", "param_groups"), []),
    "momentum": changed(("outer", "state"), lambda s: {**s, 0: {"momentum_buffer": torch.ones(2)}}),
    "number": changed(("outer", "state"), {99: {}}),
    "nothing": changed(("outer",), None),
    "anchor": changed(("anchor", WEIGHT), lambda t: t / 0),
    "buffers": changed(("buffers",), {"x": torch.ones(1)}),
    "pending": changed(("pending",), 1.5),
    "inside": changed(("inside",), "yes"),
    "turn": changed(("parts", "next"), 1),
    "steps of parts": changed(("parts", "unsent"), [-1]),
    "under way": changed(("under_way",), {"part": 0}),
}


@pytest.mark.parametrize("name", OUTER)
def test_a_damaged_state_of_local_sgd_changes_nothing(one_rank: None, name: str) -> None:
    state = Run("local_sgd", "diloco:sync_every=1").train().handle.state_dict()
    OUTER[name](state)
    refused(
        Run("local_sgd", "diloco:sync_every=1").train(1), state, "outer|anchor|common|buffers|pending|block|parts|due"
    )


# ── calls that all ranks must make ────────────────────────────────────────────────────────────────


def on_one_rank(call: str, wrapper: str, caller: int, rank: int) -> None:
    """The caller waits for the others, who wait for its gradients: both are told the call, within the timeout."""
    calls: dict[str, Callable[[Any], object]] = {
        "all_ranks": lambda handle: handle.all_ranks.state_dict(),
        "dcp.shard": gradwire.dcp.shard,
    }
    run = Run(wrapper, "co3", timeout=2).train(2)
    if rank == caller:
        with pytest.raises(AggregateError, match=rf"{call}.*Call it on all ranks, not under"):
            calls[call](run.handle)
        check_raises(AggregateError, "failed before", lambda: calls[call](run.handle))
    else:
        check_raises(AggregateError, call, lambda: run.train(1))


def the_others_are_busy(rank: int) -> None:
    """They neither come nor exchange anything, so that it is the timeout of the handle that ends the call."""
    run = Run("ddp", "co3", timeout=1).train(2)
    dist.barrier()
    if rank == 0:
        began = time.monotonic()
        with pytest.raises(AggregateError, match=r"not all ranks have come to handle\.all_ranks.* within 1 s: rank 1"):
            run.handle.all_ranks.state_dict()
        assert time.monotonic() - began < 15
    dist.barrier()  # of the training's group, which waits for a minute


SCENARIOS = {
    "the others are busy": the_others_are_busy,
    "all_ranks": functools.partial(on_one_rank, "all_ranks", "ddp", 0),
    "all_ranks, not on rank 0": functools.partial(on_one_rank, "all_ranks", "ddp", 1),
    "dcp": functools.partial(on_one_rank, "dcp.shard", "data_parallel", 0),
}


@pytest.mark.parametrize("scenario", named(SCENARIOS, {"all_ranks"}))
def test_a_call_on_one_rank_ends_on_all(ranks: RankPool, scenario: Scenario) -> None:
    ranks.check(scenario, world=2)


def all_come(rank: int) -> None:
    run = Run("ddp", "co3").train(2)
    for _ in range(3):
        assert bool(run.handle.all_ranks.state_dict()) == (rank == 0)
        gradwire.dcp.shard(run.handle)
        run.train(1)


@pytest.mark.parametrize("scenario", named([all_come], {"all_come"}))
def test_calls_on_all_ranks(ranks: RankPool, scenario: Scenario) -> None:
    ranks.check(scenario, world=3)
