"""LocalSGD with real processes: three ranks over Gloo. Every scenario checks itself on every rank."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire import AggregateError, GradwireError, LocalSGD, SpecError, tasks
from gradwire.aggregate.transport.link import children as _children
from gradwire.catalogue.spec_by_name import parse_spec
from gradwire.checkpoints.run_file import Checkpoint, CheckpointError, load
from gradwire.frame import headers
from gradwire.local_sgd.buffers import Buffers
from gradwire.tasks.settings import Settings
from gradwire.tasks.training import Training
from support.helpers import bits, check_contract_3
from support.rank_pool import WORLD, RankPool, Scenario, connect, named
from support.ranks import (
    Loss,
    Net,
    Tensors,
    add_toy_recipe,
    check_alike,
    check_raises,
    check_that_rank_1_was_missed,
    digest,
    gathered,
    lose_rank_1,
    loss_of,
)


def sgd(model: nn.Module, momentum: float = 0.9) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def make(seed: int = 0, dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(seed)
    return Net().to(dtype)


class Normed(nn.Module):
    """With buffers of every kind: statistics, a constant that is not finite, another one, and counters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(20, 30), nn.BatchNorm1d(30), nn.Linear(30, 5)
        self.register_buffer("hidden", torch.full((5, 5), -torch.inf).triu(1))
        self.register_buffer("constant", torch.rand(30, generator=torch.Generator().manual_seed(0)))
        self.register_buffer("tenth", torch.full((3,), 0.1, dtype=torch.float16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.norm(self.first(x)) + self.constant))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, number: int) -> None:
    optimizer.zero_grad()
    loss_of(model, rank, number).backward()
    optimizer.step()


def values(model: nn.Module) -> Tensors:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def close(a: Tensors, b: Tensors, tolerance: float = 1e-5) -> None:
    for name in b:
        torch.testing.assert_close(a[name], b[name], rtol=tolerance, atol=tolerance / 10)


@contextmanager
def recorded_frames(handle: LocalSGD) -> Iterator[dict[int, Tensors]]:
    """What stands in the frames of every rank's parameters, at the last sync."""
    found: dict[int, Tensors] = {}
    coder = handle._connected().coder
    decode = coder.decode

    def recording(rank: int, message: object, pieces: list, *rest: object, **options: object) -> None:
        found[rank] = {}
        for frame, piece in zip(headers.split(memoryview(bytes(message))), pieces, strict=True):
            parts = gradwire.decode(bytes(frame)).reshape(-1).split(piece.sizes)
            for values, part in zip(parts, piece.parts, strict=True):
                found[rank][part.name] = values.view(part.tensor.shape)
        decode(rank, message, pieces, *rest, **options)

    coder.decode = recording
    yield found


# ── what it computes ──


def every_step_is_ddp(rank: int) -> None:
    local, alike = make(), DistributedDataParallel(make())
    optimizers = sgd(local, momentum=0), sgd(alike, momentum=0)
    with LocalSGD(local, optimizers[0], "none", sync_every=1):
        for i in range(5):
            step(local, optimizers[0], rank, i)
            step(alike, optimizers[1], rank, i)
    close(values(local), values(alike.module))
    check_alike(local)


def simulate(steps: int, every: int, outer: Callable[[list[torch.Tensor]], torch.optim.Optimizer]) -> Tensors:
    """Local SGD of all ranks, by hand."""
    common = make()
    models = [copy.deepcopy(common) for _ in range(WORLD)]
    optimizers, outer_optimizer = [sgd(m) for m in models], outer(list(common.parameters()))
    for i in range(steps):
        for rank in range(WORLD):
            step(models[rank], optimizers[rank], rank, i)
        if (i + 1) % every == 0 or i + 1 == steps:
            with torch.no_grad():
                for target, *sources in zip(common.parameters(), *(m.parameters() for m in models), strict=True):
                    target.grad = target - sum(sources) / WORLD
                outer_optimizer.step()
                for m in models:
                    m.load_state_dict(common.state_dict())
    return values(common)


def average(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1)


