"""The Triton kernels of rows against the reference, under Triton's interpreter: no GPU is needed.

The interpreter must be switched on before anything imports Triton, and would then be on for all of this process. So
the checks (triton_rows.py) run in one of their own.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKS = Path(__file__).parent / "triton_rows.py"


@pytest.mark.thorough
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed: pip install triton")
def test_triton_kernels_equal_the_reference():
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:xdist", "-p", "no:cacheprovider", str(CHECKS)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        command, check=False, env=environment, cwd=CHECKS.parent.parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
