"""Programs in CUDA C++, each loaded once for each device, and whether a device can run them at all.

A program is a file of one of the folders in `SOURCES`; it includes headers of its own folder, or of any other.
"""

from __future__ import annotations

import functools
import re
import warnings
from importlib import resources

import torch

from gradwire.cuda_runtime.graphs import Graph, Launch, graph_of
from gradwire.cuda_runtime.launcher import Arguments, Backend, CudaDriver, Kernel
from gradwire.errors import GradwireError

# Where sources are, in the package; no file's name is in two of them.
SOURCES = ("cuda_runtime/sources", "kernels/cuda/sources", "gpu/sources")
OLDEST = (7, 0)  # compute capability: lanes of a warp that vote by mask came with Volta
_INCLUDE = re.compile(r'^#include "(\w+\.h)"$', re.MULTILINE)
_backend: Backend = CudaDriver()


def use_backend(backend: Backend) -> Backend:
    """Run all programs by another backend from now on, and return the one before; for tests."""
    global _backend
    before, _backend = _backend, backend
    kernel.cache_clear()
    _program.cache_clear()
    can_run.cache_clear()
    return before


@functools.cache
def kernel(program: str, name: str, device: torch.device) -> Kernel:
    """Return a kernel of the program <program>.cu."""
    return _backend.kernel(_program(program, device), name, device)


class Launches:
    """Kernels that are started one after the other on one device, every time with the same blocks and arguments."""

    def __init__(self, device: torch.device):
        self.device = device
        self._planned: list[Launch] = []
        self._graph: Graph | None = None
        self._may_be_one = True  # whether there may be a graph

    def add(self, program: str, name: str, blocks: int, threads: int, arguments: Arguments) -> None:
        """Let a kernel of <program>.cu come behind the others; before the first `start`."""
        if blocks:
            self._planned.append(Launch(kernel(program, name, self.device), blocks, threads, arguments))

    def extend(self, others: Launches) -> None:
        """Let all of those come behind the others; before the first `start`."""
        self._planned += others._planned

    def start(self) -> None:
        """Start all of them on the current stream of the device; as one graph, but for the first time."""
        if self._graph is not None and self._graph.start():
            return
        for launch in self._planned:
            launch.start()
        self._graph, self._may_be_one = graph_of(self._planned) if self._may_be_one else None, False


@functools.cache
def _program(name: str, device: torch.device) -> object:
    return _backend.load(source_of(name), f"{name}.cu", device)


def source_of(program: str) -> str:
    """Return the source of a program, with what it includes in place of the includes."""
    seen = set()

    def text_of(file: str) -> str:
        if file in seen:
            return ""
        seen.add(file)
        return _INCLUDE.sub(lambda match: text_of(match[1]), _text(file))

    return text_of(f"{program}.cu")


def _text(file: str) -> str:
    package = resources.files("gradwire")
    found = (package.joinpath(folder, file) for folder in SOURCES)
    for path in found:
        if path.is_file():
            return path.read_text()
    raise GradwireError(f"{file} is missing from gradwire's sources for GPUs: install gradwire again")


@functools.cache
def can_run(device: torch.device) -> bool:
    """Tell whether this device can run the programs; if a GPU cannot, one warning says why."""
    if not isinstance(_backend, CudaDriver):
        return True
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    try:
        capability = torch.cuda.get_device_capability(device)
        if capability < OLDEST:
            raise GradwireError(f"compute capability {capability[0]}.{capability[1]} is older than 7.0")
        kernel("probe", "probe", device)
    except (GradwireError, OSError, RuntimeError) as error:  # torch raises RuntimeError where CUDA does not work
        warnings.warn(
            f"gradwire codes gradients of {device} on the CPU, which is slower: {error}", RuntimeWarning, stacklevel=2
        )
        return False
    return True
