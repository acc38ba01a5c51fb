"""What gradwire relies on in torch's insides, one test for each name: the one that fails says what broke, and where."""

from __future__ import annotations

import datetime
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from gradwire.errors import GradwireError
from gradwire.torch_internals import autograd, fully_shard, modules, process_groups, streams, tensors, versions
from support.torch_versions import HAS_FSDP2

CPU = torch.device("cpu")
MINUTE = datetime.timedelta(minutes=1)


def without(monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> None:
    """A torch in which the name is gone."""
    monkeypatch.delattr(owner, name)


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, requires_grad=True)


# ── process groups ────────────────────────────────────────────────────────────────────────────────


def test_the_store_of_the_default_group(alone: None) -> None:
    store = process_groups.default_store()
    assert store is not None, "distributed_c10d._get_default_store no longer returns the store"
    assert store.add("a number", 2) + store.add("a number", 0) == 4


def test_there_is_no_store_without_a_group() -> None:
    assert process_groups.default_store() is None


def test_the_timeout_of_a_group(alone: None) -> None:
    group = dist.new_group(timeout=MINUTE)
    assert process_groups.timeout_of(group, CPU) == MINUTE, "options._timeout of a backend is no longer its timeout"


def test_the_backends_of_a_group(alone: None) -> None:
    assert process_groups.backends_of(dist.new_group(backend="gloo")).startswith("cpu:gloo")


def test_the_backends_of_a_group_that_torch_distributed_has_not_made() -> None:
    store = dist.HashStore()
    group = dist.ProcessGroup(store, 0, 1)
    group._register_backend(CPU, dist.ProcessGroup.BackendType.GLOO, dist.ProcessGroupGloo(store, 0, 1, MINUTE))
    assert process_groups.backends_of(group) == "cpu:gloo", "_device_types no longer says what a group carries"
    assert process_groups.timeout_of(group, CPU) == MINUTE


def test_a_group_has_the_name_it_is_given(alone: None) -> None:
    before = dist.new_group()
    group = process_groups.new_group("ours/1", [0], MINUTE, "gloo")
    assert group.group_name == "ours/1"
    assert dist.get_process_group_ranks(group) == [0], "_world.pg_group_ranks no longer says which ranks are in a group"
    assert process_groups.timeout_of(group, CPU) == MINUTE
    one = torch.ones(3, dtype=torch.float32, device=CPU)
    dist.all_reduce(one, group=group)
    dist.destroy_process_group(group)
    assert int(dist.new_group().group_name) == int(before.group_name) + 1, "torch counts groups that we have named"
    dist.destroy_process_group(process_groups.new_group("ours/1", [0], MINUTE, "gloo"))  # the name is free again


def test_without_the_helper_all_ranks_get_a_group_of_torchs(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, distributed_c10d, "_new_process_group_helper")
    monkeypatch.setattr(dist, "new_group", lambda ranks, timeout, backend: ("torch's", ranks, timeout, backend))
    assert process_groups.new_group("ours", [0], MINUTE, "gloo") == ("torch's", [0], MINUTE, "gloo")
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with pytest.raises(GradwireError, match="_new_process_group_helper"):
        process_groups.new_group("ours", [0], MINUTE, "gloo")


# ── autograd ──────────────────────────────────────────────────────────────────────────────────────


def test_a_backward_pass_is_noticed() -> None:
    seen = []
    x = vector(1, 2)
    x.register_hook(lambda gradient: seen.append(autograd.in_backward()))
    x.sum().backward()
    assert (seen, autograd.in_backward()) == ([True], False), "torch._C._current_graph_task_id has another meaning"


def test_the_end_of_a_backward_pass_is_told() -> None:
    order = []
    x = vector(1, 2)
    y = x * 2
    y.register_hook(lambda gradient: autograd.call_after_backward(lambda: order.append("the end")))
    x.register_hook(lambda gradient: order.append("the last gradient"))
    y.sum().backward()
    assert order == ["the last gradient", "the end"], "queue_callback no longer calls at the end of the backward pass"


def test_without_graph_tasks_the_error_names_the_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, torch._C, "_current_graph_task_id")
    with pytest.raises(GradwireError, match=re.escape(f"torch {versions.OLDEST} to {versions.NEWEST}")):
        autograd.in_backward()


