"""FSDP2 in four real processes: what FSDP2 itself computes is the reference.

Conservation is tested through the bytes: gradients come out of decoded frames, so for W ranks with decay 1
W·(mean gradient) + Σ error memories after = Σ gradients + Σ error memories before.
"""

from __future__ import annotations

import copy
import logging
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

import gradwire
from gradwire.checkpoints.rank_states import mean as mean_of_states
from gradwire.correct.complex_pairs import as_reals
from gradwire.errors import AggregateError, GradwireError, SpecError
from gradwire.frame import headers
from gradwire.fsdp.shard_layout import ShardedShape, ShardLayout
from gradwire.fsdp.sharded_module import modules_of
from support.cases import for_each
from support.frames_seen import frames_seen
from support.helpers import bits
from support.rank_pool import RankPool, Scenario, named
from support.ranks import Net, Tensors, be_quiet, check_raises, cpu_mesh, digest, gathered, loss_of
from support.torch_versions import HAS_FSDP2

pytestmark = pytest.mark.skipif(not HAS_FSDP2, reason="gradwire.fsdp needs a newer torch")

WORLD = 4


# ── what scenarios have in common ─────────────────────────────────────────────────────────────────


def sharded(mesh: DeviceMesh | None = None, **options: object) -> nn.Module:
    """Three wrapped modules; 70, 64 and 5 rows on four ranks: there are short parts, and an empty one."""
    torch.manual_seed(0)
    model, mesh = Net(), mesh or cpu_mesh()
    for module in (model.first, model.big, model):
        fully_shard(module, mesh=mesh, **options)
    return model


def gradients(model: nn.Module) -> Tensors:
    return {name: whole(p.grad) for name, p in model.named_parameters()}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def backward(model: nn.Module, rank: int, step: int, scale: float = 1.0) -> Tensors:
    model.zero_grad()
    (scale * loss_of(model, rank, step)).backward()
    return gradients(model)


def local_gradients(model: nn.Module, rank: int, step: int) -> Tensors:
    """This rank's own, without FSDP2."""
    alone = Net()
    alone.load_state_dict({name: whole(p) for name, p in model.state_dict().items()})
    loss_of(alone, rank, step).backward()
    return {name: p.grad for name, p in alone.named_parameters()}


def check_nothing_is_lost(
    before: dict, after: dict, true: Tensors, mean: Tensors, decay: float = 1.0, most: float = 1e-6
) -> None:
    """All are of this rank; memories are those of state_dict()."""
    everyone = gathered({"true": true, "before": before["memory"], "after": after["memory"]})
    for name, gradient in mean.items():
        left = sum(r["after"][name].double() for r in everyone)
        old = sum(r["before"].get(name, torch.zeros(())).double() for r in everyone)
        given = sum(r["true"][name].double() for r in everyone) + decay * old
        error = gradient.double() * len(everyone) + left - given
        assert float(error.norm() / given.norm()) < most, name


def relative(a: Tensors, b: Tensors) -> float:
    return max(float((a[n].double() - b[n].double()).norm() / b[n].double().norm()) for n in b)


# ── scenarios ─────────────────────────────────────────────────────────────────────────────────────


def same_as_plain(rank: int) -> None:
    """Sent as it is: bit for bit on two ranks, to fp32 rounding on four, which sum in another order."""
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pair", "shard"))["shard"]
    for mesh, options, most in (
        (pairs, {}, 0.0),
        (None, {}, 1e-6),
        (None, {"shard_placement_fn": lambda p: Shard(1) if p.shape == (70, 20) else None}, 1e-6),
        (None, {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}, 1e-6),
        (None, {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)}, 2e-2),
        (None, {"mp_policy": MixedPrecisionPolicy(torch.float16)}, 2e-3),
    ):
        plain, ours = sharded(mesh, **options), sharded(mesh, **options)
        handle = gradwire.fsdp.attach(ours, "none")
        assert relative(backward(ours, rank, 0), backward(plain, rank, 0)) <= most, (options, most)
        stats = handle.stats()
        assert stats["steps"] == 1 and 0.9 < stats["ratio"] <= 2.1
        assert stats["wire_bytes_sent"] >= stats["frame_bytes"]


