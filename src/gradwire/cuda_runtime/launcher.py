"""Kernels of a compiled program, and their launches, by the CUDA driver that every GPU machine has.

A kernel is started with the bytes of its arguments already laid out (`Arguments`), so that a launch costs a few
microseconds of Python. Tests put another `Backend` in the place of the driver, which runs the same sources on the CPU.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, Protocol

import torch

from gradwire.cuda_runtime import compiler
from gradwire.errors import GradwireError
from gradwire.torch_internals.streams import current_stream


class Arguments:
    """The arguments of a kernel: pointers (tensors) and ints, laid out once and used for any number of launches."""

    def __init__(self, *values: torch.Tensor | int | None):
        # Pointers and numbers alike have eight bytes in all kernels here.
        self._values = [ctypes.c_int64(v.data_ptr() if isinstance(v, torch.Tensor) else v or 0) for v in values]
        self.array = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in self._values))


class Kernel(Protocol):
    """A function that runs on the GPU."""

    def __call__(self, blocks: int, threads: int, arguments: Arguments) -> None:
        """Start it on the current stream of the device that the program was loaded for."""


class Backend(Protocol):
    """Makes kernels of sources."""

    def load(self, source: str, name: str, device: torch.device) -> Any:
        """Return the program of a source for a device."""

    def kernel(self, program: Any, name: str, device: torch.device) -> Kernel:
        """Return one kernel of the program."""


class CudaDriver:
    """The backend of real GPUs."""

    def load(self, source: str, name: str, device: torch.device) -> ctypes.c_void_p:
        """Compile the source for the device and load it into the context that PyTorch uses."""
        major, minor = torch.cuda.get_device_capability(device)
        cubin = compiler.compile_to_cubin(source, name, f"sm_{major}{minor}")
        module = ctypes.c_void_p()
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # so that the context exists
            _check(driver().cuModuleLoadData(ctypes.byref(module), cubin), f"loading {name}")
        return module

    def kernel(self, program: ctypes.c_void_p, name: str, device: torch.device) -> Kernel:
        """Return a kernel of a loaded module."""
        function = ctypes.c_void_p()
        _check(driver().cuModuleGetFunction(ctypes.byref(function), program, name.encode()), f"finding {name}")
        return CudaKernel(function, name, device)


class CudaKernel:
    """A kernel of a real GPU."""

    def __init__(self, function: ctypes.c_void_p, name: str, device: torch.device):
        self.function, self.name = function, name
        self.device_index = torch.cuda.current_device() if device.index is None else device.index
        self._launch = driver().cuLaunchKernel

    def __call__(self, blocks: int, threads: int, arguments: Arguments) -> None:
        """Start it on the current stream of its device."""
        if blocks:
            stream = stream_of(self.device_index)
            status = self._launch(self.function, blocks, 1, 1, threads, 1, 1, 0, stream, arguments.array, None)
            if status:
                _check(status, f"launching {self.name}")


def stream_of(device: int) -> ctypes.c_void_p:
    """Return the current stream of a GPU as the driver takes it."""
    return ctypes.c_void_p(current_stream(device))


@functools.cache
def driver() -> ctypes.CDLL:
    """Return the driver's library."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise GradwireError(f"the CUDA driver cannot be loaded: {error}") from error


def _check(status: int, what: str) -> None:
    if status:
        text = ctypes.c_char_p()
        driver().cuGetErrorString(status, ctypes.byref(text))
        raise GradwireError(f"CUDA error {status} ({(text.value or b'unknown').decode()}) in {what}")
