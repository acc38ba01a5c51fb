"""Checkpoints of users: error memories of three ranks, saved and loaded by three and by two, whole or not at all.

One launch: three ranks save, two load and save, three load again; files are then torn in every way, and at last a rank
is killed in the middle of a save.
"""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import shutil
import signal
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire import CheckpointError, GradwireError
from gradwire.checkpoints import rank_states
from support.helpers import bits
from support.rank_pool import WORLD, RankPool, connect
from support.ranks import Net, check_raises, digest, gathered, loss_of

SPEC = {"big*": "dgc:warmup=0", "norm*": "none", "*": "co3"}  # so that there are velocities too


class Run:
    """A model that is attached, and its optimizer."""

    def __init__(self, aggregate: str = "all_gather") -> None:
        torch.manual_seed(0)
        self.model = DistributedDataParallel(Net(), bucket_cap_mb=0.001)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.handle = gradwire.ddp.attach(self.model, SPEC, optimizer=self.optimizer, aggregate=aggregate)

    def train(self, rank: int, first: int, last: int) -> str:
        for step in range(first, last):
            self.optimizer.zero_grad()
            loss_of(self.model, rank, step).backward()
            self.optimizer.step()
        return digest(dict(self.model.module.named_parameters()))

    def save(self, folder: Path) -> None:
        """Once with torch.distributed.checkpoint, once as a single file of rank 0."""
        with warnings.catch_warnings(action="ignore"):
            torch_dcp.save(
                {"model": self.model.module.state_dict(), "gradwire": gradwire.dcp.shard(self.handle)},
                checkpoint_id=folder,
            )
        whole = self.handle.all_ranks.state_dict()
        if whole:
            torch.save({"model": self.model.module.state_dict(), "gradwire": whole}, folder / "single.pt")
        dist.barrier()

    def load_dcp(self, folder: Path) -> None:
        model = self.model.module.state_dict()
        torch_dcp.load({"model": model}, checkpoint_id=folder)
        self.model.module.load_state_dict(model)
        gradwire.dcp.load(self.handle, folder)

    def load_single(self, folder: Path) -> None:
        saved = torch.load(folder / "single.pt", weights_only=True)
        self.model.module.load_state_dict(saved["model"])
        self.handle.load_state_dict(saved["gradwire"])


WAYS = (Run.load_dcp, Run.load_single)


def work(rank: int, folder: Path) -> object:
    global FOLDER  # noqa: PLW0603
    FOLDER = folder
    rank_states.BATCH_BYTES = 60_000  # several batches, even of this small model
    phases = [
        (3, [same_number, shards_of_three]),
        (2, [fewer, shards_for_two]),
        (3, [more, data_parallel, torn, sub_groups, pickling]),
    ]
    failures: dict[str, str] = {}
    for i, (world, scenarios) in enumerate(phases):
        if rank < world:
            failures |= run_phase(scenarios, rank, folder / str(i), world)
        else:
            failures |= {scenario.__name__: "" for scenario in scenarios}
    connect(rank, folder, "last", seconds=10)
    everyone = gathered(failures)
    dist.barrier()
    return {"failures": everyone, "killed": killed(rank)}


def run_phase(scenarios: list[Callable[[int], None]], rank: int, folder: Path, world: int) -> dict[str, str]:
    """What went wrong in each, in a process group of its own: one that fails does not spoil the next."""
    folder.mkdir(exist_ok=True)
    failures = {}
    for scenario in scenarios:
        connect(rank, folder, scenario.__name__, world=world)
        try:
            scenario(rank)
            failures[scenario.__name__] = ""
        except BaseException:
            failures[scenario.__name__] = traceback.format_exc()
        gc.collect()  # DDP models keep the group
        dist.destroy_process_group()
    return failures