def other_sums(rank: int) -> None:
    """Divided by what the user wants, and with sums alone."""
    exact = backward(sharded(), rank, 0)
    for factor, sums in ((8.0, False), (8.0, True), (4.0, False), (None, True)):
        model = sharded()
        for module in (model.first, model.big, model):
            if factor is not None:
                module.set_gradient_divide_factor(factor)
            module.set_force_sum_reduction_for_comms(sums)
        gradwire.fsdp.attach(model, "none")
        given = {name: g * ((factor or WORLD) / WORLD) for name, g in backward(model, rank, 0).items()}
        assert relative(given, exact) < 1e-6, (factor, sums)


def nothing_is_lost(rank: int) -> None:
    for spec, decay, memory, most in (
        ("co3:decay=1", 1.0, "fp32", 1e-6),
        ("co3:decay=0.5", 0.5, "fp32", 1e-6),
        ({"*bias": "none", "*": "topk:p=0.05,small=same"}, 1.0, "fp32", 1e-6),
        ("co3:decay=1", 1.0, "bf16", 2**-9),  # the rounding of what is left, which is less than the gradient
    ):
        model = sharded()
        handle = gradwire.fsdp.attach(model, spec, memory=memory)
        for step in range(2):
            before, true = handle.state_dict(), local_gradients(model, rank, step)
            mean = backward(model, rank, step)
            after = handle.state_dict()
            if isinstance(spec, dict):
                mean = {name: g for name, g in mean.items() if not name.endswith("bias")}
                assert set(after["memory"]) == set(mean)
            check_nothing_is_lost(before, after, true, mean, decay, most)
        assert float(after["memory"]["big.weight"].norm()) > 0


def frames_are_all(rank: int) -> None:
    """Each rank's frames, taken from what it sends, hold its gradient less its memory; its own part is not among
    them, and large parameters have frames of their own."""
    torch.manual_seed(0)
    model = nn.Linear(2200, 120)  # a rank's part has 66,000 entries: smaller ones may share a frame
    fully_shard(model, mesh=cpu_mesh())
    handle = gradwire.fsdp.attach(model, "co3")
    sent, start = [], handle._reduce_scatter.exchange.start

    def recording_start(key: object, subject: object, blocks: list, lengths: list) -> object:
        sent.extend(block[17:].numpy().copy() for block in blocks)
        return start(key, subject, blocks, lengths)

    handle._reduce_scatter.exchange.start = recording_start
    x = torch.randn(8, 2200, generator=torch.Generator().manual_seed(rank))
    model(x).square().sum().backward()
    weight = whole(model.weight)
    y = x @ weight.T + whole(model.bias)
    true, memory = 2 * y.T @ x, handle.state_dict()["memory"]["weight"]
    for receiver, message in enumerate(sent):
        rows = slice(30 * receiver, 30 * receiver + 30)
        if receiver == rank:
            assert len(message) == 0 and not memory[rows].any()
            continue
        frames = headers.split(memoryview(message))
        assert sorted(headers.read_header(f).elements for f in frames) == [30, 30 * 2200]
        decoded = gradwire.decode(next(f for f in frames if headers.read_header(f).elements > 30))
        error = decoded.view(30, 2200) + memory[rows] - true[rows]
        assert float(error.norm() / true[rows].norm()) < 1e-6
    stats = handle.stats()
    assert stats["frame_bytes"] == sum(len(message) for message in sent)
    assert stats["dense_bytes"] == 4 * 90 * 2201 and stats["ratio"] > 8


def parts_have_rows(rank: int) -> None:
    """Codecs that use the shape get a rank's rows of a matrix, or its columns, in their shape."""
    mine = 17 if rank == WORLD - 1 else 18  # of 71 rows
    for options, rows, part in (
        ({}, 71, (mine, 300)),
        ({"shard_placement_fn": lambda p: Shard(1)}, 72, (72, 75)),
    ):
        torch.manual_seed(0)
        model = nn.Linear(300, rows, bias=False)
        fully_shard(model, mesh=cpu_mesh(), **options)
        handle = gradwire.fsdp.attach(model, "structured:decay=1")
        with frames_seen() as seen:
            for step in range(2):
                before = handle.state_dict()
                x = torch.randn(8, 300, generator=torch.Generator().manual_seed(10 * step + rank))
                model.zero_grad()
                model(x).square().sum().backward()
                true = {"weight": 2 * (x @ whole(model.weight).T).T @ x}
                check_nothing_is_lost(before, handle.state_dict(), true, gradients(model))
        assert {codec for codec, _ in seen} == {headers.STRUCTURED} and len(seen) == 2 * (WORLD - 1)
        assert {shape for _, shape in seen} == {part}