def nesterov(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def averages_and_outer_steps(rank: int) -> None:
    """Seven steps, the last of them alone in its round: by averaging, by DiLoCo, and by a recipe's own outer step."""
    for spec, outer, expected in (
        ("none", None, average),
        ("none", nesterov, nesterov),
        ("toy:p=1,outer_lr=0.7,outer_momentum=0.9", None, nesterov),
    ):
        model = make()
        optimizer = sgd(model)
        handle = LocalSGD(model, optimizer, spec, sync_every=3, outer=outer)
        with handle:
            for i in range(7):
                step(model, optimizer, rank, i)
        assert handle.stats()["syncs"] == 3
        close(values(model), simulate(7, 3, expected))
        check_alike(model)
        momentum = [s for s in handle.state_dict()["outer"]["state"].values() if s.get("momentum_buffer") is not None]
        assert len(momentum) == (0 if expected is average else 8)


def replicas_are_identical(rank: int) -> None:
    for spec in ("none", "co3", "toy:mask=on,scope=model"):
        for make_optimizer in (sgd, adam, lambda m: torch.optim.AdamW(m.parameters(), lr=0.01)):
            for dtype in (torch.float32, torch.bfloat16) if make_optimizer is sgd else (torch.float32,):
                model = make(dtype=dtype)
                optimizer = make_optimizer(model)
                seen = set()
                with LocalSGD(model, optimizer, spec, sync_every=2) as handle:
                    for i in range(6):
                        step(model, optimizer, rank, i)
                        if not handle.pending:
                            seen.add(check_alike(model))
                        else:
                            assert len(set(gathered(digest(values(model))))) == WORLD, "local steps differ"
                assert len(seen) == 3
                assert check_alike(model) in seen, "leaving right after a sync changes nothing"


def half_precision_loses_nothing(rank: int) -> None:
    """Updates below the resolution of bf16 add up in the common parameters."""
    model = nn.Linear(4, 1, bias=False).bfloat16()
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    with LocalSGD(model, optimizer, "none", sync_every=1):
        for _ in range(8):  # of three ranks one moves by 1/128, the resolution of bf16 above 1
            model.weight.grad = torch.full_like(model.weight, -1 / 128 if rank == 0 else 0)
            optimizer.step()
    assert model.weight.tolist() == [[1 + 3 / 128] * 4]  # 8/3 units


def nothing_is_lost(rank: int) -> None:
    """Contract 3, through the bytes: ĝ + e′ = Δ + γe of every rank, and the common parameters move by the mean."""
    for spec, decay in (("co3", 0.9), ("toy:p=0.05,decay=0.8", 0.8), ("toy:p=0.02,scope=model", 1.0)):
        model = make()
        optimizer = sgd(model)
        handle = LocalSGD(model, optimizer, spec, sync_every=100)
        with handle, recorded_frames(handle) as frames:
            memory = {name: torch.zeros_like(p) for name, p in values(model).items()}
            for i in range(6):
                step(model, optimizer, rank, i)
                if i % 2:
                    before = {name: a.clone() for name, a in handle._common.tensors.items()}
                    updates = {name: p - before[name] for name, p in values(model).items()}
                    handle.sync()
                    after = handle.state_dict()["memory"]
                    for name, update in updates.items():
                        check_contract_3(frames[rank][name], after[name], update, memory[name], decay)
                        mean = sum(frames[r][name].double() for r in range(WORLD)) / WORLD
                        torch.testing.assert_close(values(model)[name].double(), before[name].double() + mean)
                    memory = after
            assert all(float(e.abs().max()) > 0 for e in memory.values())


def masked_momentum(rank: int) -> None:
    """Zero where this rank sent, and as it was elsewhere; second moments, and tensors sent whole, as they were."""
    for make_optimizer, key in ((sgd, "momentum_buffer"), (adam, "exp_avg")):
        model = make()
        optimizer = make_optimizer(model)
        handle = LocalSGD(model, optimizer, {"first*": "none", "*": "toy:p=0.1,mask=on,small=bf16"}, sync_every=100)
        with handle, recorded_frames(handle) as frames:
            for i in range(3):
                step(model, optimizer, rank, i)
            before = copy.deepcopy({name: optimizer.state[p] for name, p in model.named_parameters()})
            handle.sync()
        for name, parameter in model.named_parameters():
            moment, old = optimizer.state[parameter][key], before[name][key]
            sent = frames[rank][name] != 0
            if name == "big.weight":
                assert int(sent.sum()) == 448 and not moment[sent].any()
                assert torch.equal(moment[~sent], old[~sent]) and old[sent].any()
            else:
                assert torch.equal(moment, old)
            if key == "exp_avg":
                assert torch.equal(optimizer.state[parameter]["exp_avg_sq"], before[name]["exp_avg_sq"])


def warm_up(rank: int) -> None:
    """p falls geometrically from `start`, by local steps; tensors of few entries are sent whole with small=none."""
    model = make()
    optimizer = sgd(model)
    handle = LocalSGD(model, optimizer, "toy:p=0.01,warmup=8,start=0.64,small=none", sync_every=2)
    counts = []
    with handle, recorded_frames(handle) as frames:
        for i in range(10):
            step(model, optimizer, rank, i)
            if not handle.pending:
                counts.append(int((frames[rank]["big.weight"] != 0).sum()))
                assert bool((frames[rank]["big.bias"] != 0).all())
    assert counts == [1013, 359, 127, 45, 45]  # ⌈4480·p⌉ with p = 0.226, 0.08, 0.0283 (three digits) and 0.01 twice


def buffers_are_averaged(rank: int) -> None:
    """Statistics in bf16 or exactly; constants keep every bit, even if not finite; counters are each rank's own."""
    for spec, tolerance in (
        ("bf16", 2.0**-8),
        ("none", 1e-6),
        ({"*.weight": "bf16", "*": "none"}, 1e-6),
        ({"buffer:*": "none", "*": "bf16"}, 1e-6),
        ({"buffer:*_var": "none", "buffer:*": "bf16", "*": "none"}, 2.0**-8),
    ):
        torch.manual_seed(0)
        model = Normed()
        start = copy.deepcopy(model.state_dict())
        optimizer = sgd(model)
        with LocalSGD(model, optimizer, spec, sync_every=100) as handle:
            for i in range(rank + 1):
                step(model, optimizer, rank, i)
            everyone = gathered(copy.deepcopy(model.state_dict()))
            handle.sync()
            for name in ("norm.running_mean", "norm.running_var"):
                exact = sum(state[name] for state in everyone) / WORLD
                error = (model.state_dict()[name] - exact).abs() / sum(state[name].abs() for state in everyone)
                assert float(error.max()) < tolerance
            for name in ("hidden", "constant", "tenth"):
                assert bits(model.state_dict()[name]) == bits(start[name])
            assert int(model.norm.num_batches_tracked) == rank + 1
            check_alike(model)
            if rank == 1:  # one that changes on a single rank
                model.constant += 3
            step(model, optimizer, rank, 5)
            handle.sync()
            torch.testing.assert_close(model.constant, start["constant"] + 1, rtol=2.0**-7, atol=0)
            check_alike(model)


# ── when it syncs ──


def schedules(rank: int) -> None:
    model = make()
    optimizer = sgd(model)
    at = []
    with LocalSGD(model, optimizer, "co3", sync_every=lambda done: 1 if done <= 3 else 4) as handle:
        for i in range(1, 13):
            step(model, optimizer, rank, i)
            if not handle.pending:
                at.append(i)
                check_alike(model)
    assert at == [1, 2, 3, 7, 11]
    slow = {"*.bias": "none", "*": "toy:sync_every=5"}
    assert LocalSGD(model, optimizer, slow).sync_every == 5, "the recipe's own, whichever pattern comes first"


def uneven_ranks(rank: int) -> None:
    """Fewer batches, none at all, and another number in the next epoch; skipped steps, as of a GradScaler."""
    for spec in ("none", "co3"):
        model = make()
        optimizer = sgd(model)
        handle = LocalSGD(model, optimizer, spec, sync_every=3)
        for epoch, batches in enumerate(((7, 4, 0), (0, 0, 5), (2, 9, 3), (0, 0, 0), (6, 6, 6))):
            with handle:
                for i in range(batches[rank]):
                    optimizer.zero_grad()
                    loss_of(model, rank, 10 * epoch + i).backward()
                    if (epoch, i, rank) != (4, 2, 1):
                        optimizer.step()
            check_alike(model)
            assert handle.pending == 0
        assert len(set(gathered(handle.stats()["syncs"]))) == 1


def an_exception_leaves_at_once(rank: int) -> None:
    model = make()
    optimizer = sgd(model)
    handle = LocalSGD(model, optimizer, "co3", sync_every=10)

    def interrupted() -> None:
        with handle:
            step(model, optimizer, rank, 0)
            raise KeyError("mine")

    check_raises(KeyError, "mine", interrupted)
    assert handle.ledger.steps == 0 and handle.pending == 1
    before = digest(values(model))
    step(model, optimizer, rank, 1)
    assert handle.pending == 1, "the hook is gone"
    with handle:  # the round goes on
        step(model, optimizer, rank, 2)
        assert handle.pending == 2 and digest(values(model)) != before
    check_alike(model)


def a_diverged_rank_is_left_out(rank: int) -> None:
    for make_optimizer in (sgd, adam):
        model = make()
        optimizer = make_optimizer(model)
        with warnings.catch_warnings(record=True) as caught, LocalSGD(model, optimizer, "co3", sync_every=2) as handle:
            warnings.simplefilter("always")
            for i in range(2):
                step(model, optimizer, rank, i)
            memory, before = digest(handle.state_dict()["memory"]), values(model)
            for i in range(2):
                optimizer.zero_grad()
                loss = loss_of(model, rank, i)
                (loss * float("inf") if rank == 1 and i == 0 else loss).backward()
                optimizer.step()
            assert any("rank 1 has a NaN" in str(w.message) for w in caught)
            assert (digest(handle.state_dict()["memory"]) == memory) == (rank == 1)
            assert digest(values(model)) != digest(before)
            for i in range(4):
                step(model, optimizer, rank, i)
            assert not any("NaN" in str(w.message) for w in caught[1:])
        check_alike(model)
        assert all(bool(p.isfinite().all()) for p in model.parameters())
    # One that diverges when the others have left goes back to the common parameters.
    with warnings.catch_warnings(record=True), handle:
        if rank == 2:
            with torch.no_grad():
                model.big.bias[3] = torch.nan
            handle._turns.count_step()
    check_alike(model)
    assert bool(model.big.bias.isfinite().all())

    def all_diverge() -> None:
        with warnings.catch_warnings(record=True), handle:
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, torch.nan)
            optimizer.step()
            optimizer.step()

    check_raises(GradwireError, "all ranks have a NaN", all_diverge)


