"""Federated runs: `gradwire train --federated`, and the apps it is made of. One test starts Ray."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, Message

from gradwire.cli import flower_simulation, main
from gradwire.cli.federated_progress import Rounds, decimal
from gradwire.errors import AggregateError
from gradwire.flower import one_process
from gradwire.tasks import text
from gradwire.tasks.federated import client
from gradwire.tasks.federated.apps import apps
from gradwire.tasks.federated.run import FederatedRun
from gradwire.tasks.federated.settings import FederatedSettings
from gradwire.tasks.federated.stoppable import StoppableGrid, Stopped

pytestmark = pytest.mark.skipif(
    bool(os.environ.get("GRADWIRE_NO_NATIVE")), reason="takes minutes on the reference kernels"
)
SMALL = FederatedSettings(
    task="digits", clients=5, per_round=3, rounds=2, local_epochs=1, batch_size=32, lr=0.05, seed=7, alpha=0.5
)


def finished(settings: FederatedSettings, codec: str) -> tuple[dict[str, Any], one_process.OneProcess]:
    run = FederatedRun(settings, codec)
    grid = one_process.run(*apps([run]), settings.clients)
    return run.figures(), grid


# ── the runs ──


def without_seconds(figures: dict[str, Any]) -> dict[str, Any]:
    history = [{k: v for k, v in entry.items() if k != "seconds"} for entry in figures["history"]]
    return {**figures, "history": history, "seconds_per_round": None}


@pytest.mark.thorough
def test_the_outcome_is_a_function_of_the_seed() -> None:
    first, again = (finished(SMALL, "none")[0] for _ in range(2))
    assert without_seconds(first) == without_seconds(again)
    other = finished(dataclasses.replace(SMALL, seed=8), "none")[0]
    assert other["digest"] != first["digest"]


def test_compressed_beside_uncompressed() -> None:
    settings = dataclasses.replace(SMALL, clients=4, per_round=4, rounds=6, lr=0.1, alpha=math.inf)
    plain, small = FederatedRun(settings, "none"), FederatedRun(settings, "co3")
    grid = one_process.run(*apps([plain, small]), settings.clients)
    raw, co3 = plain.figures(), small.figures()
    for figures in (raw, co3):
        assert [entry["round"] for entry in figures["history"]] == list(range(7))
        assert figures["history"][0]["upload_bytes"] == 0
        assert figures["history"][-1]["upload_bytes"] == figures["upload_bytes"]
        assert figures["messages"] == figures["replies"] == 24 and figures["rejected"] == 0
        assert figures["history"][-1]["accuracy"] > 0.85
    assert raw["upload_ratio"] == pytest.approx(1, abs=0.001)
    assert co3["upload_ratio"] > 9
    assert abs(raw["history"][-1]["accuracy"] - co3["history"][-1]["accuracy"]) < 0.05
    # What the engine itself has counted, but for the questions before the first round.
    questions = 2_000 * settings.clients
    assert 0 <= grid.received_bytes - raw["upload_bytes"] - co3["upload_bytes"] < questions
    assert 0 <= grid.sent_bytes - raw["download_bytes"] - co3["download_bytes"] < questions


def test_budget_and_download() -> None:
    figures = finished(dataclasses.replace(SMALL, rounds=3, budget=9_000, download="co3"), "co3")[0]
    assert figures["rejected"] == 0
    assert 4_000 < figures["upload_per_client"] <= 9_000
    assert figures["download_ratio"] > 1.2  # a client gets the whole model when it takes part for the first time


def test_the_server_chooses_the_rate() -> None:
    figures = finished(dataclasses.replace(SMALL, rate="adaquantfl"), "none")[0]
    assert figures["rejected"] == 0 and figures["upload_ratio"] > 6
    assert figures["codec"] == figures["spec"] == "adaquantfl"


class Failing(client.LocalTraining):
    """Some clients fail in the second round."""

    failing: set[int]

    def __call__(self, message: Message, context: Context) -> Message:
        reply = super().__call__(message, context)
        if int(context.node_config["partition-id"]) in self.failing and message.content["config"]["server-round"] == 2:
            raise ValueError("out of\nluck")
        return reply


def test_a_round_goes_on_without_clients_that_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "LocalTraining", Failing)
    settings = dataclasses.replace(SMALL, clients=3, per_round=3, alpha=math.inf)
    failures: list[tuple[int, int, str]] = []
    Failing.failing = {1}
    run = FederatedRun(settings, "co3", on_failure=lambda *failure: failures.append(failure))
    one_process.run(*apps([run]), settings.clients)
    assert failures == [(2, 1, "ValueError: out of luck")]
    assert run.figures()["rejected"] == 1 and len(run.history) == 3
    Failing.failing = {0, 1, 2}
    with pytest.raises(AggregateError, match=r"^round 2 has no reply that can be used; client 0: ValueError: out of l"):
        finished(settings, "co3")


def test_a_training_that_diverges_is_named() -> None:
    with pytest.raises(AggregateError, match=r"client \d: gradwire: the update of .* the training has diverged"):
        finished(dataclasses.replace(SMALL, lr=1e30), "co3")


@pytest.mark.thorough
def test_text_trains(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(text, "TRAIN_BYTES", 20_000)
    monkeypatch.setattr(text, "TEST_BYTES", 2_000)
    settings = FederatedSettings("text", 4, 2, 1, 1, batch_size=16, lr=0.005, seed=0, data_dir=str(tmp_path))
    figures = finished(settings, "co3")[0]
    assert figures["history"][-1]["loss"] < figures["history"][0]["loss"]


def test_a_server_app_can_be_stopped_while_it_waits() -> None:
    class Silent(one_process.OneProcess):
        def pull_messages(self, message_ids: Any) -> list[Message]:
            stop.set()
            return []

    stop = threading.Event()
    run = FederatedRun(SMALL, "none")
    server_app, client_app = apps([run], stop)
    grid = Silent(client_app, SMALL.clients)
    with pytest.raises(Stopped):
        server_app(grid, None)  # type: ignore[arg-type]
    with pytest.raises(Stopped):
        StoppableGrid(grid, stop).get_node_ids()


# ── the command ──


def error_of(*arguments: str) -> str:
    with pytest.raises(SystemExit) as exit_:
        main(["train", *arguments])
    return str(exit_.value.code)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--federated --workers 2", "--workers does not go with --federated: give --clients and --per-round"),
        ("--federated --epochs 2", "--epochs does not go with --federated: give --rounds and --local-epochs"),
        ("--federated --sync-every 2", "--sync-every does not go with --federated: give --local-epochs"),
        ("--federated --aggregate auto", "--aggregate does not go with --federated"),
        ("--federated --backward topk", "--backward does not go with --federated"),
        ("--federated --save x.pt", "federated runs have no checkpoints: leave it out"),
        ("--federated --timeout 5", "--timeout does not go with --federated"),
        ("--clients 3", "--clients is for federated runs: add --federated, or leave it out"),
        ("--alpha 0.3", "--alpha is for federated runs"),
        ("--federated --clients 3 --per-round 5", "give --clients 5 or more"),
        ("--federated --rounds 0", "--rounds must be at least 1"),
        ("--federated --alpha 0", "--alpha must be above 0"),
        ("--federated --alpha nan", "--alpha must be above 0"),
        ("--federated --clients 2000", "--clients must be 1 to 1437"),
        ("--federated --task text --alpha 0.3", "examples of text have none: leave it out"),
        ("--federated --task cifar10 --data-dir nowhere", "name the folder that holds them with --data-dir"),
        ("--federated --codec co4", "co4"),
        ("--federated --codec auto", "name a recipe"),
        ("--federated --download co4", "co4"),
        ("--federated --budget much", "is not a number of bytes: write 200000, 200kB"),
        ("--federated --budget 0", "--budget must be above 0"),
        ("--federated --rate slow", "adaquantfl"),
        ("--federated --rate feddq --codec co3", "--codec does not go with --rate"),
        ("--federated --json nowhere/a.json", "--json nowhere/a.json: give a file in a folder that exists"),
    ],
)
def test_options_that_do_not_fit_name_the_fix(
    arguments: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(flower_simulation, "simulate", lambda runs: pytest.fail("should not have come so far"))
    monkeypatch.chdir(tmp_path)
    error = error_of(*arguments.split())
    assert message in error and error.startswith("error: ") and "\n" not in error


def test_a_skew_of_no_classes_is_refused_before_flower_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flower_simulation, "prepare", lambda: pytest.fail("Flower is about to be imported"))
    assert "examples of text have none" in error_of("--federated", "--task", "text", "--alpha", "0.3")


@pytest.mark.parametrize("missing", ["flwr", "ray"])
def test_missing_packages_name_the_fix(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else object())
    assert "pip install 'gradwire[flower]'" in error_of("--federated")


def test_not_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "run it without torchrun" in error_of("--federated")


@pytest.mark.thorough
def test_an_engine_that_fails_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        try:
            raise ValueError("no room\nfor Ray")
        except ValueError as error:
            raise RuntimeError("Simulation Runtime crashed.") from error

    monkeypatch.setattr("flwr.simulation.run_simulation", fails)
    assert error_of("--federated") == "error: Flower's simulation engine failed: no room for Ray"

    def raises(*_: Any, **__: Any) -> None:
        raise AggregateError("round 1 has no reply")

    monkeypatch.setattr("flwr.simulation.run_simulation", raises)
    assert error_of("--federated") == "error: round 1 has no reply"


def test_progress_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with Rounds(100) as rounds:
        on_round, on_failure = rounds.callbacks("co3")
        for i in range(101):
            on_round({"round": i, "accuracy": 0.5, "loss": 1.0, "upload_bytes": i * 1000, "download_bytes": 1})
        on_failure(3, 12, "damaged [bold]frame[/nothing]")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "starting Flower and its clients"
    assert lines[1] == "co3: round 20/100, accuracy 0.5000, 20 kB up, 1 B down"
    assert len(lines) == 7
    assert lines[-1] == "warning: co3: round 3 goes on without client 12: damaged [bold]frame[/nothing]"


def test_bytes_have_three_digits() -> None:
    assert [decimal(n) for n in (0, 999, 1000, 999_600, 1_234_567, 5e12)] == [
        "0 B", "999 B", "1 kB", "1 MB", "1.23 MB", "5,000 GB"
    ]  # fmt: skip


def left_of(process: subprocess.Popen[str], seconds: float) -> list[str]:
    """What still runs of its session; the dead whom nobody has asked for do not count."""
    deadline = time.monotonic() + seconds
    while True:
        command = ["ps", "-s", str(process.pid), "-o", "stat=,args="]
        lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
        left = [line for line in lines if not line.startswith("Z")]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


@pytest.mark.thorough
def test_the_command_with_ray(tmp_path: Path) -> None:
    """As a user runs it; nothing is left of it."""
    arguments = "--federated --clients 4 --rounds 2 --threads 1 --lr 0.1 --codec none --codec co3 --json figures.json"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    process = subprocess.Popen(
        [sys.executable, "-m", "gradwire.cli", "train", *arguments.split()],
        cwd=tmp_path,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    out, error = process.communicate(timeout=400)
    assert process.returncode == 0 and not error, error
    assert not left_of(process, seconds=30)  # on a busy machine some of Ray leaves late
    summary = json.loads((tmp_path / "figures.json").read_text())
    assert (summary["clients"], summary["per_round"], summary["alpha"], summary["seed"]) == (4, 4, None, 0)
    raw, co3 = summary["runs"]
    assert co3["upload_ratio"] > 9 and co3["history"][-1]["accuracy"] > 0.5
    assert f"{co3['upload_per_client']:,.0f}" in out and "4 clients (all alike)" in out
    # The same to the bit as in one process.
    settings = FederatedSettings("digits", 4, 4, 2, 1, batch_size=32, lr=0.1, seed=0)
    torch.set_num_threads(1)
    assert raw["digest"] == finished(settings, "none")[0]["digest"]
    assert [line for line in out.splitlines() if line.startswith("co3: round 2/2, accuracy")]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_nothing_outlives_the_command(number: int, code: int, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "gradwire.cli", "train", "--federated", "--threads", "1"],
        cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None and "round 4/20" in process.stdout.readline()
    os.kill(process.pid, number)
    out, error = process.communicate(timeout=60)
    assert process.returncode == code
    assert (error, out) == ("" if number == signal.SIGKILL else "stopped\n", "")
    # After SIGKILL, agents of Ray's look for their parent only now and then.
    assert not left_of(process, seconds=100 if number == signal.SIGKILL else 3)