def training(rank: int) -> None:
    """The loss falls as it does without compression, with either memory."""
    final = {}
    for memory in ("", "fp32", "bf16"):
        model = sharded()
        if memory:
            handle = gradwire.fsdp.attach(model, "co3", memory=memory)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        losses = []
        for step in range(14):
            optimizer.zero_grad()
            loss = loss_of(model, rank, step % 2)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        curve = np.mean(gathered(losses), axis=0)
        final[memory] = curve[-4:].mean()
        assert final[memory] < 0.7 * curve[:2].mean(), curve
        if memory:
            dtype, size = {"fp32": (torch.float32, 8), "bf16": (torch.bfloat16, 4)}[memory]
            assert {e.dtype for e in handle.state_dict()["memory"].values()} == {dtype}
            assert handle.memory_bytes == size * sum(p.numel() for p in model.parameters())
            assert abs(final[memory] / final[""] - 1) < 0.05, final
    without = gradwire.fsdp.attach(model, "co3", memory="none")
    backward(model, rank, 0)
    assert without.memory_bytes == 0 and without.state_dict()["memory"] == {}


def a_step_that_is_not_finite(rank: int) -> None:
    """In one module of one rank: all ranks get it, and no memory of any module changes."""
    for mesh in (None, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))):
        model = sharded(mesh)
        handle = gradwire.fsdp.attach(model, "co3")
        backward(model, rank, 0)
        before = handle.state_dict()
        assert any(e.any() for e in before["memory"].values())
        # The gradient of first alone: that of the modules before it in backward has been sent and is finite.
        with torch.autograd.graph.save_on_cpu():
            model.zero_grad()
            poison = model.big.register_full_backward_hook(
                lambda _m, given, _o: tuple(g * (float("inf") if rank == 3 else 1) for g in given)
            )
            loss_of(model, rank, 1).backward()
            poison.remove()
        mean = gradients(model)
        assert torch.isfinite(mean["big.weight"]).all() and torch.isfinite(mean["last.weight"]).all()
        assert not torch.isfinite(mean["first.weight"]).all()
        after = handle.state_dict()
        assert digest(after["memory"]) == digest(before["memory"])
        assert after["steps"] == 2
        true = local_gradients(model, rank, 2)
        mean = backward(model, rank, 2)
        if mesh is None:
            check_nothing_is_lost(before, handle.state_dict(), true, mean, 0.9)
        assert digest(handle.state_dict()["memory"]) != digest(before["memory"])


def accumulation(rank: int) -> None:
    """Two micro-batches without synchronization: one exchange, of their sum."""
    model = sharded()
    handle = gradwire.fsdp.attach(model, "co3:decay=1")
    true = [local_gradients(model, rank, step) for step in (0, 1)]
    before = handle.state_dict()
    model.set_requires_gradient_sync(False)
    loss_of(model, rank, 0).backward()
    assert handle.stats()["steps"] == handle.stats()["frame_bytes"] == 0
    model.set_requires_gradient_sync(True)
    loss_of(model, rank, 1).backward()
    assert handle.stats()["steps"] == 1
    both = {name: true[0][name] + true[1][name] for name in true[0]}
    check_nothing_is_lost(before, handle.state_dict(), both, gradients(model))


