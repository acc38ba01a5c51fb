"""The one place where a kernel is chosen by the device of its tensors.

`IMPLEMENTATIONS` says which module has the kernels of a family for a device. Where it says nothing, or the module lacks
a kernel, or the kernel's condition (`conditions.where`) is not met, the reference does the work: plain torch, which
takes tensors of any device.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from gradwire.kernels.conditions import CONDITION

__all__ = ["implementation", "instruction_sets", "runs_on", "takes", "use"]

Kernel = Callable[..., Any]

FAMILIES = ("quantize", "coders", "grid", "levels", "sparse", "positions", "sketch", "homomorphic", "rows",
            "structure", "streams")  # fmt: skip

# (type of the device, family) → module. A new kernel for a device is a module, and its line here.
IMPLEMENTATIONS = {
    ("cpu", "quantize"): "gradwire.kernels.cpu.quantize",
    ("cpu", "coders"): "gradwire.kernels.cpu.coders",
    ("cpu", "grid"): "gradwire.kernels.cpu.grid",
    ("cpu", "levels"): "gradwire.kernels.cpu.levels",
    ("cpu", "sparse"): "gradwire.kernels.cpu.sparse",
    ("cpu", "positions"): "gradwire.kernels.cpu.positions",
    ("cpu", "sketch"): "gradwire.kernels.cpu.sketch",
    ("cpu", "homomorphic"): "gradwire.kernels.cpu.homomorphic",
    ("cpu", "rows"): "gradwire.kernels.cpu.rows",
    ("cpu", "structure"): "gradwire.kernels.cpu.structure",
    ("cpu", "streams"): "gradwire.kernels.cpu.streams",
    ("cuda", "sparse"): "gradwire.kernels.cuda.sparse",
    ("cuda", "homomorphic"): "gradwire.kernels.cuda.homomorphic",
    ("cuda", "rows"): "gradwire.kernels.cuda.rows",
}

# The implementation of a kernel is chosen by the device of its first tensor argument. For these kernels it is chosen by
# the first of the arguments named here, and all of them have to meet the condition of the implementation.
DECIDED_BY = {
    "rans_dequantize": ("out",),
    "spread_levels": ("out",),
    "join_rows": ("inputs", "outputs"),
    "take_rows": ("inputs", "outputs"),
}

# Families whose reference, on a device without kernels of its own, is better than copying tensors to the CPU and back.
PLAIN_TORCH_EVERYWHERE = ("quantize", "grid", "rows")

_backends = ["best"]  # the last is in use: "best", "reference" or an instruction set; see `use`


# ── which kernels there are ───────────────────────────────────────────────────────────────────────


def implementation(device: str, family: str) -> ModuleType | None:
    """Return the module with the kernels of a family for a type of device; None where the reference does it all."""
    path = IMPLEMENTATIONS.get((device, family))
    if path is None or _backends[-1] == "reference":
        return None
    if path.startswith("gradwire.kernels.cpu.") and not _native_module_is_here():
        return None
    return _imported(path)


def runs_on(device: torch.device, families: Iterable[str]) -> bool:
    """Tell whether a training leaves its tensors on this device; for the CPU, always.

    At least one of the families has kernels that were written for the device, and all others have them too or are
    done well enough by plain torch. So the first kernel that is written for a device is reached at once.
    """
    families = tuple(families)
    written = any(_is_written_for(device, family) for family in families)
    return device.type == "cpu" or (written and takes(device, families))


def takes(device: torch.device, families: Iterable[str]) -> bool:
    """Tell whether a single call leaves its tensors on this device, rather than copying them to the CPU and back.

    Every family has kernels for the device, or is done well enough by plain torch.
    """
    return device.type == "cpu" or all(
        family in PLAIN_TORCH_EVERYWHERE or _is_written_for(device, family) for family in families
    )


def _is_written_for(device: torch.device, family: str) -> bool:
    """Tell whether a family has kernels for a device, and they can run there: some need a compiler for it."""
    module = implementation(device.type, family)
    can_run = getattr(module, "can_run", None)
    return module is not None and (can_run is None or can_run(device))


def instruction_sets() -> list[str]:
    """Return the names of those that the native kernels can use here, the best last; none without a native module."""
    if not _native_module_is_here():
        return []
    from gradwire.kernels import cpu

    return cpu.instruction_sets()


@contextmanager
def use(backend: str) -> Iterator[None]:
    """Within the context, run all kernels of the process as `backend` says; for tests and benchmarks.

    It is "reference", on all devices, or one of `instruction_sets()` for the native kernels.
    """
    _backends.append(backend)
    try:
        _use_last()
        yield
    finally:
        _backends.pop()
        _use_last()


def _use_last() -> None:
    backend, sets = _backends[-1], instruction_sets()
    if backend not in ("best", "reference", *sets):
        raise ValueError(f"there are no {backend!r} kernels here; there are: {', '.join(['reference', *sets])}")
    if sets and backend != "reference":
        from gradwire.kernels import cpu

        cpu.use(sets[-1] if backend == "best" else backend)
    bind(vars(importlib.import_module("gradwire.kernels")))


@functools.cache
def _native_module_is_here() -> bool:
    if os.environ.get("GRADWIRE_NO_NATIVE"):
        return False
    try:
        importlib.import_module("gradwire._native")
    except ImportError:
        warnings.warn(
            "gradwire's native module is not built: everything works, slowly. Install gradwire from its source "
            "folder or a wheel to get it (GRADWIRE_NO_NATIVE=1 silences this).",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True


@functools.cache
def _imported(path: str) -> ModuleType | None:
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name == "triton":  # optional
            return None
        raise


# ── binding ───────────────────────────────────────────────────────────────────────────────────────


def bind(namespace: dict[str, Any]) -> None:
    """Put the kernel that chooses in the place of each kernel of the reference, in the namespace of gradwire.kernels.

    Kernels for the CPU are looked up now, since the hot path calls them; those of other devices when they are called.
    """
    for family in FAMILIES:
        reference = importlib.import_module(f"gradwire.kernels.reference.{family}")
        native = implementation("cpu", family)
        for name in reference.__all__:
            kernel = getattr(reference, name)
            if inspect.isfunction(kernel):
                namespace[name] = _choosing(family, kernel, getattr(native, name, kernel))


def _choosing(family: str, reference: Kernel, on_cpu: Kernel) -> Kernel:
    """Return a kernel that looks where its tensor is. It costs about a tenth of a microsecond on the CPU."""
    name, signature = reference.__name__, inspect.signature(reference)
    deciding = DECIDED_BY.get(name) or _first_tensor(signature)
    if not deciding:  # it has arrays and numbers alone, which are in the host's memory
        return on_cpu
    places = [list(signature.parameters).index(parameter) for parameter in deciding]
    place, last, several = places[0], max(places), places[1:]
    condition = getattr(on_cpu, CONDITION, None)

    @functools.wraps(reference)
    def kernel(*args: Any, **named: Any) -> Any:
        if len(args) <= last:  # some of those that decide were given by name
            bound = signature.bind(*args, **named)
            args, named = bound.args, bound.kwargs
        tensor = args[place]
        if not tensor.is_cpu:
            return _elsewhere(tensor.device.type, family, reference, [args[i] for i in places])(*args, **named)
        if condition is not None and not (condition(tensor) and all(condition(args[i]) for i in several)):
            return reference(*args, **named)
        return on_cpu(*args, **named)

    return kernel


def _elsewhere(device: str, family: str, reference: Kernel, deciding: list[Any]) -> Kernel:
    """Return the kernel for tensors that are not on the CPU."""
    kernel: Kernel = getattr(implementation(device, family), reference.__name__, reference)
    condition = getattr(kernel, CONDITION, None)
    return kernel if condition is None or all(map(condition, deciding)) else reference


def _first_tensor(signature: inspect.Signature) -> tuple[str, ...]:
    """Return the name of the first parameter that is a tensor and has to be given, if there is one."""
    return next(((name,) for name, p in signature.parameters.items() if p.annotation == "torch.Tensor"), ())