@pytest.fixture(scope="module")
def results(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> list:
    return ranks.run(work, seconds=200, folder=tmp_path_factory.mktemp("memories"))


def check(results: list, scenario: str) -> None:
    failures = [f"rank {rank}:\n{r[scenario]}" for rank, r in enumerate(results[0]["failures"]) if r[scenario]]
    assert not failures, "\n".join(failures)


# ── saved by three, loaded by three, by two, and by three again ───────────────────────────────────


def flat(state: dict) -> dict[str, torch.Tensor]:
    return {f"{kind}.{name}": tensor for kind in ("memory", "velocity") for name, tensor in state[kind].items()}


def mean_of(states: list[dict]) -> dict[str, torch.Tensor]:
    return {
        name: torch.from_numpy(sum(flat(s)[name].double().numpy() for s in states) / len(states)).float()
        for name in flat(states[0])
    }


def all_states(run: Run) -> list[dict]:
    states: list = [None] * dist.get_world_size()
    dist.all_gather_object(states, run.handle.state_dict())
    return states


def same_number(rank: int) -> None:
    """Every rank goes on with its own memory, as if it had never stopped."""
    run = Run()
    run.train(rank, 0, 4)
    run.save(FOLDER / "three")
    saved = run.handle.state_dict()
    straight = run.train(rank, 4, 6)
    digests = []
    for load in WAYS:
        other = Run()
        load(other, FOLDER / "three")
        state = other.handle.state_dict()
        assert state["steps"] == 4 and digest(flat(state)) == digest(flat(saved))
        digests.append(other.train(rank, 4, 6))
    assert digests == [straight, straight]
    assert len(set(gathered(digest(flat(saved))))) == WORLD, "otherwise this would show nothing"
    assert set(gathered(straight)) == {straight}
    forgetful = Run()
    forgetful.model.module.load_state_dict(torch.load(FOLDER / "three" / "single.pt", weights_only=True)["model"])
    assert forgetful.train(rank, 4, 6) != straight


def data_parallel(rank: int) -> None:
    """The handle of gradwire.DataParallel is the same."""
    model = gradwire.DataParallel(Net(), "co3")
    loss_of(model, rank, 0).backward()
    whole = [model.gradwire.all_ranks.state_dict()]
    assert bool(whole[0]) == (rank == 0)
    dist.broadcast_object_list(whole)
    torch_dcp.save({"gradwire": gradwire.dcp.shard(model.gradwire)}, checkpoint_id=FOLDER / "data parallel")
    for load in (lambda h: h.load_state_dict(whole[0]), lambda h: gradwire.dcp.load(h, FOLDER / "data parallel")):
        other = gradwire.DataParallel(Net(), "co3")
        load(other.gradwire)
        assert digest(other.gradwire.state_dict()["memory"]) == digest(model.gradwire.state_dict()["memory"])


@pytest.mark.parametrize("scenario", ["same_number", "data_parallel"])
def test_the_same_number_of_ranks_goes_on_bit_for_bit(results, scenario):
    check(results, scenario)


def start_from_mean(rank: int, folder: Path) -> Run:
    """All ranks have the mean of what was saved, bit for bit, whichever way it was."""
    saved = torch.load(folder / "single.pt", weights_only=True)["gradwire"]["ranks"]
    assert len(saved) != dist.get_world_size()
    expected = mean_of(saved)
    assert {name.split(".")[0] for name in expected} == {"memory", "velocity"}
    for load in WAYS:
        run = Run()
        load(run, folder)
        state = run.handle.state_dict()
        assert state["steps"] == saved[0]["steps"]
        assert {n: bits(t) for n, t in flat(state).items()} == {n: bits(t) for n, t in expected.items()}
    digests: list = [None] * dist.get_world_size()
    dist.all_gather_object(digests, run.train(rank, 4, 6))
    assert len(set(digests)) == 1
    return run


def fewer(rank: int) -> None:
    run = start_from_mean(rank, FOLDER / "three")
    run.save(FOLDER / "two")
    states = all_states(run)
    assert digest(flat(states[0])) != digest(flat(states[1]))


def more(rank: int) -> None:
    start_from_mean(rank, FOLDER / "two")


def unsent(states: list[dict]) -> dict[str, torch.Tensor]:
    """Of the mean gradient: the mean of the ranks' memories, and all that the owners of shards remember."""
    total = {name: sum(s["memory"][name].double() for s in states) / len(states) for name in states[0]["memory"]}
    for state in states:
        for name, shards in state.get("shards", {}).items():
            total[name] = total[name] + shards.double()
    return total


def shards_of_three(rank: int) -> None:
    run = Run("scatter_reduce")
    run.train(rank, 0, 4)
    assert run.handle.state_dict()["shards"]
    run.save(FOLDER / "shards")


def shards_for_two(rank: int) -> None:
    before = unsent(torch.load(FOLDER / "shards" / "single.pt", weights_only=True)["gradwire"]["ranks"])
    for aggregate in ("all_gather", "scatter_reduce"):
        for load in WAYS:
            run = Run(aggregate)
            load(run, FOLDER / "shards")
            after = unsent(all_states(run))
            for name, total in before.items():
                torch.testing.assert_close(after[name], total, rtol=1e-6, atol=1e-9)
            run.train(rank, 4, 6)


@pytest.mark.parametrize("scenario", ["fewer", "more", "shards_of_three", "shards_for_two"])
def test_another_number_of_ranks_starts_from_the_mean(results, scenario):
    check(results, scenario)


def sub_groups(rank: int) -> None:
    """Ranks 0 and 1 train one model, rank 2 another, and all save into one checkpoint."""
    groups = [dist.new_group([0, 1]), dist.new_group([2])]
    torch.manual_seed(rank // 2)
    model = DistributedDataParallel(Net(), process_group=groups[rank // 2])
    handle = gradwire.ddp.attach(model, "co3")
    loss_of(model, rank, 0).backward()
    saved = handle.state_dict()
    torch_dcp.save({"app": {"gradwire": gradwire.dcp.shard(handle)}}, checkpoint_id=FOLDER / "groups")
    again = gradwire.ddp.attach(model, "co3")
    gradwire.dcp.load(again, FOLDER / "groups", key="app.gradwire")
    assert digest(again.state_dict()["memory"]) == digest(saved["memory"])
    whole = gradwire.ddp.attach(DistributedDataParallel(Net()), "co3")
    check_raises(CheckpointError, "several process groups",
                 lambda: gradwire.dcp.load(whole, FOLDER / "groups", key="app.gradwire"))  # fmt: skip
    check_raises(CheckpointError, "did you save it as 'app.gradwire'?",
                 lambda: gradwire.dcp.load(whole, FOLDER / "groups"))  # fmt: skip


def test_models_of_several_groups_fit_into_one_checkpoint(results):
    check(results, "sub_groups")


# ── whole or not at all ───────────────────────────────────────────────────────────────────────────


def torn(rank: int) -> None:
    run = Run()
    run.train(rank, 0, 5)
    run.save(FOLDER / "later")
    before = digest(flat(run.handle.state_dict()))

    def refused(name: str, message: str, tear: Callable[[Path], object], source: str = "three") -> None:
        folder = FOLDER / f"torn {name}"
        if rank == 0:
            shutil.copytree(FOLDER / source, folder)
            tear(folder)
        dist.barrier()
        check_raises(CheckpointError, message, lambda: gradwire.dcp.load(run.handle, folder))
        assert digest(flat(run.handle.state_dict())) == before, "a refused checkpoint changes nothing"

    part = "__2_0.distcp"
    refused("unlisted", "no complete checkpoint", lambda folder: (folder / ".metadata").unlink())
    refused("unfinished", "damaged or incomplete", lambda folder: os.truncate(folder / part, 300))
    refused("missing", "damaged or incomplete", lambda folder: (folder / part).unlink())
    # A save that was cut short when it overwrote an older one: DCP itself notices nothing.
    refused("mixed", "not of the same save", lambda folder: shutil.copy(FOLDER / "later" / part, folder / part))
    saved = torch.load(FOLDER / "three" / "single.pt", weights_only=True)["gradwire"]["ranks"][2]
    refused("bit", "checksum", lambda folder: flip(folder, saved["memory"]["big.weight"]))
    single = run.handle.all_ranks
    check_raises(CheckpointError, "on rank 0 alone", lambda: single.load_state_dict({}))
    check_raises(CheckpointError, "not a gathered state", lambda: single.load_state_dict({"ranks": [], "format": "?"}))
    check_raises(CheckpointError, "no error memory under 'other'",
                 lambda: gradwire.dcp.load(run.handle, FOLDER / "three", key="other"))  # fmt: skip


def flip(folder: Path, tensor: torch.Tensor) -> None:
    """One bit of this tensor, wherever it stands."""
    for path in folder.glob("*.distcp"):
        content = bytearray(path.read_bytes())
        place = content.find(bits(tensor))
        if place >= 0:
            content[place + 1000] ^= 1
            path.write_bytes(content)
            return
    raise AssertionError("not found")


def test_torn_checkpoints_are_refused_on_every_rank(results):
    check(results, "torn")


def killed(rank: int) -> str:
    """Rank 2 dies while it writes; the others are told, and the checkpoint before is still whole."""
    run = Run()
    if rank == 2:
        torch_dcp.filesystem.torch.save = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(BaseException, match=r"(?s).+"):  # DCP's own is no Exception
        run.save(FOLDER / "killed")
    dist.destroy_process_group()
    alone = [gradwire.checkpoints.rank_states.AllRanks(KeptState()) for _ in range(2)]
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        gradwire.dcp.load(Alone(alone[0]), FOLDER / "killed")
    gradwire.dcp.load(Alone(alone[1]), FOLDER / "three")
    return digest(flat(alone[1].handle.state))


class KeptState:
    """A state as of a handle, for a process all by itself."""

    def load_state_dict(self, state: dict) -> None:
        self.state = state


class Alone:
    def __init__(self, all_ranks: rank_states.AllRanks):
        self.all_ranks = all_ranks


def test_a_killed_save_leaves_the_one_before(results, tmp_path_factory):
    assert results[2] is None, "rank 2 was killed"
    folder = next(tmp_path_factory.getbasetemp().glob("memories*"))
    saved = torch.load(folder / "three" / "single.pt", weights_only=True)["gradwire"]["ranks"]
    assert {results[0]["killed"], results[1]["killed"]} == {digest(mean_of(saved))}


# ── pickles and copies ────────────────────────────────────────────────────────────────────────────


def pickling(rank: int) -> None:
    run = Run()
    copied = copy.deepcopy(run.model)
    loss_of(copied, rank, 0).backward()
    assert run.handle.stats()["steps"] == 0, "the copy has no hook"
    handle = gradwire.ddp.attach(copied, "co3")
    loss_of(copied, rank, 0).backward()
    assert handle.stats()["steps"] == 1
    file = io.BytesIO()
    torch.save(run.model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert gradwire.ddp.attach(loaded, "co3").stats()["steps"] == 0
    for attached in (handle, handle.state):
        for duplicate in (pickle.dumps, copy.deepcopy, copy.copy):
            check_raises(GradwireError, "attach again", lambda d=duplicate, a=attached: d(a))
    fresh = gradwire.ddp.State("co3:format=fp8")
    again = pickle.loads(pickle.dumps(fresh))
    assert again.recipes.by_pattern == fresh.recipes.by_pattern
    model = DistributedDataParallel(Net())
    model.register_comm_hook(again, gradwire.ddp.hook)
    loss_of(model, rank, 0).backward()
    check_raises(GradwireError, "cannot be pickled", lambda: pickle.dumps(again))


def test_pickles_and_copies(results):
    check(results, "pickling")


# ── the mean ──────────────────────────────────────────────────────────────────────────────────────


def test_what_a_rank_does_not_have_counts_as_zero():
    states = [{"steps": 3, "memory": {"a": torch.full((2,), float(rank))}} for rank in range(3)]
    states[1]["memory"]["b"] = torch.full((1,), 6.0)
    found = rank_states.mean(states)
    assert found["steps"] == 3
    assert found["memory"]["a"].tolist() == [1, 1] and found["memory"]["b"].tolist() == [2]
    assert states[0]["memory"]["a"].tolist() == [0, 0], "states stay as they are"
