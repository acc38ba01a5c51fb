"""`gradwire train` end to end: real processes over loopback sockets."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from gradwire import GradwireError, tasks
from gradwire.checkpoints import run_file
from gradwire.cli import main
from gradwire.cli.report import show
from gradwire.tasks.training import Training
from support.helpers import free_ports
from support.train_runs import (
    COMMAND,
    figures,
    gone,
    needs_proc,
    run,
    settings,
    started,
    wait_for,
    wait_until_training,
)

pytestmark = pytest.mark.skipif(
    bool(os.environ.get("GRADWIRE_NO_NATIVE")), reason="takes minutes on the reference kernels"
)
STEPS = 160  # of the runs that are stopped and resumed
LONG = ("--steps", "100000", "--batch-size", "2")  # a run that must be stopped from outside


# ── a whole run ──


def test_a_short_run_on_two_workers(tmp_path: Path) -> None:
    result = run("--codec", "co3", "--steps", "3", "--json", str(tmp_path / "figures.json"))
    assert result.returncode == 0, result.stderr
    summary = json.loads((tmp_path / "figures.json").read_text())
    [figures_of_run] = summary["runs"]
    assert (summary["workers"], figures_of_run["codec"], figures_of_run["steps"]) == (2, "co3", 3)
    assert 0 < figures_of_run["frame_bytes"] < figures_of_run["dense_bytes"] / 4


@pytest.mark.thorough
def test_two_codecs_one_after_the_other(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    result = run("--codec", "none", "--codec", "co3", "--epochs", "4", "--json", str(path))
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    summary = json.loads(path.read_text())
    assert (summary["task"], summary["workers"], summary["seed"]) == ("digits", 2, 0)
    assert summary["torch"] == torch.__version__
    none, co3 = summary["runs"]
    assert [none["codec"], co3["codec"]] == ["none", "co3"]
    assert none["steps"] == co3["steps"] == 4 * (1437 // 64)
    assert [len(none["history"]), none["history"][-1]["epoch"]] == [4, 4]
    for run_figures in (none, co3):
        dense = 4 * run_figures["parameters"] * run_figures["steps"]
        assert run_figures["history"][-1]["accuracy"] > 0.9
        assert run_figures["dense_bytes"] == dense
        assert run_figures["ratio"] == pytest.approx(dense / run_figures["frame_bytes"])
        assert run_figures["bits_per_parameter"] == pytest.approx(32 / run_figures["ratio"])
        assert run_figures["wire_bytes_sent"] >= run_figures["frame_bytes"]  # to one peer
        seconds = run_figures["seconds_per_step"]
        phases = [seconds[phase] for phase in ("compute", "encode", "wait", "decode")]
        assert min(phases) > 0
        assert seconds["compute"] + seconds["wait"] == pytest.approx(seconds["total"])
        assert len(run_figures["per_worker"]) == 2
        # The table shows the same figures.
        row = re.search(rf"^ +{run_figures['codec']} .*$", result.stdout, re.MULTILINE)
        assert row
        assert f"{run_figures['frame_bytes']:,.0f}" in row[0]
        assert f"{run_figures['history'][-1]['accuracy']:.4f}" in row[0]
    assert none["digest"] != co3["digest"]
    assert 0.99 < none["ratio"] < 1
    assert co3["ratio"] > 8
    assert "step 88/88" in result.stdout


# ── stop and resume ──


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run that nothing stopped."""
    return figures(tmp_path_factory.mktemp("straight") / "figures.json", "--steps", str(STEPS))


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a run that was killed (-9) in its midst, workers and all."""
    saved = tmp_path_factory.mktemp("killed") / "run.pt"
    with started("--steps", str(STEPS), "--save", str(saved), "--save-every", "30") as process:
        wait_until_training(process, saved)
        os.killpg(process.pid, signal.SIGKILL)
    assert run_file.load(saved).step % 30 == 0
    return saved


@pytest.mark.thorough
def test_resuming_ends_as_if_never_stopped(straight: dict[str, Any], killed: Path, tmp_path: Path) -> None:
    step = run_file.load(killed).step
    assert 0 < step < STEPS
    resumed = figures(tmp_path / "figures.json", "--resume", str(killed))
    assert resumed["runs"][0]["digest"] == straight["runs"][0]["digest"]
    assert resumed["runs"][0]["history"][-1] == straight["runs"][0]["history"][-1]
    assert resumed["runs"][0]["measured_steps"] == STEPS - step


@pytest.mark.thorough
def test_resuming_without_the_error_memory_ends_elsewhere(
    straight: dict[str, Any], killed: Path, tmp_path: Path
) -> None:
    """So the test above can fail: every part of the checkpoint counts."""
    saved = run_file.load(killed)
    for memory in saved.error_memory[1]["memory"].values():
        memory.zero_()
    run_file.save(tmp_path / "run.pt", saved)
    resumed = figures(tmp_path / "figures.json", "--resume", str(tmp_path / "run.pt"))
    assert resumed["runs"][0]["digest"] != straight["runs"][0]["digest"]


@pytest.mark.thorough
def test_resuming_on_three_workers(killed: Path, tmp_path: Path) -> None:
    """The command compares their replicas itself; `test_a_stray_replica_is_an_error` shows that it would notice."""
    saved, after = run_file.load(killed), tmp_path / "after.pt"
    more = ("--workers", "3", "--steps", str(saved.step + 20), "--save", str(after))
    resumed = figures(tmp_path / "figures.json", "--resume", str(killed), *more)
    assert resumed["workers"] == len(resumed["runs"][0]["per_worker"]) == 3
    assert resumed["runs"][0]["steps"] == saved.step + 20
    assert re.fullmatch("[0-9a-f]{64}", resumed["runs"][0]["digest"])
    assert run_file.load(after).workers == 3


@pytest.mark.thorough
def test_torchrun_gives_the_same_parameters(straight: dict[str, Any], tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command, path = [*torchrun, "-m", "gradwire.cli", "train"], tmp_path / "figures.json"
    result = run("--steps", str(STEPS), "--threads", "1", "--json", str(path), command=command)
    assert result.returncode == 0, result.stderr
    summary = json.loads(path.read_text())
    threads = straight["threads"]
    assert summary["workers"] == 2
    assert threads > 1 or summary["runs"][0]["digest"] == straight["runs"][0]["digest"]


@pytest.mark.thorough
def test_local_steps_between_syncs(tmp_path: Path) -> None:
    """Resuming in the middle of a round is tested in test_local_sgd.py, with three workers."""
    saved, path = tmp_path / "run.pt", tmp_path / "figures.json"
    options = ("--codec", "co3", "--sync-every", "4", "--steps", "10", "--batch-size", "8")
    run_figures = figures(path, *options, "--save", str(saved))["runs"][0]
    assert run_figures["dense_bytes"] == 10 * 4 * run_figures["parameters"]
    assert run_figures["ratio"] > 3 * 8  # ten steps, three syncs
    resumed = figures(path, "--resume", str(saved), "--steps", "12")
    assert (resumed["sync_every"], resumed["runs"][0]["measured_steps"]) == (4, 2)


# ── errors ──


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--codec c03", "unknown recipe 'c03'; did you mean 'co3'?"),
        ("--codec co3:frmat=fp8", "did you mean 'format'?"),
        ("--backward topc", "unknown --backward 'topc'; did you mean 'topk'?"),
        ("--backward topk:kk=3", "unknown parameter of topk 'kk'; did you mean 'k'?"),
        ("--backward none:k=3", "unknown parameter of none 'k'"),
        ("--backward topk:k=half", "k=half is neither a share of the rows such as 0.25 nor a number of rows"),
        ("--backward topk:k=1.5", "a share of the rows is above 0 and at most 1"),
        ("--backward topk:k=0", "give at least one row"),
        ("--backward topk:k=nan", "a share of the rows is above 0 and at most 1"),
        ("--backward randk:decay=2", "'2' is not a number from 0 to 1"),
        ("--save a.pt --backward none --backward topk", "give one --backward"),
        ("--task digit", "unknown task 'digit'; did you mean 'digits'?"),
        ("--workers 0", "--workers must be at least 1, not 0"),
        ("--batch-size -3", "--batch-size must be at least 1, not -3"),
        ("--lr 0", "--lr must be above 0"),
        ("--sync-every 0", "--sync-every must be at least 1, not 0"),
        ("--device tpu", "unknown --device 'tpu'"),
        ("--seed -1", "--seed must be from 0"),
        ("--timeout 0", "--timeout must be 0.01 seconds or more"),
        ("--epochs 2 --steps 10", "give --epochs or --steps, not both"),
        ("--save-every 10", "--save-every needs --save FILE"),
        ("--save a.pt --codec none --codec co3", "give one --codec"),
        ("--json no/such/folder/a.json", "give a file in a folder that exists"),
        ("--resume no-such-file.pt", "cannot read the checkpoint no-such-file.pt: No such file"),
    ],
)
def test_bad_options_are_named_before_anything_starts(
    arguments: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a worker was started"))
    with pytest.raises(SystemExit) as exit_:
        main(["train", *arguments.split()])
    assert isinstance(exit_.value.code, str)  # so it goes to stderr, and the exit code is 1
    assert exit_.value.code.startswith("error: ")
    assert expected in exit_.value.code
    assert "\n" not in exit_.value.code


@pytest.mark.thorough
@pytest.mark.parametrize(
    "option", ["--task text", "--codec none", "--codec co3:decay=0.5", "--seed 1", "--backward topk"]
)
def test_another_run_is_not_resumed(killed: Path, option: str) -> None:
    name, value = option.split()
    with pytest.raises(SystemExit, match=f"leave out {name} to go on with it"):
        main(["train", "--resume", str(killed), name, value])


@pytest.mark.thorough
@pytest.mark.usefixtures("alone")
def test_a_finished_run_is_not_resumed(killed: Path) -> None:
    saved, digits = run_file.load(killed), tasks.find("digits")(Path())
    assert Training(digits, settings(saved.step + 1), "co3", saved).last_step == saved.step + 1
    with pytest.raises(GradwireError, match=rf"at step {saved.step} already: give more --epochs or --steps"):
        Training(digits, settings(saved.step), "co3", saved)


@pytest.mark.thorough
@pytest.mark.usefixtures("alone")
def test_other_workers_go_on_behind_the_examples_seen(killed: Path) -> None:
    """Two workers with a batch of 32 did 8 steps of the epoch; one worker with a batch of 8 has 64 behind it."""
    saved = run_file.load(killed)
    training = Training(tasks.find("digits")(Path()), settings(STEPS), "co3", saved)
    assert (training.epoch, training.step_in_epoch) == (saved.epoch, saved.step_in_epoch * 2 * 32 // 8)
    memory = training.handle.state_dict()["memory"]
    assert len(memory) == 8
    for name, kept in memory.items():
        before = [worker["memory"][name] for worker in saved.error_memory]
        assert before[0].any()
        torch.testing.assert_close(kept, (before[0] + before[1]) / 2)


@pytest.mark.usefixtures("alone")
def test_a_batch_larger_than_the_data_is_refused() -> None:
    with pytest.raises(GradwireError, match=r"1 workers with a batch of 1438 .* smaller --batch-size"):
        Training(tasks.find("digits")(Path()), settings(1, batch_size=1438), "co3")


@pytest.mark.thorough
def test_a_damaged_checkpoint_is_refused(killed: Path, tmp_path: Path) -> None:
    content = bytearray(killed.read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "run.pt").write_bytes(content)
    with pytest.raises(SystemExit, match=r"^error: [^\n]*run\.pt is damaged[^\n]*$"):
        main(["train", "--resume", str(tmp_path / "run.pt")])


@pytest.mark.thorough
def test_missing_data_are_one_line_from_all_workers(tmp_path: Path) -> None:
    result = run("--task", "cifar10", "--data-dir", str(tmp_path), "--workers", "2")
    assert result.returncode == 1
    assert re.fullmatch(r"error: no CIFAR-10 in .*cs\.toronto\.edu.*--data-dir\n", result.stderr)


@pytest.mark.thorough
def test_workers_with_different_options_are_told_so() -> None:
    environment = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_ports(1)[0]}
    processes = [
        subprocess.Popen(
            [*COMMAND, "--seed", str(rank), "--steps", "5", "--timeout", "30"],
            env={**environment, "RANK": str(rank)}, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    for process in processes:
        _, error = process.communicate(timeout=60)
        assert process.returncode == 1
        assert "error: workers disagree on seed: rank 0 has 0, rank 1 1; start all with the same" in error


def test_workers_are_left_to_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(SystemExit, match="torchrun started 4 workers: leave out --workers 2"):
        main(["train", "--workers", "2"])


# ── workers that die, and the end of the command ──


@pytest.mark.thorough
@needs_proc
def test_a_killed_worker_ends_the_run(tmp_path: Path) -> None:
    saved = tmp_path / "run.pt"
    with started(*LONG, "--save", str(saved), "--save-every", "5", "--timeout", "60") as process:
        pids = wait_until_training(process, saved)
        os.kill(pids[1], signal.SIGKILL)
        start = time.monotonic()
        _, error = process.communicate(timeout=30)
        assert time.monotonic() - start < 15  # not only when the timeout is over
        assert process.returncode == 1
        assert re.fullmatch(r"error: worker 1 of 2 was killed \(SIGKILL\).*\n", error)
        assert gone(pids)
    run_file.load(saved)  # what was saved last is whole


@pytest.mark.thorough
@needs_proc
def test_a_worker_that_hangs_ends_the_run_after_the_timeout(tmp_path: Path) -> None:
    saved = tmp_path / "run.pt"
    with started(*LONG, "--save", str(saved), "--save-every", "5", "--timeout", "2") as process:
        pids = wait_until_training(process, saved)
        os.kill(pids[1], signal.SIGSTOP)
        _, error = process.communicate(timeout=30)
        assert process.returncode == 1
        assert re.fullmatch(r"error: rank 1 does not answer within 2 s: its process is stopped or hangs .*\n", error)
        assert gone(pids)


@pytest.mark.thorough
@needs_proc
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_no_worker_outlives_the_command(tmp_path: Path, number: signal.Signals, code: int) -> None:
    saved = tmp_path / "run.pt"
    with started(*LONG, "--save", str(saved), "--save-every", "5") as process:
        pids = wait_until_training(process, saved)
        assert len(pids) == 2
        if number == signal.SIGINT:  # Ctrl-C reaches the whole group
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        _, error = process.communicate(timeout=30)
        assert process.returncode == code
        assert "Traceback" not in error
        wait_for(lambda: gone(pids), seconds=10)


# ── the command line itself ──


@pytest.mark.thorough
def test_an_aggregator_that_does_not_answer_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though workers' other warnings are switched off."""
    monkeypatch.setenv("GRADWIRE_KEY", "00" * 16)
    done = run("--codec", "homomorphic", "--aggregator", "127.0.0.1:9", "--aggregator-fallback", "--steps", "2")
    assert done.returncode == 0, done.stderr
    assert [line.partition(": rank")[0] for line in done.stderr.splitlines()] == [
        "warning: going on over the process group"
    ]


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, expected in ((["--version"], "gradwire 0."), (["train", "--help"], "--save-every")):
        with pytest.raises(SystemExit) as exit_:
            main(arguments)
        assert not exit_.value.code
        assert expected in capsys.readouterr().out


