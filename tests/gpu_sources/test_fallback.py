"""GPUs whose programs cannot be compiled or loaded: one warning, and the host does the work."""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.cuda_runtime import compiler, launcher, programs
from gradwire.cuda_runtime.compiler import CompilerMissing
from gradwire.cuda_runtime.launcher import CudaDriver
from gradwire.errors import GradwireError
from gradwire.gpu.encoder import can_encode
from support.cuda_on_cpu import cuda_on_cpu
from support.ranks import Net, digest, loss_of

GPU = torch.device("cuda:0")
Patch = pytest.MonkeyPatch


class FakeNvrtc:
    """Compiles whatever it is given to the same bytes, unless the source says otherwise."""

    def __init__(self) -> None:
        self.compiled, self.version, self.cubin = 0, (12, 8), b"\x7fELF cubin"
        self.source, self.options, self.alive = b"", [], 0  # type: ignore[var-annotated]

    def nvrtcVersion(self, major: Any, minor: Any) -> int:
        major._obj.value, minor._obj.value = self.version
        return 0

    def nvrtcCreateProgram(self, program: Any, source: bytes, name: bytes, *headers: object) -> int:
        self.source = source
        self.alive += 1
        return 0

    def nvrtcCompileProgram(self, program: Any, count: int, options: Any) -> int:
        self.compiled += 1
        self.options = [options[i] for i in range(count)]
        return 6 if b"error" in self.source else 0

    def nvrtcGetCUBINSize(self, program: Any, size: Any) -> int:
        size._obj.value = len(self.cubin)
        return 0

    def nvrtcGetCUBIN(self, program: Any, out: Any) -> int:
        ctypes.memmove(out, self.cubin, len(self.cubin))
        return 0

    def nvrtcGetProgramLogSize(self, program: Any, size: Any) -> int:
        size._obj.value = len(b"line 7: what?") + 1
        return 0

    def nvrtcGetProgramLog(self, program: Any, out: Any) -> int:
        ctypes.memmove(out, b"line 7: what?\0", 14)
        return 0

    def nvrtcDestroyProgram(self, program: Any) -> int:
        self.alive -= 1
        return 0


@pytest.fixture
def nvrtc(monkeypatch: Patch, tmp_path: Path) -> FakeNvrtc:
    fake = FakeNvrtc()
    monkeypatch.setattr(compiler, "_library", lambda: fake)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return fake


# ── the compiler and its cache ────────────────────────────────────────────────────────────────────


def test_what_was_compiled_is_kept(nvrtc: FakeNvrtc, tmp_path: Path) -> None:
    for _ in range(3):
        assert compiler.compile_to_cubin("a source", "probe.cu", "sm_90") == nvrtc.cubin
    assert nvrtc.compiled == 1 and nvrtc.alive == 0
    assert nvrtc.options == [b"--gpu-architecture=sm_90", *(option.encode() for option in compiler.OPTIONS)]
    [kept] = (tmp_path / "cache" / "gradwire" / "cubin").iterdir()
    assert kept.read_bytes() == nvrtc.cubin and kept.name.startswith("probe-sm_90-")


@pytest.mark.parametrize("what", ["source", "architecture", "version"])
def test_another_program_is_compiled_anew(nvrtc: FakeNvrtc, what: str) -> None:
    compiler.compile_to_cubin("a source", "probe.cu", "sm_90")
    nvrtc.cubin = b"another one"
    if what == "version":
        nvrtc.version = (13, 0)
    source, architecture = "source" if what == "source" else "a source", "sm_80" if what == "architecture" else "sm_90"
    assert compiler.compile_to_cubin(source, "probe.cu", architecture) == b"another one"
    assert nvrtc.compiled == 2


@pytest.mark.parametrize("obstacle", ["a file", "an unwritable folder", "no home", "a full disk", "others"])
def test_programs_are_compiled_without_a_cache(
    nvrtc: FakeNvrtc, monkeypatch: Patch, tmp_path: Path, obstacle: str
) -> None:
    place = tmp_path / "cache"
    if obstacle == "a file":
        place.write_text("in the way")
    elif obstacle == "an unwritable folder":
        place.mkdir(mode=0o500)  # root may write there all the same
    elif obstacle == "no home":
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", _raising(RuntimeError("Could not determine home directory.")))
    elif obstacle == "others":
        (place / "gradwire" / "cubin").mkdir(parents=True)
        (place / "gradwire" / "cubin").chmod(0o777)
    else:
        monkeypatch.setattr(os, "replace", _raising(OSError(28, "No space left on device")))
    for _ in range(2):
        assert compiler.compile_to_cubin("a source", "probe.cu", "sm_90") == nvrtc.cubin
    assert nvrtc.compiled == 2 or obstacle == "an unwritable folder"


