"""The examples in which a worker is killed: by torchrun's restarts, and by torchft without any."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
CHECKSUM = re.compile(r"checksum of the parameters (\w{8})")
QUIET = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "RUST_LOG": "off"}
SECONDS = 400  # on a busy machine


def output_of(*command: str) -> str:
    result = subprocess.run(
        [sys.executable, *command], check=False, capture_output=True, text=True, timeout=SECONDS, env=os.environ | QUIET
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return result.stdout


@pytest.mark.thorough
def test_torchrun_starts_workers_again_which_go_on_with_all_memories(tmp_path):
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "5")
    script, ends = str(EXAMPLES / "elastic_training.py"), []
    for name, die_at in (("undisturbed", "-1"), ("killed", "25")):
        output = output_of(*torchrun, script, "--checkpoint", str(tmp_path / f"{name}.pt"), "--die-at", die_at)
        ends.append(CHECKSUM.findall(output))
    assert len(ends[0]) == 2 and len({*ends[0], *ends[1]}) == 1  # the same bits on both ranks, killed or not
    assert re.search(r"step 20 to 40 after [1-9] restarts", output)


@pytest.mark.thorough
def test_a_replica_of_torchft_is_killed_and_comes_back():
    pytest.importorskip("torchft", reason="torchft is not installed")
    output = output_of(str(EXAMPLES / "torchft_training.py"))
    assert "replica 2: killed at step 100" in output
    checksums = CHECKSUM.findall(output)
    assert len(checksums) == 3 and len(set(checksums)) == 1, output
