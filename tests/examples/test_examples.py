"""Each script in examples/ as two real processes: it trains, saves half-way, and is resumed.

Importing frameworks costs seconds, so that ranks are forked from a process that has done so (support/example_runs.py).
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import example_runs
from support.helpers import free_ports

ROOT = Path(__file__).parents[2]
STEPS, HALF = 6, 3
SECONDS = 240  # that an example may take on a busy machine, imports included
ELSEWHERE = {
    "elastic_training.py": "test_workers_that_come_and_go.py",
    "torchft_training.py": "test_workers_that_come_and_go.py",
    "language_model.py": "test_language_model.py",
}
NEEDS = {
    "ddp.py": (),
    "lightning_ddp.py": ("lightning",),
    "accelerate_ddp.py": ("accelerate",),
    "hf_trainer.py": ("transformers", "accelerate"),
}
LINE = re.compile(r"rank (\d): (\d+) steps, loss (\S+), (\d+) bytes of frames \((\S+) times .* parameters (\w{8})")


@pytest.fixture(scope="module")
def runner() -> Iterator[subprocess.Popen[str]]:
    """The process from which the ranks of all examples are forked."""
    network = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command, pipe = [sys.executable, example_runs.__file__], subprocess.PIPE
    process = subprocess.Popen(
        command, env=os.environ | network, stdin=pipe, stdout=pipe, text=True, start_new_session=True
    )
    yield process
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_twice(runner: subprocess.Popen[str], script: Path, folder: Path) -> list[list[tuple[str, ...]]]:
    """What each rank printed at the end of the first and of the second run."""
    arguments = ["--steps", str(STEPS), "--save-at", str(HALF), "--checkpoint", str(folder / "checkpoint")]
    assert runner.stdin is not None and runner.stdout is not None
    print(script, folder, ",".join(free_ports(2)), *arguments, sep="\t", file=runner.stdin, flush=True)
    ready, _, _ = select.select([runner.stdout], [], [], SECONDS)
    outputs = [(folder / f"output {rank}").read_text() for rank in range(2)]
    assert ready and runner.stdout.readline().split() == ["0", "0"], "\n".join(outputs)
    return [LINE.findall(output) for output in outputs]


@pytest.mark.parametrize("name", NEEDS)
def test_example(name: str, runner: subprocess.Popen[str], tmp_path: Path) -> None:
    for package in NEEDS[name]:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install 'gradwire[{package}]'")
    ranks = run_twice(runner, ROOT / "examples" / name, tmp_path)
    checksums = set()
    for rank, lines in enumerate(ranks):
        assert [(int(line[0]), int(line[1])) for line in lines] == [(rank, STEPS), (rank, STEPS - HALF)]
        for _, steps, loss, frame_bytes, ratio, checksum in lines:
            assert float(loss) > 0
            assert float(ratio) > 6, "co3 sends about three bits an entry"
            assert int(frame_bytes) > 100 * int(steps)
            checksums.add(checksum)
    assert len(checksums) == 1, "replicas are alike, and a resumed run ends where one that was not stopped does"


def test_every_example_is_listed_and_tested() -> None:
    scripts = {path.name for path in (ROOT / "examples").glob("*.py")}
    assert scripts == {*NEEDS, *ELSEWHERE}
    page = (ROOT / "examples" / "README.md").read_text()
    assert all(f"[{name}]({name})" in page for name in scripts)
