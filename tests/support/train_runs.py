"""`gradwire train` as tests start it, and what they can see of its workers."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gradwire.cli import main
from gradwire.tasks.settings import Settings

COMMAND = [sys.executable, "-m", "gradwire.cli", "train"]
needs_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds workers through /proc")


def settings(steps: int, batch_size: int = 8) -> Settings:
    return Settings("digits", ("co3",), 0, batch_size, 0.01, None, steps, "", 60.0)


def run(*arguments: str, command: list[str] = COMMAND) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=180, stdin=subprocess.DEVNULL, check=False
    )


def figures(path: Path, *arguments: str) -> dict[str, Any]:
    """What --json wrote. The command runs in this process, which has imported all that it needs; workers do not."""
    with pytest.raises(SystemExit) as exit_:
        main(["train", *arguments, "--json", str(path)])
    assert exit_.value.code == 0, exit_.value.code
    return json.loads(path.read_text())


@contextlib.contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A run in a session of its own, as a shell starts it; whatever happens, nothing is left of it."""
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell that starts the tests in the background has them ignore Ctrl-C, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def workers_of(process: subprocess.Popen[str]) -> dict[int, int]:
    """Process ids of the workers, by rank."""
    workers = {}
    for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        with contextlib.suppress(OSError):
            environment = Path(f"/proc/{pid}/environ").read_bytes().decode()
            if match := re.search(r"(?:^|\0)RANK=(\d+)", environment):
                workers[int(match[1])] = int(pid)
    return workers


def wait_for(condition: Any, seconds: float = 180) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.05)
    raise AssertionError(f"not within {seconds} seconds: {condition}")


def wait_until_training(process: subprocess.Popen[str], saved: Path) -> dict[int, int]:
    """Wait for the first checkpoint: all workers are in the midst of it then."""
    wait_for(lambda: saved.exists() or process.poll() is not None)
    assert process.poll() is None, process.communicate()
    return workers_of(process)


def gone(pids: dict[int, int]) -> bool:
    return not any(Path(f"/proc/{pid}/cmdline").exists() for pid in pids.values())