def used_twice(rank: int) -> None:
    """A module that is used twice in a forward is reduced once."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared, self.last = nn.Linear(80, 80), nn.Linear(80, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.shared(torch.tanh(self.shared(x))))

    torch.manual_seed(0)
    alone = Twice()
    model, mesh = copy.deepcopy(alone), cpu_mesh()
    fully_shard(model.shared, mesh=mesh)
    fully_shard(model, mesh=mesh)
    handle = gradwire.fsdp.attach(model, "co3:decay=1")
    calls, reduce, after = [], handle._reduce_scatter, handle.state_dict()
    handle._reduce_scatter = lambda key, *rest: (calls.append(key), reduce(key, *rest))
    for step in range(2):
        x = torch.randn(8, 80, generator=torch.Generator().manual_seed(10 * step + rank))
        for network in (alone, model):
            network.zero_grad()
            network(x).square().sum().backward()
        before, after = after, handle.state_dict()
        true = {name: p.grad for name, p in alone.named_parameters()}
        check_nothing_is_lost(before, after, true, gradients(model))
    assert calls == ["", "shared"] * 2 and handle.stats()["steps"] == 2


def loss_scaling(rank: int) -> None:
    """Memory is unscaled: a scaled run leaves and sends the same as one that is not, across changes of the scale."""
    plain, scaled = sharded(), sharded()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    handles = [gradwire.fsdp.attach(plain, "co3"), gradwire.fsdp.attach(scaled, "co3", grad_scaler=scaler)]
    optimizer = torch.optim.SGD(scaled.parameters(), lr=0.0)
    scales = []
    for step in range(6):
        broken = step == 3
        mean = backward(plain, rank, step) if not broken else {}
        scaled.zero_grad()
        loss = loss_of(scaled, rank, step)
        scaler.scale(loss * float("inf") if broken and rank == 1 else loss).backward()
        scales.append(scaler.get_scale())
        scaler.unscale_(optimizer)
        if not broken:
            assert relative(gradients(scaled), mean) < 1e-6
            assert relative(handles[1].state_dict()["memory"], handles[0].state_dict()["memory"]) < 1e-6
        scaler.step(optimizer)
        scaler.update()
    assert scales == [1024.0, 1024.0, 2048.0, 2048.0, 1024.0, 1024.0]


def hybrid(rank: int) -> None:
    """Compressed between replicas alone, which stay bit-identical; the parts of a host are summed as they are."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    plain, ours = sharded(mesh), sharded(mesh)
    gradwire.fsdp.attach(ours, "none")
    for step in range(2):
        assert relative(backward(ours, rank, step), backward(plain, rank, step)) < 1e-6
    for last in (False, True):  # accumulated without an all-reduce
        for model in (plain, ours):
            model.set_requires_all_reduce(last)
            loss_of(model, rank, int(last)).backward()
    assert relative(gradients(ours), gradients(plain)) < 1e-6

    model = sharded(mesh)
    handle = gradwire.fsdp.attach(model, "co3:decay=1")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        before, true = handle.state_dict(), gathered(local_gradients(model, rank, step))
        mean = backward(model, rank, step)
        assert len(set(gathered(digest(mean)))) == 1, "the same on all ranks, so the same on both replicas"
        shards = {name: p.grad.to_local() for name, p in model.named_parameters()}
        everyone = gathered((shards, before["memory"], handle.state_dict()["memory"]))
        mine, twin = everyone[rank], everyone[(rank + 2) % 4]  # the same shard of the other replica
        for name, gradient in shards.items():
            if gradient.numel():
                assert bits(mine[0][name]) == bits(twin[0][name])
                rows = -(-true[0][name].shape[0] // 2)
                of_host = sum(t[name].double() for t in true)[rows * (rank % 2) :][:rows] / 2
                old = sum(e[1].get(name, torch.zeros(())).double() for e in (mine, twin))
                error = 2 * gradient.double() + sum(e[2][name].double() for e in (mine, twin)) - of_host - old
                assert float(error.norm() / of_host.norm()) < 1e-6, name
        optimizer.step()
    stats = handle.stats()
    assert stats["steps"] == 2 and stats["dense_bytes"] == 2 * 4 * sum(g.numel() for g in shards.values())
    assert stats["ratio"] > 4

    for factor in (None, 8.0):
        twins = [sharded(mesh) for _ in range(2)]
        for module in twins[1].modules():
            if hasattr(module, "set_gradient_divide_factor") and factor:
                module.set_gradient_divide_factor(factor)
                module.set_force_sum_reduction_for_comms(True)
        gradwire.fsdp.attach(twins[1], "none")
        given = {n: g * ((factor or 4) / 4) for n, g in backward(twins[1], rank, 0).items()}
        assert relative(given, backward(twins[0], rank, 0)) < 1e-6


def complex_parameters(rank: int) -> None:
    """As pairs of reals: nothing is lost, with shards and with replicas; the memory that is saved has pairs, too."""

    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(20, 70, dtype=torch.complex64), nn.Linear(70, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.first(x.to(torch.complex64)).abs())

    alone = Complex()
    loss_of(alone, rank, 0).backward()
    true = {name: p.grad for name, p in alone.named_parameters()}
    for mesh in (cpu_mesh(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))):
        for spec, most in (("none", 1e-6), ("co3:decay=1", 0.5)):
            model = Complex()
            model.load_state_dict(alone.state_dict())
            for module in (model.first, model):
                fully_shard(module, mesh=mesh)
            handle = gradwire.fsdp.attach(model, spec)
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # of gradients that travel uncompressed
                loss_of(model, rank, 0).backward()
            mean = gradients(model)
            for name, gradients_of_ranks in {n: [r[n] for r in gathered(true)] for n in true}.items():
                wanted = sum(gradients_of_ranks) / WORLD
                assert float((mean[name] - wanted).norm() / wanted.norm()) < most, (name, spec)
            if mesh.ndim == 1 and spec != "none":
                state = handle.state_dict()
                assert state["memory"]["first.weight"].shape == (70, 20, 2)
                reals = [{n: as_reals(t) for n, t in tensors.items()} for tensors in (true, mean)]
                # Before it adds up complex gradients of four ranks, FSDP2 halves them, as it does those of fp16.
                halved = {n: 2 * e if n.startswith("first.") else e for n, e in state["memory"].items()}
                check_nothing_is_lost({"memory": {}}, {"memory": halved}, *reals)
                handle.load_state_dict(state)


