"""Launches that always follow each other, as one CUDA graph: the driver starts it for little more than one of them.

The graph is built kernel by kernel rather than captured from a stream, so that it has nothing to do with what other
threads or the user's program capture. Where anything does not work, there is no graph, and kernels are launched.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

from gradwire.cuda_runtime import launcher
from gradwire.cuda_runtime.launcher import Arguments, CudaKernel, Kernel

OLDEST_DRIVER = 12040  # before CUDA 12.4, every kernel of a graph took 64 KiB of the GPU's memory


class Launch(NamedTuple):
    """A kernel and what it is started with."""

    kernel: Kernel
    blocks: int
    threads: int
    arguments: Arguments

    def start(self) -> None:
        """Start it on the current stream."""
        self.kernel(self.blocks, self.threads, self.arguments)


class Graph:
    """Launches that were made one; their arguments are what they were then."""

    def __init__(self, executable: ctypes.c_void_p, device: int):
        self._executable, self._device = executable, device
        self._launch, self._destroy = launcher.driver().cuGraphLaunch, launcher.driver().cuGraphExecDestroy

    def start(self) -> bool:
        """Start them on the current stream of their device; False says that nothing was started."""
        return not self._launch(self._executable, launcher.stream_of(self._device))

    def __del__(self) -> None:
        """Free it; the driver waits with that until it is over."""
        self._destroy(self._executable)


def graph_of(launches: Sequence[Launch]) -> Graph | None:
    """Return these launches, one behind the other, as a graph; None if they are no GPU's, or there is none of it."""
    kernels = [launch.kernel for launch in launches if isinstance(launch.kernel, CudaKernel)]
    if not kernels or len(kernels) < len(launches) or not _can_build():
        return None
    driver, graph, executable = launcher.driver(), ctypes.c_void_p(), ctypes.c_void_p()
    if driver.cuGraphCreate(ctypes.byref(graph), 0):
        return None
    try:
        if not _add_all(driver, graph, kernels, launches):
            return None
        if driver.cuGraphInstantiateWithFlags(ctypes.byref(executable), graph, ctypes.c_ulonglong(0)):
            return None
    finally:
        driver.cuGraphDestroy(graph)
    return Graph(executable, kernels[0].device_index)


class _KernelNode(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2 of cuda.h."""

    _fields_ = (
        ("function", ctypes.c_void_p), ("blocks", ctypes.c_uint * 3), ("threads", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint), ("arguments", ctypes.c_void_p), ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p), ("context", ctypes.c_void_p),
    )  # fmt: skip


def _can_build() -> bool:
    version = ctypes.c_int()
    return not launcher.driver().cuDriverGetVersion(ctypes.byref(version)) and version.value >= OLDEST_DRIVER


def _add_all(
    driver: ctypes.CDLL, graph: ctypes.c_void_p, kernels: Sequence[CudaKernel], launches: Sequence[Launch]
) -> bool:
    """Add a node for each kernel, behind the one before, and tell whether that has worked."""
    before: ctypes.c_void_p | None = None
    for kernel, (_, blocks, threads, arguments) in zip(kernels, launches, strict=True):
        what = _KernelNode(
            kernel.function, (blocks, 1, 1), (threads, 1, 1), 0, ctypes.addressof(arguments.array), None, None, None
        )
        node, after = ctypes.c_void_p(), None if before is None else ctypes.byref(before)
        if driver.cuGraphAddKernelNode_v2(
            ctypes.byref(node), graph, after, ctypes.c_size_t(before is not None), ctypes.byref(what)
        ):
            return False
        before = node
    return True
