"""Error memory of federated clients: whatever is lost on the way, what arrived and what is left add up."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import Message
from flwr.serverapp.strategy import FedAvg
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire import GradwireError, flower
from gradwire.flower.client.folder_store import FolderStore, default_folder
from support.flower_apps import adding_client, final, run
from support.flower_fates import FATES, NAME, RECIPE, lost_in_rounds


@settings(max_examples=25)
@given(st.lists(st.sampled_from(FATES), min_size=2, max_size=8))
def test_what_arrived_and_what_is_left_add_up(fates: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert lost_in_rounds(fates, Path(folder)) <= 1e-5


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


def test_folders_that_cannot_be_looked_into_are_left_alone(tmp_path: Path) -> None:
    other = tmp_path / (b"\1" * 8).hex()
    other.mkdir()
    (other / "node-1").symlink_to("node-1")  # leads to itself; that of another user raises an OSError, too
    FolderStore(tmp_path, b"\2" * 8, "node-1").write("memory", {})
    assert other.is_dir()


def test_a_file_that_another_client_moves_meanwhile_is_no_error(tmp_path: Path) -> None:
    """Clients on one machine share the folder; a link to nothing is a file that was listed and then moved."""
    other = FolderStore(tmp_path, b"\1" * 8, "node-1")
    other._path("pending").symlink_to(tmp_path / "moved")
    FolderStore(tmp_path, b"\2" * 8, "node-2")
    assert other.folder.is_dir()


def test_the_default_folder_is_the_users_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "gradwire"
