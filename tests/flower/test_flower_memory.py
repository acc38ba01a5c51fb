"""Error memory of federated clients: whatever is lost on the way, what arrived and what is left add up."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import Context, Error, Message, RecordDict
from flwr.serverapp.strategy import FedAvg
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire import GradwireError, flower
from gradwire.flower import one_process
from gradwire.flower.client.client_memory import ClientMemory
from gradwire.flower.client.folder_store import FolderStore, default_folder
from support.flower_apps import Faulty, adding_client, drift, final, run, serve, start_model

NAME = "conv.weight"
RECIPE = dict.fromkeys(("*running_*", "*"), "stc:decay=1,small=same")
FATES = ("arrives", "lost", "killed before", "killed after", "restarted")


class Fates(Faulty):
    """One client; in round r its fate is fates[r − 1]."""

    def __init__(self, client, folder: Path, fates: list[str]):  # type: ignore[no-untyped-def]
        super().__init__(client, 1, lambda reply: reply)
        self.fates, self.folder = fates, folder
        self.arrived: list[int] = []

    def reply_of_client(self, message: Message, context: Context) -> Message:
        if message.metadata.message_type != "train":
            return super().reply_of_client(message, context)
        round_ = message.content["config"]["server-round"]
        fate = self.fates[round_ - 1]
        if fate == "killed before":
            return Message(Error(8, "killed"), reply_to=message)  # in training: nothing was written
        reply = super().reply_of_client(message, context)
        if fate in ("lost", "killed after"):
            return Message(Error(5, "lost"), reply_to=message)
        if fate == "restarted":  # with another node id, and without its context
            (node,) = self.contexts
            new = Context(1, node + 1, {"partition-id": 0, "num-partitions": 1}, RecordDict(), {})
            self.contexts = {node + 1: new}
        self.arrived.append(round_)
        return reply


@settings(max_examples=25)
@given(st.lists(st.sampled_from(FATES), min_size=2, max_size=8))
def test_what_arrived_and_what_is_left_add_up(fates: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        strategy = flower.Compressed(FedAvg(min_train_nodes=1, min_available_nodes=1, fraction_evaluate=0.0))
        client = adding_client([flower.compress(RECIPE, folder=folder)], weight=lambda i: 1.0)
        grid = Fates(client, Path(folder), fates)
        server, results = serve(strategy, len(fates))
        one_process.run_on(grid, server)
        model = start_model()
        expected = model[NAME] + sum(drift(0, r, model)[NAME] for r in grid.arrived)
        store = FolderStore(Path(folder), strategy.wire.training, "partition-0")
        left = ClientMemory(store).settle(list(strategy.wire.accepted.values()))
        got = final(results[0])[NAME] if grid.arrived else model[NAME]
        torch.testing.assert_close(got + left.get(NAME, 0), expected, rtol=0, atol=1e-5)


def test_a_memory_of_another_training_is_not_used(tmp_path: Path) -> None:
    def trained() -> dict[str, torch.Tensor]:
        strategy = flower.Compressed(FedAvg(fraction_evaluate=0.0))
        return final(run(strategy, adding_client([flower.compress("stc", folder=tmp_path)]), rounds=2)[0])

    first, second = trained(), trained()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("damage", ["settled", "pending", "both", "cut"])
def test_lost_or_damaged_files_start_from_nothing(tmp_path: Path, damage: str) -> None:
    def lose(reply: Message) -> Message:
        for path in tmp_path.rglob("*.pt"):
            if damage == "cut":
                path.write_bytes(path.read_bytes()[:-100])
            elif damage in (path.stem, "both"):
                path.unlink()
        return reply

    strategy = flower.Compressed(FedAvg(fraction_evaluate=0.0))
    client = adding_client([flower.compress(RECIPE, folder=tmp_path)])
    result, _ = run(strategy, client, rounds=4, fault=lose)
    assert not strategy.stats()["train"]["rejected"]
    assert torch.isfinite(final(result)[NAME]).all()


def test_a_folder_that_cannot_be_written_to_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(GradwireError, match="folder="):
        FolderStore(tmp_path / "file", bytes(8), "node-1")


def test_a_memory_is_for_its_owner_alone(tmp_path: Path) -> None:
    store = FolderStore(tmp_path, b"training", "client")
    assert store.folder.stat().st_mode & 0o077 == 0


def test_memories_nobody_asks_for_are_removed(tmp_path: Path) -> None:
    old = FolderStore(tmp_path, b"\1" * 8, "node-1")
    old.write("settled", {"token": b"x", "memory": {}})
    os.utime(old.folder / "settled.pt", (0, 0))
    kept = FolderStore(tmp_path, b"\2" * 8, "a/b")
    kept.write("settled", {"token": b"x", "memory": {}})
    FolderStore(tmp_path, b"\3" * 8, "node-1")
    assert not (tmp_path / ("01" * 8)).exists() and kept.read("settled") is not None


def test_a_file_that_another_client_moves_meanwhile_is_no_error(tmp_path: Path) -> None:
    """Clients on one machine share the folder; a link to nothing is a file that was listed and then moved."""
    other = FolderStore(tmp_path, b"\1" * 8, "node-1")
    other._path("pending").symlink_to(tmp_path / "moved")
    FolderStore(tmp_path, b"\2" * 8, "node-2")
    assert other.folder.is_dir()


def test_the_default_folder_is_the_users_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "gradwire"
