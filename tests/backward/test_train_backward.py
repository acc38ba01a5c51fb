"""`gradwire train --backward`: rows that are chosen, and their memories in checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradwire import GradwireError, tasks
from gradwire.checkpoints import run_file
from gradwire.cli.options import TrainOptions, resolve
from gradwire.tasks import backward_option
from gradwire.tasks.settings import Settings
from gradwire.tasks.training import Training
from support.helpers import free_ports
from support.rank_pool import WORLD, RankPool, connect
from support.train_runs import figures, settings


def test_exact_and_chosen_rows_in_one_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_ports(1)[0]}
    for name, value in place.items():  # as under torchrun, so that the worker is this process
        monkeypatch.setenv(name, str(value))
    options = ("--backward", "none", "--backward", "topk:k=0.5", "--steps", "10", "--batch-size", "8")
    summary = figures(tmp_path / "figures.json", "--codec", "none", "--codec", "co3", *options)
    assert summary["backward"] == ["none", "topk:k=0.5"]
    runs = {(run["codec"], run["backward"]): run for run in summary["runs"]}
    assert list(runs) == [(codec, backward) for codec in ("none", "co3") for backward in ("none", "topk:k=0.5")]
    assert runs["co3", "topk:k=0.5"]["backward_spec"] == "topk:k=0.5,decay=1,centre=yes"
    assert [run["converted"] for run in runs.values()] == [[], ["6", "8"]] * 2
    assert len({run["digest"] for run in runs.values()}) == 4
    shown = capsys.readouterr().out
    assert "--backward in 2 layers" in shown
    assert "co3, topk:k=0.5 in 2 layers: step 10/10" in shown


CHOSEN = ("co3", "topk:k=0.25,decay=0.9", 1), ("none", "randk:k=3", 1), ("co3", "weightedk", 4)


def chosen(steps: int, codec: str, backward: str, sync_every: int, **more: Any) -> Settings:
    return dataclasses.replace(settings(steps), codecs=(codec,), backward=(backward,), sync_every=sync_every, **more)


def stopped(rank: int, folder: Path) -> list[Any]:
    """Runs that go through, and the same stopped after 7 of 12 steps and resumed: with all memories, without, alone."""
    connect(rank, folder, "stopped")
    digits, outcomes = tasks.find("digits")(Path()), []

    def stop(training: Training, loss: float) -> None:
        if training.step == 8:
            raise KeyError("stop")

    for number, (codec, rows, sync_every) in enumerate(CHOSEN):
        asked = chosen(12, codec, rows, sync_every, save=str(folder / f"{number}.pt"), save_every=7)
        straight = Training(digits, asked, codec, None, rows).run(lambda *_: None)["digest"]
        with contextlib.suppress(KeyError):
            Training(digits, asked, codec, None, rows).run(stop)
        dist.barrier()
        saved = run_file.load(folder / f"{number}.pt")
        dist.barrier()  # before the file is replaced
        assert saved.step == 7
        assert not any("memory" in name for name in saved.model)
        assert not torch.equal(*(memory["6.weight_memory_inputs"] for memory in saved.row_memory[:2]))
        without = dataclasses.replace(saved, row_memory=[])
        resumed = [Training(digits, asked, codec, s, rows).run(lambda *_: None) for s in (saved, without)]
        outcomes.append([run["digest"] == straight for run in resumed])
    dist.destroy_process_group()
    return outcomes


def test_resuming_chosen_rows_ends_as_if_never_stopped(ranks: RankPool) -> None:
    """Bit for bit; and not without the row memories, so that this can fail."""
    assert ranks.run(stopped, seconds=120) == [[[True, False]] * len(CHOSEN)] * WORLD


@pytest.mark.usefixtures("alone")
def test_row_memories_start_empty_on_other_workers(tmp_path: Path) -> None:
    digits, path = tasks.find("digits")(Path()), tmp_path / "run.pt"
    asked = chosen(2, "co3", "topk", 1, save=str(path))
    Training(digits, asked, "co3", None, "topk").run(lambda *_: None)
    saved = run_file.load(path)
    go_on = dataclasses.replace(asked, steps=3)
    model = Training(digits, go_on, "co3", saved, "topk").model
    torch.testing.assert_close(backward_option.split_state(model)[1], saved.row_memory[0], rtol=0, atol=0)
    two = dataclasses.replace(saved, error_memory=saved.error_memory * 2, row_memory=saved.row_memory * 2)
    two.rng *= 2
    assert not backward_option.split_state(Training(digits, go_on, "co3", two, "topk").model)[1]


@pytest.mark.usefixtures("alone")
def test_a_model_without_linear_layers_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    digits = tasks.find("digits")(Path())
    monkeypatch.setattr(digits, "build_model", lambda: torch.nn.Conv2d(1, 10, 3))
    with pytest.raises(GradwireError, match="there is nothing to convert"):
        Training(digits, chosen(1, "co3", "topk", 1), "co3", None, "topk")


@pytest.mark.usefixtures("alone")
def test_checkpoints_from_before_backward_are_resumed(tmp_path: Path) -> None:
    digits, path = tasks.find("digits")(Path()), tmp_path / "run.pt"
    Training(digits, dataclasses.replace(settings(2), save=str(path)), "co3").run(lambda *_: None)
    content = torch.load(path, weights_only=True)
    del content["settings"]["backward"], content["row_memory"]
    run_file.write_whole(path, content)
    nothing = dict.fromkeys(field.name for field in dataclasses.fields(TrainOptions))
    asked, _ = resolve(TrainOptions(**nothing | {"device": "cpu", "data_dir": Path(), "resume": path}))
    assert asked.backward == ("none",)
    go_on = dataclasses.replace(asked, steps=3)
    training = Training(digits, go_on, "co3", run_file.load(path), *asked.backward)
    assert (training.step, training.converted) == (2, [])
