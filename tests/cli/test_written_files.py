"""Files that the commands write where there is no room, no folder, or something else than a file."""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from gradwire import GradwireError
from gradwire.cli import main
from gradwire.cli.options import writable
from gradwire.cli.report import write_json
from gradwire.cli.worker import _report_failure


@contextlib.contextmanager
def small_files() -> Iterator[None]:
    """Let no file grow beyond ten bytes: writing fails as on a full disk. Not even that which pytest may write to."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_figures_that_do_not_fit_leave_those_before(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    write_json(path, {"run": "before"})
    with pytest.raises(GradwireError, match=r"cannot write .*figures\.json: File too large"), small_files():
        write_json(path, {"run": "after"})
    assert json.loads(path.read_text()) == {"run": "before"}
    assert os.listdir(tmp_path) == ["figures.json"]


def test_what_inspect_cannot_write_leaves_what_was_there(tmp_path: Path) -> None:
    tensors, figures, picture = tmp_path / "a.npz", tmp_path / "figures.json", tmp_path / "fits.png"
    np.savez(tensors, a=np.random.default_rng(0).normal(size=1000))
    for file in (figures, picture):
        file.write_text("before")
    for option, file in (("--json", figures), ("--plot", picture)):
        output = contextlib.redirect_stdout(io.StringIO())  # not to a file, which would not grow, either
        with pytest.raises(SystemExit, match=rf"^error: cannot write {file}: File too large$"), output, small_files():
            main(["inspect", str(tensors), option, str(file)])
        assert file.read_text() == "before"
    assert sorted(os.listdir(tmp_path)) == ["a.npz", "figures.json", "fits.png"]


def test_figures_go_into_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(path := tmp_path / "pipe")
    got: list[str] = []
    reader = threading.Thread(target=lambda: got.append(path.read_text()))
    reader.start()
    write_json(path, {"a": 1})
    reader.join()
    assert json.loads(got[0]) == {"a": 1}
    assert path.is_fifo()


def test_a_worker_says_why_it_failed_where_it_cannot_write(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    _report_failure(GradwireError("no space\nleft"), tmp_path / "gone" / "0.json")
    assert capfd.readouterr().err == "worker failed: no space left\n"


def test_what_no_file_can_be_written_to_is_said_before_the_training(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    (into_nowhere := tmp_path / "link").symlink_to(tmp_path / "nowhere" / "a.pt")
    for path, reason in (
        (pipe, "it is no ordinary file, and a checkpoint would take its place"),
        (into_nowhere, "give a file in a folder that exists"),
        (tmp_path, "give a file in a folder that exists"),
        (tmp_path / ("n" * 256), "File name too long"),
    ):
        with pytest.raises(GradwireError, match=f"^--save .*: {reason}"):
            writable(path, "--save")
    assert writable(pipe, "--json") == str(pipe)
