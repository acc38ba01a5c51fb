"""The example of a language model: an exchange in every step, and delayed in parts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "language_model.py"
SMALL = ("--steps", "8", "--width", "32", "--layers", "1", "--context", "32")
SECONDS = 400  # on a busy machine


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("options", "most_bits"),
    [((), 10), (("--every", "4", "--spec", "ecq:rate=2", "--parts", "2", "--overlap", "1", "--mix", "0.5"), 2)],
    ids=["every_step", "delayed"],
)
def test_all_workers_end_with_the_same_model(options: tuple[str, ...], most_bits: float) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(SCRIPT), *SMALL, *options]
    quiet = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=SECONDS, env=os.environ | quiet
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    checksums = re.findall(r"checksum of the parameters (\w{8})", ended.stdout)
    assert len(checksums) == 2 and len(set(checksums)) == 1
    assert "step 8 of 8" in ended.stdout
    [row] = re.findall(r"^(?:adam|ecq:rate=2) .*$", ended.stdout, re.MULTILINE)
    loss, bits, _ = map(float, row.split()[-3:])
    assert 0 < loss < 6 and 0 < bits < most_bits