def test_errors_of_the_compiler_are_told(nvrtc: FakeNvrtc) -> None:
    with pytest.raises(CompilerMissing, match=r"does not compile probe.cu for sm_90:\nline 7: what\?"):
        compiler.compile_to_cubin("an error", "probe.cu", "sm_90")
    assert nvrtc.alive == 0


def test_a_library_that_is_too_old_is_passed_over(monkeypatch: Patch) -> None:
    old, new = object(), FakeNvrtc()
    libraries = {"old": old, "new": new}
    monkeypatch.setattr(compiler, "_candidates", lambda: ["missing", *libraries])

    def load(path: str) -> object:
        if path not in libraries:
            raise OSError(path)
        return libraries[path]

    monkeypatch.setattr(compiler.ctypes, "CDLL", load)
    assert compiler._library.__wrapped__() is new
    del libraries["new"]
    with pytest.raises(CompilerMissing, match="nvidia-cuda-nvrtc"):
        compiler._library.__wrapped__()


# ── GPUs that cannot run the programs ─────────────────────────────────────────────────────────────


def _raising(error: Exception) -> Callable[..., Any]:
    def fail(*arguments: object, **named: object) -> Any:
        raise error

    return fail


def without_nvrtc(monkeypatch: Patch) -> str:
    monkeypatch.setattr(compiler, "_library", _raising(CompilerMissing("NVRTC is not here")))
    return "NVRTC is not here"


def with_an_old_gpu(monkeypatch: Patch) -> str:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (6, 1))
    return "compute capability 6.1 is older than 7.0"


def with_an_unknown_gpu(monkeypatch: Patch) -> str:
    monkeypatch.setattr(FakeNvrtc, "nvrtcCompileProgram", lambda *arguments: 5)
    return "NVRTC does not compile probe.cu for sm_90"


def without_a_driver(monkeypatch: Patch) -> str:
    monkeypatch.setattr(launcher, "driver", _raising(GradwireError("the CUDA driver cannot be loaded")))
    return "the CUDA driver cannot be loaded"


def without_cuda(monkeypatch: Patch) -> str:
    monkeypatch.setattr(torch.cuda, "get_device_capability", _raising(RuntimeError("Found no NVIDIA driver")))
    return "Found no NVIDIA driver"


OBSTACLES = [without_nvrtc, with_an_old_gpu, with_an_unknown_gpu, without_a_driver, without_cuda]


@pytest.fixture
def _pretended_gpu(nvrtc: FakeNvrtc, monkeypatch: Patch) -> Iterator[None]:
    """A GPU as far as torch is asked about it."""
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *device: torch.Stream("cpu"))
    before = programs.use_backend(CudaDriver())
    yield
    programs.use_backend(before)


@pytest.mark.usefixtures("_pretended_gpu")
@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_there_is_one_warning(monkeypatch: Patch, obstacle: Callable[[Patch], str]) -> None:
    reason = obstacle(monkeypatch)
    converter = gradwire.codec("co3").converter
    with pytest.warns(RuntimeWarning) as caught:
        for _ in range(3):
            assert not programs.can_run(GPU)
            assert not can_encode(converter, torch.float32, GPU)
    [warning] = caught
    assert "codes gradients of cuda:0 on the CPU, which is slower" in str(warning.message)
    assert reason in str(warning.message)


@pytest.mark.usefixtures("_pretended_gpu")
def test_the_cpu_is_no_gpu() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not programs.can_run(torch.device("cpu"))
        with cuda_on_cpu():
            assert programs.can_run(torch.device("cpu"))
        assert not programs.can_run(torch.device("cpu"))


def trained() -> str:
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    handle = gradwire.ddp.attach(model, "co3", aggregate="all_gather")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, 0, step).backward()
        optimizer.step()
    return digest({**dict(model.module.named_parameters()), **handle.state_dict()["memory"]})


@pytest.mark.usefixtures("alone", "_pretended_gpu")
@pytest.mark.parametrize("obstacle", [without_nvrtc, with_an_old_gpu])
def test_trainings_go_on_by_the_host(monkeypatch: Patch, obstacle: Callable[[Patch], str]) -> None:
    """Whose tensors are on the CPU here, and are asked for as if they were on the GPU."""
    expected = trained()
    obstacle(monkeypatch)
    can_run, asked = programs.can_run, []

    def on_the_gpu(device: torch.device) -> bool:
        asked.append(device)
        return can_run(GPU)

    monkeypatch.setattr(programs, "can_run", on_the_gpu)
    with pytest.warns(RuntimeWarning, match="on the CPU, which is slower") as caught:
        assert trained() == expected
    assert len(caught) == 1 and len(asked) > 1
    monkeypatch.setattr(programs, "can_run", can_run)