def checkpoints(rank: int) -> None:
    options = {"shard_placement_fn": lambda p: Shard(1) if p.dim() == 2 and p.shape[1] % 4 == 0 else None}
    model = sharded(**options)
    handle = gradwire.fsdp.attach(model, "co3")
    for step in range(2):
        backward(model, rank, step)
    saved, of_all = handle.state_dict(), handle.all_ranks.state_dict()
    assert {n: e.shape for n, e in saved["memory"].items()} == {n: p.shape for n, p in model.named_parameters()}
    straight = digest(backward(model, rank, 2))

    other = sharded(**options)
    handle = gradwire.fsdp.attach(other, "co3")
    handle.load_state_dict(gathered(of_all)[0])
    assert digest(handle.state_dict()["memory"]) == digest(saved["memory"])
    handle.load_state_dict(saved)
    assert digest(handle.state_dict()["memory"]) == digest(saved["memory"])
    assert digest(backward(other, rank, 2)) == straight
    assert handle.stats()["steps"] == 1 and handle.state_dict()["steps"] == 3
    fresh = sharded(**options)
    gradwire.fsdp.attach(fresh, "co3")
    assert digest(backward(fresh, rank, 2)) != straight

    # On another number of ranks, the mean of all memories: what is still to be sent stays the same in total.
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pair", "shard"))["shard"]
    fewer = sharded(pairs)
    handle = gradwire.fsdp.attach(fewer, "co3:decay=1")
    mean_state = mean_of_states(gathered(saved))
    handle.load_state_dict(mean_state)
    true = [local_gradients(fewer, r, 2) for r in (rank // 2 * 2, rank // 2 * 2 + 1)]
    sent = backward(fewer, rank, 2)
    left = gathered(handle.state_dict()["memory"])[rank // 2 * 2 :][:2]
    for name, gradient in sent.items():
        given = true[0][name] + true[1][name] + 2 * mean_state["memory"][name]
        error = 2 * gradient + left[0][name] + left[1][name] - given
        assert float(error.norm() / given.norm()) < 1e-6, name

    bad = {"memory": {"first.weight": torch.zeros(70, 19)}}
    check_raises(GradwireError, "has shape (70, 19), and the model's (70, 20)", lambda: handle.load_state_dict(bad))
    bad = {"memory": {"nobody": torch.zeros(1)}}
    check_raises(GradwireError, "does not have: nobody", lambda: handle.load_state_dict(bad))
    check_raises(GradwireError, "not the state", lambda: handle.load_state_dict({"steps": 1}))


def attached_and_detached(rank: int) -> None:
    for mesh in (None, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))):
        plain, model = sharded(mesh), sharded(mesh)
        exact = digest(backward(plain, rank, 0))
        first = gradwire.fsdp.attach(model, "co3")
        assert digest(backward(model, rank, 0)) != exact
        second = gradwire.fsdp.attach(model, {"*weight": "co3:format=fp8", "*": "none"})
        backward(model, rank, 0)
        assert first.stats()["steps"] == second.stats()["steps"] == 1, "the second takes the first one's place"
        assert set(second.state_dict()["memory"]) <= {n for n, _ in model.named_parameters() if "weight" in n}
        second.detach()
        assert digest(backward(model, rank, 0)) == exact
        third = gradwire.fsdp.attach(model, "none")
        assert relative(backward(model, rank, 0), backward(plain, rank, 0)) < 1e-6
        assert third.stats()["steps"] == 1


def meshes_of_their_own(rank: int) -> None:
    """Equal meshes with other process groups, as fully_shard makes them itself beside Gloo where it sees a GPU."""

    def sharded_by(meshes: list[DeviceMesh]) -> nn.Module:
        torch.manual_seed(0)
        model = Net()
        for module, mesh in zip((model.first, model.big, model), meshes, strict=True):
            fully_shard(module, mesh=mesh)
        return model

    def on_all_ranks() -> DeviceMesh:
        return DeviceMesh.from_group(dist.new_group(), "cpu")

    def hybrid() -> DeviceMesh:
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))

    for make in (on_all_ranks, hybrid):
        one = make()
        model, other = sharded_by([make() for _ in range(3)]), sharded_by([one] * 3)
        assert len({id(module._group._group.mesh_info) for module in modules_of(model)}) == 3
        handles = [gradwire.fsdp.attach(m, "co3") for m in (model, other)]
        for step in range(2):
            assert digest(backward(model, rank, step)) == digest(backward(other, rank, step))
        states = [handle.state_dict()["memory"] for handle in handles]
        assert digest(states[0]) == digest(states[1])
        handles[0].detach()
        assert digest(backward(model, rank, 0)) == digest(backward(sharded_by([one] * 3), rank, 0))
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pair", "shard"))["shard"]
    for different in (pairs, hybrid()):
        model = sharded_by([one if different is pairs else on_all_ranks(), different, different])
        check_raises(GradwireError, "different meshes", lambda m=model: gradwire.fsdp.attach(m, "co3"))