# ── around it ──


def ranks_start_alike(rank: int) -> None:
    """From rank 0's parameters, frozen ones and buffers too; and what that costs is counted."""
    size = sum(t.numel() * t.element_size() for t in Normed().state_dict().values())
    for seeds in ((7, 8, 9), (5, 5, 5)):
        torch.manual_seed(seeds[rank])
        model = Normed()
        model.last.bias.requires_grad_(False)
        model.last.weight.data = model.last.weight.data.t().contiguous().t()  # not contiguous
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        handle = LocalSGD(model, optimizer, "none", sync_every=2)
        with handle:
            check_alike(model)
            stats = handle.stats()
            # The handshake and a digest of all values; if these differ, a digest of the outer optimizer.
            told = (96 + 33 + 32 * (seeds[1] == 8)) * (WORLD - 1)
            assert stats["wire_bytes_sent"] == told + (size * _children(rank, WORLD) if seeds[1] == 8 else 0)
            assert stats["wire_bytes_received"] == told + (size if seeds[1] == 8 and rank else 0)
            for i in range(2):
                step(model, optimizer, rank, i)
        check_alike(model)
    # What was loaded between two blocks counts.
    model.load_state_dict({**model.state_dict(), "first.bias": torch.full((30,), 2.0)})
    with handle:
        step(model, optimizer, rank, 3)
    assert check_alike(model) and float((model.first.bias - 2).abs().max()) < 0.5


