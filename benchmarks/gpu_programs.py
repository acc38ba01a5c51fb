"""Compiles all programs for the GPU at hand, several at a time, so that benchmarks need not wait for each.

python benchmarks/gpu_programs.py
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from importlib import resources

from gradwire.cuda_runtime import compiler, programs


def names() -> list[str]:
    """Return the names of all programs."""
    folders = [resources.files("gradwire").joinpath(folder) for folder in programs.SOURCES]
    return sorted(file.name[:-3] for folder in folders for file in folder.iterdir() if file.name.endswith(".cu"))


def start_compiling(architecture: str) -> list[subprocess.Popen[bytes]]:
    """Start processes that compile all programs; what they make is kept in gradwire's cache."""
    workers = min(len(names()), os.cpu_count() or 1)
    return [
        subprocess.Popen([sys.executable, __file__, architecture, *names()[first::workers]]) for first in range(workers)
    ]


def architecture() -> str:
    """Return what NVRTC calls the GPU at hand."""
    import torch

    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


def main() -> None:
    if len(sys.argv) > 2:
        for name in sys.argv[2:]:
            compiler.compile_to_cubin(programs.source_of(name), f"{name}.cu", sys.argv[1])
        return
    start = time.time()
    failed = [process.args for process in start_compiling(architecture()) if process.wait()]
    sys.exit(f"not compiled: {failed}") if failed else print(f"{len(names())} programs in {time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