def unused_and_frozen(rank: int) -> None:
    """Of a module with an unused parameter FSDP2 does not say which one it is: it is not compressed in that step."""
    model, plain = sharded(), sharded()
    handle = gradwire.fsdp.attach(model, "co3")
    backward(model, rank, 0)
    before = handle.state_dict()["memory"]

    def skipping_norm(network: nn.Module) -> torch.Tensor:
        hidden = network.big(
            torch.tanh(network.first(torch.randn(4, 20, generator=torch.Generator().manual_seed(rank))))
        )
        return network.last(torch.relu(hidden)).square().sum()

    forwards = []
    for network in (model, plain):
        network.zero_grad()
        network.forward = lambda n=network: skipping_norm(n)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            network().backward()
        forwards.append([str(w.message) for w in caught if "had no gradient" in str(w.message)])
        del network.forward
    assert len(forwards[0]) == 1 and "module ''" in forwards[0][0] and not forwards[1]
    assert bits(whole(model.last.weight.grad)) == bits(whole(plain.last.weight.grad))
    after = handle.state_dict()["memory"]
    assert bits(after["last.weight"]) == bits(before["last.weight"]) and bits(after["norm.weight"]) == bits(
        before["norm.weight"]
    )
    assert bits(after["big.weight"]) != bits(before["big.weight"])

    model.zero_grad()
    model.norm.weight.requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        loss_of(model, rank, 1).backward()
    assert model.norm.weight.grad is None
    assert bits(handle.state_dict()["memory"]["last.weight"]) != bits(after["last.weight"])


def ranks_that_disagree(rank: int) -> None:
    model = sharded()
    spec = "co3:format=fp8" if rank == 2 else "co3"
    check_raises(AggregateError, "rank 2 has spec co3:format=fp8", lambda: gradwire.fsdp.attach(model, spec))


