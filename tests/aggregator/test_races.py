"""The aggregator's native code under ThreadSanitizer, as `make sanitize` runs it; kernels have tests of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPILER = os.environ.get("CXX", "g++")


def has_sanitizer() -> bool:
    if sys.platform != "linux" or not shutil.which(COMPILER):
        return False
    library = subprocess.run([COMPILER, "-print-file-name=libtsan.so"], capture_output=True, text=True, check=False)
    return Path(library.stdout.strip()).is_absolute()


@pytest.mark.thorough
@pytest.mark.skipif(not has_sanitizer(), reason="needs Linux, and a compiler with ThreadSanitizer")
def test_engine_and_workers_share_nothing_unguarded() -> None:
    command = ["bash", str(ROOT / "scripts" / "sanitize.sh"), "aggregator"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 wrong" in done.stdout
    assert "nothing found" in done.stdout