# ── tensors ───────────────────────────────────────────────────────────────────────────────────────


def test_writes_in_place_are_counted() -> None:
    x = vector(1, 2).detach()
    before = tensors.changes_of(x)
    x.add_(1)
    assert tensors.changes_of(x) == before + 1, "Tensor._version no longer counts writes"


def test_memory_is_told_from_other_memory() -> None:
    x = torch.zeros(1000, dtype=torch.float32, device=CPU)
    memory = tensors.memory_of(x)
    assert memory == tensors.memory_of(x[3:]), "StorageWeakRef no longer equals one of the same memory"
    del x
    later = torch.zeros(1000, dtype=torch.float32, device=CPU)
    assert memory != tensors.memory_of(later), "StorageWeakRef no longer keeps an address from being used again"


def test_without_weak_references_the_error_names_the_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, torch.multiprocessing.reductions, "StorageWeakRef")
    with pytest.raises(GradwireError, match="StorageWeakRef"):
        tensors.memory_of(vector(1))


@pytest.mark.parametrize("has_it", [True, False])
def test_many_tensors_are_divided(has_it: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_it:
        without(monkeypatch, torch, "_foreach_div_")
    group = [vector(2, 4).detach(), vector(6).detach()]
    tensors.divide_all(group, 2)
    assert [t.tolist() for t in group] == [[1, 2], [3]]


def test_tensors_are_found_in_containers() -> None:
    x, y, z = vector(1), vector(2), vector(3)
    leaves = tensors.leaves_of({"a": [x, (y, None)], "b": z})
    assert [leaf for leaf in leaves if leaf is not None] == [x, y, z]


def test_entries_of_sparse_tensors_are_counted() -> None:
    places = torch.tensor([[0, 2]], dtype=torch.int64, device=CPU)
    sparse = torch.sparse_coo_tensor(places, vector(1, 2).detach(), (4,), dtype=torch.float32, device=CPU)
    assert tensors.entries_of(sparse) == 2


def test_tensors_are_held_by_cpp() -> None:
    x = vector(1, 2).detach()
    held = tensors.hold_in_cpp([x])
    assert not isinstance(held, list), "torch._C.ScriptList is gone"
    assert held[0] is x, "torch._C.ScriptList copies tensors"  # type: ignore[index]


# ── modules ───────────────────────────────────────────────────────────────────────────────────────


def test_the_model_in_a_compiled_one() -> None:
    model = nn.Linear(2, 2)
    assert modules.compiled_model(torch.compile(model, backend="eager")) is model, "_orig_mod is gone"
    assert modules.compiled_model(model) is model


def test_the_hooks_of_a_model(alone: None) -> None:
    def their_own(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        raise NotImplementedError

    model = DistributedDataParallel(nn.Linear(2, 2))
    assert modules.hooks_of(model) == []
    their_own.__annotations__.clear()  # they are names here, and DDP looks at them
    model.register_comm_hook(None, their_own)
    assert modules.hooks_of(model) == ["their_own"], "DistributedDataParallel._comm_hooks no longer holds the hooks"


def test_a_reducer_in_python_is_noticed(alone: None) -> None:
    model = DistributedDataParallel(nn.Linear(2, 2))
    assert not modules.reduces_in_python(model)
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        model = DistributedDataParallel(nn.Linear(2, 2))
    assert modules.reduces_in_python(model), "DistributedDataParallel._use_python_reducer is gone"


def test_the_parameters_that_a_module_holds() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    parameters, inner = modules.held_by(model)
    model[0] = other = nn.Linear(2, 2, bias=False)
    assert (list(inner.values()), parameters) == ([other], {}), "a module no longer holds what it has in these dicts"
    assert modules.held_by(other)[0]["weight"] is other.weight


def test_a_function_is_left_alone_by_the_compiler() -> None:
    compiling = []

    @modules.never_compiled
    def doubled(x: torch.Tensor) -> torch.Tensor:
        compiling.append(torch.compiler.is_compiling())
        return 2 * x

    compiled = torch.compile(lambda x: doubled(x + 1), backend="eager")
    assert compiled(vector(1).detach()).tolist() == [4]
    assert compiling == [False], "torch._disable_dynamo no longer keeps a function from being compiled"


def test_the_scale_of_a_scaler() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(vector(1))
    scale = modules.scale_of(scaler)
    assert scale is not None, "GradScaler._scale is gone"
    assert float(scale) == 8


def test_a_module_is_told_what_happens_to_it() -> None:
    told = []

    class Watched(modules.WatchedModule, nn.Linear):
        def when_moved(self) -> None:
            told.append(("moved", self.weight.dtype))

        def when_saved(self, destination: dict[str, torch.Tensor], prefix: str) -> None:
            told.append(("saved", prefix))

        def when_loaded(self, state: object, prefix: str, unexpected: list[str], errors: list[str]) -> None:
            told.append(("loaded", prefix))

        def when_replicated(self) -> None:
            told.append(("replicated", None))

    model = nn.Sequential(Watched(2, 2))
    model.to(torch.float64)
    model.load_state_dict(model.state_dict())
    model[0]._replicate_for_data_parallel()  # as torch.nn.DataParallel calls it, which needs GPUs
    assert told == [("moved", torch.float64), ("saved", "0."), ("loaded", "0."), ("replicated", None)]


# ── FSDP2, and streams ────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def sharded(alone: None) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    for part in (model[0], model):
        fully_shard(part, mesh=mesh)
    return model


@pytest.mark.skipif(not HAS_FSDP2, reason="gradwire.fsdp needs a newer torch")
def test_the_groups_of_a_sharded_model(sharded: nn.Module) -> None:
    """With both collectives replaced, and given back."""
    groups = fully_shard.parameter_groups(sharded)
    assert groups is not None
    described = [(g.name, g.shards, g.shard, g.device_type, g.divide_factor) for g in groups]
    assert sorted(described) == [("", 1, 0, "cpu", None), ("0", 1, 0, "cpu", None)]
    first = next(group for group in groups if group.name == "0")
    parts = [(p.name, p.size, p.sharded_size, p.dimension, p.requires_grad, p.is_complex) for p in first.parameters]
    assert parts == [("0.weight", (2, 3), (2, 3), 0, True, False), ("0.bias", (2,), (2,), 0, True, False)]
    rows: list[int] = []
    alone_group = process_groups.new_group("alone", [0], MINUTE, "gloo")
    for group in groups:
        group.replace_all_reduce(lambda row: rows.append(len(row)), alone_group)
    loss = sharded(torch.ones(1, 3, dtype=torch.float32, device=CPU)).sum()
    loss.backward()
    assert sorted(rows) == [6, 8], "FSDP2 no longer calls the all-reduce hook with a group's flat gradients"
    for group in groups:
        group.restore()
    sharded(torch.ones(1, 3, dtype=torch.float32, device=CPU)).sum().backward()
    assert len(rows) == 2


@pytest.mark.skipif(not HAS_FSDP2, reason="gradwire.fsdp needs a newer torch")
@pytest.mark.parametrize("kind", sorted(fully_shard.NEEDED))
def test_a_name_that_fsdp2_lost_is_named(kind: str, sharded: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in fully_shard.NEEDED[kind]:
        with monkeypatch.context() as patched:
            patched.setitem(fully_shard.NEEDED, kind, (f"{name}_of_another_torch",))
            with pytest.raises(GradwireError, match=rf"{name}_of_another_torch.*torch {fully_shard.OLDEST} to"):
                fully_shard.parameter_groups(sharded)


def test_an_fsdp2_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.fsdp.FSDPModule", type("FSDPModule", (), {}))
    with pytest.raises(GradwireError, match=f"install torch {re.escape(fully_shard.OLDEST)} to"):
        fully_shard.parameter_groups(nn.Linear(2, 2))


def test_a_stream_without_the_private_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """And with it; on a GPU, tests of its kernels show that the stream is the right one."""

    class Stream:
        cuda_stream = 7

    monkeypatch.delattr(torch._C, "_cuda_getCurrentRawStream", raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream)
    assert streams.current_stream(0) == 7
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 8 + device, raising=False)
    assert streams.current_stream(1) == 9


@pytest.mark.gpu
def test_the_current_stream() -> None:
    with torch.cuda.stream(torch.cuda.Stream()) as _:
        assert streams.current_stream(torch.cuda.current_device()) == torch.cuda.current_stream().cuda_stream