def test_every_rank_but_the_first_gets_a_broadcast_once() -> None:
    for world in range(1, 40):
        assert sum(_children(rank, world) for rank in range(world)) == world - 1


def figures(rank: int) -> None:
    model = make()
    optimizer = sgd(model)
    with LocalSGD(model, optimizer, "co3", sync_every=5) as handle:
        for i in range(10):
            step(model, optimizer, rank, i)
    stats, count = handle.stats(), sum(p.numel() for p in model.parameters())
    assert (stats["steps"], stats["syncs"], stats["dense_bytes"]) == (10, 2, 40 * count)
    assert stats["ratio"] == stats["dense_bytes"] / stats["frame_bytes"] > 5 * 6
    assert stats["wire_bytes_sent"] >= (WORLD - 1) * stats["frame_bytes"]
    figures = gathered(stats)
    assert sum(s["wire_bytes_sent"] for s in figures) == sum(s["wire_bytes_received"] for s in figures)
    assert all(stats[key] > 0 for key in ("encode_s", "decode_s", "wait_s"))


def evaluation_between_syncs(rank: int) -> None:
    torch.manual_seed(0)
    model = Normed()
    optimizer = sgd(model)
    with LocalSGD(model, optimizer, "co3", sync_every=4) as handle:
        for i in range(6):
            if i == 4:
                common = check_alike(model)
            step(model, optimizer, rank, i)
        own = copy.deepcopy(model.state_dict())
        with handle.common_parameters():
            assert check_alike(model) == common
            loss_of(model, rank, 0).backward()  # gradients as usual, and statistics that change
        assert digest(model.state_dict()) == digest(own)


