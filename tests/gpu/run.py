"""Runs the tests of this folder without pytest, which a machine with a GPU may not have: python tests/gpu/run.py

Every function named test_* in a file named test_*.py is called without arguments. So tests here need nothing but torch,
numpy and gradwire, and no fixtures. The exit status says whether any has failed.
"""

from __future__ import annotations

import importlib
import sys
import time
import traceback
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def main() -> int:
    failed = 0
    for path in sorted(FOLDER.glob("test_*.py")):
        try:
            tests = {
                name: t for name, t in vars(importlib.import_module(path.stem)).items() if name.startswith("test_")
            }
        except Exception:
            failed += 1
            print(f"FAIL {path.name}, which cannot be imported\n{traceback.format_exc()}", flush=True)
            continue
        for name, test in tests.items():
            start = time.perf_counter()
            try:
                test()
            except Exception:
                failed += 1
                print(f"FAIL {path.name} {name}\n{traceback.format_exc()}", flush=True)
            else:
                print(f"PASS {path.name} {name} ({time.perf_counter() - start:.1f} s)", flush=True)
    return min(failed, 1)


if __name__ == "__main__":  # ranks that a test starts import this file, too
    sys.path[:0] = [str(FOLDER), str(FOLDER.parent), str(FOLDER.parents[1] / "src")]
    sys.exit(main())