def refusals(rank: int) -> None:
    model = sharded()
    for spec, reason in (
        ("sbc2", "FSDP2 reduces in every step"),
        ("dgc:scope=tensor", "mask=off"),
        ("dgc:scope=tensor,mask=off,clip_norm=1", "clip_norm=0"),
        ("topk:k=10", "give the share p"),
        ({"*.bias": "none"}, "no pattern matches parameter"),
        ("co4", "unknown"),
        ("auto", "choose a recipe"),
    ):
        check_raises(SpecError, reason, lambda spec=spec: gradwire.fsdp.attach(model, spec))
    check_raises(SpecError, "fp32, bf16, none", lambda: gradwire.fsdp.attach(model, "co3", memory="int8"))
    plain = backward(sharded(), rank, 0)
    assert digest(backward(model, rank, 0)) == digest(plain), "refused: nothing was changed"

    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger("gradwire").addHandler(handler)
    gradwire.fsdp.attach(model, "co3")
    entries = sum(p.numel() for p in model.parameters())
    said = [f"error memory: {8 * entries / 1e6:.1f} MB of host memory on each rank (memory='bf16' halves it, "
            "memory='none' does without)"]  # fmt: skip
    assert [record.getMessage() for record in records] == (said if rank == 0 else [])


SCENARIOS = [
    same_as_plain, other_sums, nothing_is_lost, frames_are_all, parts_have_rows, training, a_step_that_is_not_finite,
    accumulation, used_twice, loss_scaling, hybrid, complex_parameters, checkpoints, attached_and_detached,
    meshes_of_their_own, unused_and_frozen, ranks_that_disagree, refusals,
]  # fmt: skip
QUICK = {
    "same_as_plain",
    "parts_have_rows",
    "nothing_is_lost",
    "a_step_that_is_not_finite",
    "used_twice",
    "complex_parameters",
    "checkpoints",
    "meshes_of_their_own",
    "ranks_that_disagree",
    "refusals",
}


@pytest.mark.parametrize("scenario", named(SCENARIOS, QUICK))
def test_fsdp_on_four_ranks(ranks: RankPool, scenario: Scenario) -> None:
    ranks.check(scenario, WORLD, setup=be_quiet)


# ── without processes ─────────────────────────────────────────────────────────────────────────────


def test_models_and_versions_that_cannot_be_attached(monkeypatch):
    with pytest.raises(GradwireError, match="fully_shard was applied, got Linear"):
        gradwire.fsdp.attach(nn.Linear(2, 2), "co3")
    monkeypatch.setattr(torch.distributed.fsdp, "FSDPModule", type("FSDPModule", (), {}))
    with pytest.raises(GradwireError, match=r"no FSDPModule.set_custom.*install torch 2\.11 to"):
        gradwire.fsdp.attach(nn.Linear(2, 2), "co3")


@for_each("size", [(5, 2), (8, 3), (1, 4), (7,), (3, 2, 2)])
@for_each("world", [1, 2, 4, 9])
def test_places_are_those_of_chunk_cat(size, world):
    """torch's own copy-in is the reference; filling is left out, and memory is in the parameter's own order."""
    tensors = [torch.arange(1.0, 1 + torch.Size(size).numel()).view(size), -torch.arange(1.0, 12)]
    layout = ShardLayout([ShardedShape(str(i), tuple(t.shape)) for i, t in enumerate(tensors)], world)
    rows = torch.empty(world, layout.row)
    torch._chunk_cat(tensors, dim=0, num_chunks=world, out=rows)
    for i, tensor in enumerate(tensors):
        found = [(row[p.row], p.memory) for row, places in zip(rows, layout.rows, strict=True) for p in places
                 if p.name == str(i)]  # fmt: skip
        assert torch.equal(torch.cat([values for values, _ in found]), tensor.reshape(-1))
        for values, memory in found:
            assert torch.equal(tensor.reshape(-1)[memory], values)
    filling = rows.numel() - sum(t.numel() for t in tensors)
    assert int((rows == 0).sum()) == filling


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_order_of_ranks_and_back(dim):
    whole_tensor = torch.randn(4, 6, 8)
    shape = ShardedShape("x", (4, 6, 8), dim)
    flat = shape.in_order_of_ranks(whole_tensor, 2)
    assert torch.equal(flat[: len(flat) // 2].view(-1), whole_tensor.chunk(2, dim)[0].reshape(-1))
    assert torch.equal(shape.in_own_order(flat, 2), whole_tensor)