def resuming(rank: int) -> None:
    """In the middle of a round, with everything that has a state: the same bits as without stopping."""
    spec = "toy:p=0.05,decay=0.9,mask=on,warmup=9,small=bf16,outer_lr=0.8,outer_momentum=0.5"

    def fresh(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, LocalSGD]:
        torch.manual_seed(seed)
        model = Normed()
        optimizer = adam(model)
        return model, optimizer, LocalSGD(model, optimizer, spec, sync_every=4)

    model, optimizer, handle = fresh(0)
    with handle:
        for i in range(11):
            if i == 6:
                saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), handle.state_dict()))
            step(model, optimizer, rank, i)
    straight = check_alike(model)
    for forget in ("", "memory", "anchor"):
        model, optimizer, handle = fresh(rank)
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        state = copy.deepcopy(saved[2])
        if forget == "memory":
            state["memory"] = {}
        elif forget == "anchor" and rank == 2:
            state["anchor"]["first.bias"] += 1
        handle.load_state_dict(state)

        def go_on(model: nn.Module, optimizer: torch.optim.Optimizer, handle: LocalSGD) -> None:
            with handle:
                for i in range(6, 11):
                    step(model, optimizer, rank, i)

        if forget == "anchor":
            check_raises(
                AggregateError, "different common parameters", lambda m=model, o=optimizer, h=handle: go_on(m, o, h)
            )
        else:
            go_on(model, optimizer, handle)
            assert (check_alike(model) == straight) == (not forget)
            assert handle.stats()["steps"] == 5
    check_raises(GradwireError, "'anchor' do not fit", lambda: handle.load_state_dict({"memory": {}}))
    check_raises(GradwireError, "'anchor' do not fit", lambda: handle.load_state_dict({"anchor": {"a": torch.ones(1)}}))


def bad_arguments(rank: int) -> None:
    model = make()
    optimizer = sgd(model)
    for every in (0, -3, 2.0, True, "10", None if rank > 5 else [1]):
        check_raises(SpecError, "sync_every must be 1 or more", lambda n=every: LocalSGD(model, optimizer, "co3", n))
    for other, message in (
        (DistributedDataParallel(model), "takes the place of DistributedDataParallel"),
        (nn.Sequential(DistributedDataParallel(make())), "takes the place of DistributedDataParallel"),
        (make(), "holds no trainable parameter of the model"),
        (model.first, "not the model's, and would not be synced"),
        ("model", "must be a torch.nn.Module"),
    ):
        check_raises(GradwireError, message, lambda m=other: LocalSGD(m, optimizer, "co3", 2))
    check_raises(GradwireError, "must be a torch.optim.Optimizer", lambda: LocalSGD(model, None, "co3", 2))
    check_raises(SpecError, "clip in your loop", lambda: LocalSGD(model, optimizer, "toy:clip_norm=1", 2))
    check_raises(
        SpecError, "a spec is a string, or a dict", lambda: LocalSGD(model, optimizer, {"buffer:*": "none"}, 2)
    )
    check_raises(SpecError, "no pattern matches", lambda: LocalSGD(model, optimizer, {"*.bias": "none"}, 2))
    check_raises(SpecError, "needs a memory", lambda: LocalSGD(model, optimizer, {"buffer:*": "co3", "*": "co3"}, 2))
    handle = LocalSGD(model, optimizer, "co3", lambda done: 0)
    check_raises(GradwireError, "belongs in the `with` block", handle.sync)
    with handle:
        check_raises(SpecError, "not 0", lambda: step(model, optimizer, rank, 0))
        check_raises(GradwireError, "already in a LocalSGD block", handle.__enter__)
        check_raises(GradwireError, "already in a LocalSGD block", LocalSGD(model, optimizer, "co3", 2).__enter__)
        check_raises(GradwireError, "before the `with` block", lambda: handle.load_state_dict(handle.state_dict()))
    model.first.weight.requires_grad_(False)

    def thaw() -> None:
        with LocalSGD(model, optimizer, "co3", 2):
            step(model, optimizer, rank, 0)
            model.first.weight.requires_grad_(True)
            step(model, optimizer, rank, 1)

    check_raises(GradwireError, "frozen or unfrozen", thaw)
    with LocalSGD(model, sgd(model.last), "co3", 1) as handle:  # parameters that another optimizer holds are synced too
        with torch.no_grad():
            model.first.bias += rank
        step(model, handle.optimizer, rank, 2)
    check_alike(model)


