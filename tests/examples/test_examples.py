"""Each script in examples/ as two real processes: it trains, saves half-way, and is resumed.

Starting processes and importing frameworks costs seconds, so that both runs happen in the same two processes.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.helpers import free_ports

ROOT = Path(__file__).parents[2]
STEPS, HALF = 6, 3
NEEDS = {
    "ddp.py": (),
    "lightning_ddp.py": ("lightning",),
    "accelerate_ddp.py": ("accelerate",),
    "hf_trainer.py": ("transformers", "accelerate"),
}
TWICE = """
import os, runpy, sys
script, ports, arguments = sys.argv[1], sys.argv[2].split(","), sys.argv[3:]
for port, more in zip(ports, ([], ["--resume"])):
    os.environ["MASTER_PORT"] = port
    sys.argv = [script, *arguments, *more]
    runpy.run_path(script, run_name="__main__")
    if "accelerate" in sys.modules:  # which is made for one run in a process
        sys.modules["accelerate"].state.AcceleratorState._reset_state(reset_partial_state=True)
"""
LINE = re.compile(r"rank (\d): (\d+) steps, loss (\S+), (\d+) bytes of frames \((\S+) times .* parameters (\w{8})")


def run_twice(script: Path, folder: Path, seconds: float) -> list[list[tuple[str, ...]]]:
    """What each rank printed at the end of the first and of the second run."""
    arguments = ["--steps", str(STEPS), "--save-at", str(HALF), "--checkpoint", str(folder / "checkpoint")]
    command = [sys.executable, "-c", TWICE, str(script), ",".join(free_ports(2)), *arguments]
    network = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    processes = []
    for rank in range(2):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        with (folder / f"output {rank}").open("w") as output:
            environment = {**os.environ, **network, **place}
            processes.append(
                subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT)
            )
    try:
        for process in processes:
            process.wait(seconds)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    outputs = [(folder / f"output {rank}").read_text() for rank in range(2)]
    assert all(process.returncode == 0 for process in processes), "\n".join(outputs)
    return [LINE.findall(output) for output in outputs]


@pytest.mark.parametrize("name", NEEDS)
def test_example(name: str, tmp_path: Path) -> None:
    for package in NEEDS[name]:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install 'gradwire[{package}]'")
    ranks = run_twice(ROOT / "examples" / name, tmp_path, seconds=240)
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
    assert scripts == set(NEEDS)
    page = (ROOT / "examples" / "README.md").read_text()
    assert all(f"[{name}]({name})" in page for name in scripts)
