"""The distributed tests with several versions of torch, each in an environment of its own.

    python scripts/torch_matrix.py            # the oldest that is declared, the one in constraints.txt, the newest
    python scripts/torch_matrix.py --torch 2.8.0 2.13.0 --tests tests/fsdp
    python scripts/torch_matrix.py --torch newest --demo

It makes the environments under build/torch/, with everything that tests need, and keeps them for the next time. torch
from PyPI comes with CUDA: some six gigabytes for each version; `--index-url https://download.pytorch.org/whl/cpu` takes
builds for CPUs. One table is printed at the end: what passed, failed and was skipped, and how long it took. `--demo`
runs `gradwire train` in place of tests. The exit status is 1 if anything failed.

Failures with one version alone most often come from a private name of torch that has changed: tests/torch_internals
says which one.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = ["tests/torch_internals", "tests/distributed", "tests/fsdp", "tests/local_sgd", "tests/checkpoints",
         "tests/faults", "tests/correct", "tests/backward"]  # fmt: skip
DEMO = ["-m", "gradwire.cli", "train", "--task", "digits", "--workers", "2", "--codec", "none", "--codec", "co3"]
OUTCOME = re.compile(r"(\d+) (passed|failed|skipped|error)")


@dataclass
class Result:
    """What one file of tests, or the demo, came to."""

    name: str
    counts: dict[str, int]
    seconds: float

    @property
    def good(self) -> bool:
        return not any(self.counts.get(kind) for kind in ("failed", "error"))


def declared() -> list[str]:
    """The oldest version that pyproject.toml allows, the one that the project is developed with, and the newest."""
    oldest = re.search(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    own = re.search(r"^torch==([\d.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert oldest and own
    return [f"{oldest[1]}.0", own[1], "newest"]


def environment(version: str, folder: Path, index: str | None) -> Path:
    """An environment with this torch, gradwire as it is now and what its tests need; returns its Python."""
    home = folder / version
    python = home / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    in_place = ["--no-build-isolation", "-C", f"build-dir={home}/build", "-e"]
    if (home / "ready").exists():
        subprocess.run([*pip, "--no-deps", *in_place, str(ROOT)], check=True)  # builds what has changed
    else:
        venv.create(home, with_pip=True)
        torch = "torch" if version == "newest" else f"torch=={version}"
        subprocess.run([*pip, *(["--index-url", index] if index else []), torch], check=True)
        subprocess.run([*pip, "scikit-build-core", "nanobind", "cmake", "ninja"], check=True)
        # As pip has it: torch says 2.8.0+cu128 of itself where the installed version is 2.8.0.
        version_of_pip = "import importlib.metadata; print(importlib.metadata.version('torch'))"
        found = subprocess.run([str(python), "-c", version_of_pip], check=True, capture_output=True, text=True)
        exact = home / "constraints.txt"  # what else is installed has to take this torch
        exact.write_text(f"torch=={found.stdout.strip()}\n")
        subprocess.run([*pip, "-c", str(exact), *in_place, f"{ROOT}[test]"], check=True)
        (home / "ready").touch()
    return python


def run(python: Path, name: str, arguments: list[str], seconds: float) -> Result:
    """Run one command; a file that does not end in time counts as one failure."""
    begun = time.monotonic()
    process = subprocess.Popen(
        [str(python), *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        output, _ = process.communicate()
        output += f"\nFAILED {name}: did not end within {seconds:g} seconds\n"
        return _finished(Result(name, {"failed": 1}, time.monotonic() - begun), output)
    last = output.strip().splitlines()[-1:] or [""]
    counts = {kind: int(count) for count, kind in OUTCOME.findall(last[0])}
    if process.returncode not in (0, 5) and not any(counts.get(kind) for kind in ("failed", "error")):
        counts["failed"] = 1  # it crashed, or the demo failed
    elif not counts and process.returncode == 0:
        counts["passed"] = 1
    return _finished(Result(name, counts, time.monotonic() - begun), output)


def _finished(result: Result, output: str) -> Result:
    print(f"  {result.name}: {result.counts} in {result.seconds:.0f} s", flush=True)
    for line in output.splitlines() if not result.good else []:
        if line.startswith(("FAILED", "ERROR", "E  ")):
            print(f"    {line}", flush=True)
    return result


def files(tests: list[str]) -> list[str]:
    """Every file of tests in these folders and files."""
    found = []
    for path in (ROOT / name for name in tests):
        found += [str(p.relative_to(ROOT)) for p in (sorted(path.glob("test_*.py")) if path.is_dir() else [path])]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", nargs="+", default=declared(), help="versions, such as 2.13.0, or `newest`")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="folders or files of tests")
    parser.add_argument("--demo", action="store_true", help="run `gradwire train` in place of tests")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "torch", help="where environments are kept")
    parser.add_argument("--index-url", help="from where torch is installed")
    parser.add_argument("--seconds", type=float, default=900, help="after which a file of tests has failed")
    options = parser.parse_args()
    results: dict[str, list[Result]] = {}
    for version in options.torch:
        python = environment(version, options.folder.resolve(), options.index_url)
        print(f"torch {version}", flush=True)
        if options.demo:
            commands = {"gradwire train": DEMO}
        else:
            commands = {file: ["-m", "pytest", "-p", "no:cacheprovider", file] for file in files(options.tests)}
        results[version] = [run(python, name, command, options.seconds) for name, command in commands.items()]
    print("\n| torch | passed | failed | skipped | seconds |\n|---|---|---|---|---|")
    for version, of_version in results.items():
        sums = [sum(r.counts.get(kind, 0) for r in of_version) for kind in ("passed", "failed", "error", "skipped")]
        seconds = sum(r.seconds for r in of_version)
        print(f"| {version} | {sums[0]} | {sums[1] + sums[2]} | {sums[3]} | {seconds:.0f} |")
    return int(not all(result.good for of_version in results.values() for result in of_version))


if __name__ == "__main__":
    sys.exit(main())
