"""The CUDA C++ of gradwire, compiled by the C++ compiler and run on the CPU with fibers for threads.

`CudaOnCpu` takes the place of the CUDA driver (`programs.use_backend`). Everything above the kernels is then the same
as on a GPU, with tensors in the host's memory.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from gradwire.cuda_runtime import programs
from gradwire.cuda_runtime.launcher import Arguments

_KERNEL = re.compile(r'extern "C" __global__ void (?:__launch_bounds__\([^)]*\) )?(\w+)\(([^)]*)\)')
_HEADER = Path(__file__).with_name("cuda_on_cpu.h")
_FLAGS = ["-std=c++17", "-O2", "-ffp-contract=off", "-fno-strict-aliasing", "-fPIC", "-shared", "-w"]


class CudaOnCpu:
    """A backend of `gradwire.cuda_runtime.launcher` without a GPU."""

    def load(self, source: str, name: str, device: torch.device) -> ctypes.CDLL:
        """Compile the source, unless it has been before."""
        code = f'#include "{_HEADER}"\n' + source + "".join(map(_starter, _KERNEL.findall(source)))
        digest = hashlib.sha256((code + _HEADER.read_text() + " ".join(_FLAGS)).encode()).hexdigest()[:16]
        folder = Path(tempfile.gettempdir()) / f"gradwire-cuda-on-cpu-{os.getuid()}"
        library = folder / f"{Path(name).stem}-{digest}.so"
        if not library.exists():
            folder.mkdir(exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                built = Path(scratch) / "built.so"
                (Path(scratch) / "code.cpp").write_text(code)
                compiler = shutil.which("g++") or shutil.which("c++") or "c++"
                subprocess.run([compiler, *_FLAGS, f"{scratch}/code.cpp", "-o", str(built)], check=True)
                built.replace(library)
        return ctypes.CDLL(str(library))

    def kernel(self, program: ctypes.CDLL, name: str, device: torch.device) -> Any:
        """Return a kernel of a compiled program."""
        start = getattr(program, f"start_{name}")

        def launch(blocks: int, threads: int, arguments: Arguments) -> None:
            start(ctypes.c_uint(blocks), ctypes.c_uint(threads), arguments.array)

        return launch


def _starter(kernel: tuple[str, str]) -> str:
    """Return a function that starts a kernel with an array of pointers to its arguments, as the driver does."""
    name, parameters = kernel
    types = [re.sub(r"\s*\b\w+$", "", p.strip()) for p in parameters.split(",") if p.strip()]
    arguments = ", ".join(f"*static_cast<{t.replace('__restrict__', '')}*>(a[{i}])" for i, t in enumerate(types))
    return (
        f'\nextern "C" void start_{name}(unsigned blocks, unsigned threads, void** a) '
        f"{{ on_cpu::launch(blocks, threads, [=] {{ {name}({arguments}); }}); }}\n"
    )


@contextmanager
def cuda_on_cpu() -> Iterator[None]:
    """Within the context, programs for GPUs run on the CPU, with tensors in the host's memory."""
    before = programs.use_backend(CudaOnCpu())
    try:
        yield
    finally:
        programs.use_backend(before)