def other_models_are_told(rank: int) -> None:
    model = nn.Linear(3 + rank, 2)
    expected = "rank 1 has weight as float32 (2, 4), rank 0 float32 (2, 3)"
    check_raises(AggregateError, expected, LocalSGD(model, sgd(model), "co3", 2).__enter__)
    model = nn.Linear(3, 2)
    spec = "co3" if rank else "none"
    check_raises(AggregateError, "rank 0 has spec none, rank 1 co3", LocalSGD(model, sgd(model), spec, 2).__enter__)


# ── gradwire train --sync-every ──


def training_resumes(rank: int) -> None:
    """A run that stops in the middle of a round; then on one worker more than it had."""
    digits, path = tasks.find("digits")(Path()), Path(gathered(f"{os.getpid()}.pt")[0])
    settings = Settings(
        "digits", ("co3",), 0, 8, 0.01, None, 10, "", 60.0, sync_every=4, save=str(path), save_every=6
    )  # fmt: skip

    def stop(training: Training, loss: float) -> None:
        if training.step == 7:
            raise KeyError("stop")

    straight = Training(digits, settings, "co3").run(lambda *_: None)["digest"]
    check_raises(KeyError, "stop", lambda: Training(digits, settings, "co3").run(stop))
    dist.barrier()
    saved = load(path)
    assert (saved.step, saved.error_memory[0]["pending"]) == (6, 2)
    anchor = {name: p for name, p in saved.model.items() if name in saved.error_memory[0]["anchor"]}
    assert digest(anchor) == digest(saved.error_memory[0]["anchor"]), "the model in the file is the common one"
    dist.barrier()
    assert Training(digits, settings, "co3", saved).run(lambda *_: None)["digest"] == straight
    fewer = Checkpoint(**{**vars(saved), "rng": saved.rng[:2], "error_memory": saved.error_memory[:2]})
    training = Training(digits, settings, "co3", fewer)
    for name, kept in training.handle.state_dict()["memory"].items():
        torch.testing.assert_close(
            kept, (saved.error_memory[0]["memory"][name] + saved.error_memory[1]["memory"][name]) / 2
        )
    assert training.run(lambda *_: None)["steps"] == 10
    every_step = Settings(**{**vars(settings), "sync_every": 1})
    check_raises(CheckpointError, "--sync-every", lambda: Training(digits, every_step, "co3", saved))
    dist.barrier()
    path.unlink(missing_ok=True)


# ── launching ──


SCENARIOS = [
    every_step_is_ddp, averages_and_outer_steps, replicas_are_identical, half_precision_loses_nothing, nothing_is_lost,
    masked_momentum, warm_up, buffers_are_averaged, schedules, uneven_ranks, an_exception_leaves_at_once,
    a_diverged_rank_is_left_out, ranks_start_alike, figures, evaluation_between_syncs, resuming, bad_arguments,
    other_models_are_told, training_resumes,
]  # fmt: skip
QUICK = {
    "every_step_is_ddp",
    "averages_and_outer_steps",
    "nothing_is_lost",
    "masked_momentum",
    "warm_up",
    "uneven_ranks",
    "a_diverged_rank_is_left_out",
    "resuming",
    "bad_arguments",
}


@pytest.mark.parametrize("scenario", named(SCENARIOS, QUICK))
def test_on_three_ranks(ranks: RankPool, scenario: Scenario) -> None:
    ranks.check(scenario, seconds=20, setup=add_toy_recipe)


def test_patterns_that_match_no_buffer_are_named() -> None:
    model = nn.BatchNorm1d(3)
    with pytest.warns(UserWarning, match=r"'runing_\*' matches no float buffer .* nearest is 'running_") as said:
        Buffers(model, parse_spec({"runing_*": "none", "running_var": "none"}), parse_spec("co3"))
    assert len(said) == 1


def lose_a_rank(rank: int, folder: Path) -> list[Loss]:
    """Rank 1 dies while rank 0 waits in a sync, and rank 2 for all to leave."""
    connect(rank, folder, "lost", 10)
    model = make()
    optimizer = sgd(model)
    block = LocalSGD(model, optimizer, "co3", sync_every=2)
    return lose_rank_1(block, rank, 3, lambda number: step(model, optimizer, rank, number))


def test_a_lost_rank_is_an_error_within_the_timeout(ranks: RankPool) -> None:
    check_that_rank_1_was_missed(*ranks.run(lose_a_rank, seconds=60))
