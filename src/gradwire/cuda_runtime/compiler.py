"""CUDA C++ to machine code for the GPU at hand, by NVRTC: the compiler that comes with PyTorch's own libraries.

Nothing is compiled when gradwire is installed, and no CUDA toolkit is asked of the user.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import glob
import hashlib
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path

from gradwire.errors import GradwireError
from gradwire.program_cache import ProgramCache

# No product is fused with a sum: the reference rounds both, and values have to be the same to the bit.
OPTIONS = ("--std=c++17", "--fmad=false", "--device-as-default-execution-space")


class CompilerMissing(GradwireError):
    """NVRTC cannot be found, or is too old for this GPU."""


def compile_to_cubin(source: str, name: str, architecture: str) -> bytes:
    """Return the machine code of a program for an architecture such as "sm_90".

    Compiling takes seconds, so that the result is kept in a folder of the user's cache. If that cannot be written, or
    others can write to it, every process compiles for itself.
    """
    nvrtc = _library()
    key = hashlib.sha256("\0".join([source, architecture, *OPTIONS, str(_version(nvrtc))]).encode()).hexdigest()
    file = f"{Path(name).stem}-{architecture}-{key[:24]}.cubin"
    with contextlib.suppress(OSError):
        kept = ProgramCache("cubin").read(file)
        if kept is not None:
            return kept
    cubin = _compiled(nvrtc, source, name, architecture)
    with contextlib.suppress(OSError):
        ProgramCache("cubin").keep(file, cubin)
    return cubin


def _version(nvrtc: ctypes.CDLL) -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(nvrtc, nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return major.value, minor.value


def _compiled(nvrtc: ctypes.CDLL, source: str, name: str, architecture: str) -> bytes:
    program = ctypes.c_void_p()
    _check(nvrtc, nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), source.encode(), name.encode(), 0, None, None
    ))  # fmt: skip
    try:
        options = [f"--gpu-architecture={architecture}", *OPTIONS]
        texts = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if nvrtc.nvrtcCompileProgram(program, len(options), texts):
            raise CompilerMissing(f"NVRTC does not compile {name} for {architecture}:\n{_log(nvrtc, program)}")
        size = ctypes.c_size_t()
        _check(nvrtc, nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        cubin = ctypes.create_string_buffer(size.value)
        _check(nvrtc, nvrtc.nvrtcGetCUBIN(program, cubin))
        return cubin.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _log(nvrtc: ctypes.CDLL, program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, text)
    return text.value.decode(errors="replace")


def _check(nvrtc: ctypes.CDLL, status: int) -> None:
    if status:
        nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise CompilerMissing(f"NVRTC: {nvrtc.nvrtcGetErrorString(status).decode()}")


@functools.cache
def _library() -> ctypes.CDLL:
    for path in _candidates():
        try:
            library = ctypes.CDLL(path)
        except OSError:
            continue
        if hasattr(library, "nvrtcGetCUBIN"):  # not before CUDA 11.1
            return library
    raise CompilerMissing("NVRTC (libnvrtc.so) is not here: install nvidia-cuda-nvrtc of your PyTorch's CUDA version")


def _candidates() -> Sequence[str]:
    """Return where NVRTC may be: beside PyTorch's own libraries, in a toolkit, or wherever the loader looks."""
    folders = []
    for package in ("nvidia", "torch"):
        found = importlib.util.find_spec(package)
        folders += list(found.submodule_search_locations or []) if found else []
    folders += [folder for folder in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if folder]
    inside = [path for folder in folders for path in _below(Path(folder))]
    return [*inside, "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"]


def _below(folder: Path) -> list[str]:
    patterns = ("*/lib/libnvrtc.so.*", "lib/libnvrtc*.so.*", "lib64/libnvrtc.so*")
    paths = [path for pattern in patterns for path in sorted(glob.glob(str(folder / pattern)), reverse=True)]
    return [path for path in paths if "builtins" not in path]
