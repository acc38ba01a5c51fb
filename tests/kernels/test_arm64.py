"""The kernels on arm64: what the portable ones do here, the portable and the NEON ones must do there, byte for byte.

There is no Python for arm64 on a machine that tests: calls of the native module are recorded (support/native_cases.py),
and a program of the same bindings and kernels, cross-compiled, makes them again under qemu (tests/native_arm64). Calls
are those of golden frames, of encoding and decoding with all recipes, and of the corners in which vector code goes
wrong (support/kernel_calls.py). It says nothing of speed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from support.helpers import native
from support.kernel_calls import (
    call_corners,
    call_with_all_recipes,
    call_with_golden_frames,
    call_with_large_tensors,
    call_with_shapes,
)

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which("aarch64-linux-gnu-g++")
EMULATOR = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
pytestmark = [
    pytest.mark.skipif(native is None, reason="no native module (test_coders says so, if that is wrong)"),
    pytest.mark.skipif(not COMPILER, reason="needs aarch64-linux-gnu-g++ (Debian: g++-aarch64-linux-gnu)"),
    pytest.mark.skipif(not EMULATOR, reason="needs qemu-aarch64 (Debian: qemu-user)"),
]
NOT_KERNELS = ("aggregator", "bindings_aggregator", "datagrams", "packets", "socket_addresses")


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program, of the sources and with the options of the module."""
    folder = tmp_path_factory.mktemp("arm64")
    build = (ROOT / "CMakeLists.txt").read_text()
    [options] = re.findall(r"^target_compile_options\(_native PRIVATE ((?:-[\w=-]+ ?)+)\)", build, re.M)
    assert "-ffp-contract=off" in options  # gcc would fuse, since arm64 has the instruction
    sources = [
        source
        for source in sorted((ROOT / "native").glob("*.cpp"), key=lambda path: -path.stat().st_size)
        if not source.stem.startswith(NOT_KERNELS) and not source.stem.endswith(("_avx2", "_avx512"))
    ]

    def compiled(source: Path) -> Path:
        target = folder / f"{source.stem}.o"
        folders = [f"-I{ROOT / 'tests/native_arm64'}", f"-I{ROOT / 'native'}"]
        # What is no kernel is compiled in half the time with -O1.
        level = "-O1" if source.stem.startswith(("bindings", "driver")) else "-O3"
        flags = "-std=c++17", *options.split(), level, "-Werror"
        run(str(COMPILER), *flags, *folders, "-c", str(source), "-o", str(target))
        return target

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        objects = list(threads.map(compiled, [*sources, ROOT / "tests/native_arm64/driver.cpp"]))
    run(str(COMPILER), "-static", "-pthread", *map(str, objects), "-o", str(folder / "driver"))
    return folder / "driver"


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.returncode, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout


def check(driver: Path, cases: Any, path: Path) -> None:
    """Make the calls again, on arm64."""
    cases.write(path)
    output = run(str(EMULATOR), str(driver), str(path))
    assert output.split("\n") == [f"{name}: {len(cases.encoded)} cases" for name in ("portable", "neon")] + [""]


def test_kernels_do_the_same_as_here(driver: Path, tmp_path: Path) -> None:
    from support.native_cases import kernel_functions, recorded

    with recorded() as cases:
        call_with_golden_frames()
        call_with_all_recipes([1, 63, 65, 700, 3001])
        call_with_shapes()
        call_with_large_tensors()
        call_corners(0, 150)
    missing = kernel_functions() - cases.functions
    assert not missing, f"nobody calls {sorted(missing)}"
    check(driver, cases, tmp_path / "cases")


@pytest.mark.thorough
def test_more_corners(driver: Path, tmp_path: Path) -> None:
    from support.native_cases import recorded

    with recorded() as cases:
        call_with_all_recipes([70_002])
        call_corners(1, 600)
    check(driver, cases, tmp_path / "cases")
