"""`gradwire aggregator`: signals, and mistakes that users make. (test_aggregator.py runs it as a program.)"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import signal
from pathlib import Path

import pytest

from gradwire import GradwireError, SpecError
from gradwire.aggregator.userspace_engine import UserspaceEngine
from gradwire.cli import aggregator as command
from support.aggregation import in_a_child

pytest.importorskip("gradwire._native")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_as_soon_as_it_says_that_it_listens(number: signal.Signals, tmp_path: Path) -> None:
    """A script may wait for that line, and end the aggregator then: with exit code 0, and all figures."""
    figures = tmp_path / "figures.json"

    class Console(command.Console):
        def print(self, *objects: object, **options: object) -> None:
            os.kill(os.getpid(), number)

    def check() -> None:
        command.Console = Console
        command.aggregator(bind="127.0.0.1:0", json=figures)
        assert json.loads(figures.read_text())["packets"] == 0

    assert in_a_child(check)


def test_figures_that_do_not_fit_leave_those_before(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    figures.write_text("before")

    def check() -> None:
        command._serve = lambda *_: resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        output = contextlib.redirect_stdout(io.StringIO())  # not to a file, which would not grow, either
        with pytest.raises(GradwireError, match=r"cannot write .*figures\.json: File too large"), output:
            command.aggregator(bind="127.0.0.1:0", json=figures)
        assert figures.read_text() == "before"

    assert in_a_child(check)


def test_mistakes_are_found_before_it_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_serve", lambda *_: pytest.fail("it serves"))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(GradwireError, match=r"--json .*: give a file in a folder that exists"):
        command.aggregator(bind="127.0.0.1:0", json=tmp_path / "nowhere" / "figures.json")
    with pytest.raises(SpecError, match=r"--bind '127\.0\.0\.1': it is HOST:PORT"):
        command.aggregator(bind="127.0.0.1")
    with pytest.raises(SpecError, match=r"--bind '::1:9999': an IPv6 address stands in brackets"):
        command.aggregator(bind="::1:9999")
    with pytest.raises(SpecError, match=r"no address of 'no-such-host\.invalid' was found"):
        command.aggregator(bind="no-such-host.invalid:1")
    monkeypatch.setenv("GRADWIRE_KEY", "abc")
    with pytest.raises(SpecError, match="GRADWIRE_KEY is not a key"):
        command.aggregator(bind="127.0.0.1:0")
    monkeypatch.delenv("GRADWIRE_KEY")
    first = UserspaceEngine(("127.0.0.1", 0))
    with pytest.raises(GradwireError, match=rf"cannot listen at 127.0.0.1:{first.address[1]}: .*in use"):
        command.aggregator(bind=f"127.0.0.1:{first.address[1]}")
    first.shut()