WIDE = {
    "codec": "co3:format=fp8,coder=huffman", "backward": "none", "converted": [], "steps": 10**5,
    "measured_steps": 10**5, "parameters": 10**6, "frame_bytes": 1.1e9, "wire_bytes_sent": 1.2e9, "ratio": 123.45,
    "bits_per_parameter": 12.345, "history": [{"epoch": 1.0, "step": 1, "loss": 1.25, "bits_per_byte": 8.25}],
    "seconds_per_step": dict.fromkeys(("total", "compute", "encode", "wait", "decode"), 1.75),
}  # fmt: skip
CONVERTED = {"backward": "weightedk:k=0.25,decay=0.9", "converted": ["head"]}


@pytest.mark.parametrize(
    ("figures", "texts"),
    [
        (WIDE, ["12.345"]),
        (WIDE | {"codec": "co3"} | CONVERTED, ["--backward in 1 layer", "weightedk", ":k=0.25,d", "ecay=0.9"]),
    ],
)
def test_the_table_fits_a_narrow_terminal(
    figures: dict[str, Any], texts: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    show({"task": "text", "workers": 2, "seed": 0, "runs": [figures]})
    shown = capsys.readouterr().out
    assert max(len(line) for line in shown.splitlines()) <= 80
    assert figures["codec"] in "".join(shown.split())  # folded over several lines or not
    for text in ("1,100,000,000", "1,200,000,000", "123.45", "1.2500", "8.2500", "1750.00", *texts):
        assert text in shown


@pytest.mark.thorough
def test_importing_gradwire_needs_no_command_line_libraries() -> None:
    code = "import sys, gradwire; sys.exit(any(name in sys.modules for name in ('typer', 'rich', 'gradwire.cli')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
