"""The choice of kernels by device: a kernel for any device is one module and one line; tensors stay in place."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
import types
from collections.abc import Iterator

import numpy as np
import pytest
import torch

import gradwire
from gradwire import kernels
from gradwire.kernels import dispatch
from gradwire.kernels.conditions import where

DEVICE = torch.device("meta")  # every torch has it; its tensors have no values, so that nothing can compute with them


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """A module of level kernels for the fake device, which the registry knows by one line."""
    module = types.ModuleType("fake_levels")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(dispatch.IMPLEMENTATIONS, (DEVICE.type, "levels"), module.__name__)
    yield module
    dispatch._imported.cache_clear()


def public_functions(module: types.ModuleType) -> dict[str, types.FunctionType]:
    return {name: vars(module)[name] for name in module.__all__ if inspect.isfunction(vars(module)[name])}


def test_a_kernel_of_another_device_is_reached_by_one_line(fake: types.ModuleType) -> None:
    gradient, starts = torch.empty(100, device=DEVICE), np.array([0, 100])

    def search_levels(*args: object) -> np.ndarray:
        assert args[0] is gradient  # as it is, not a copy
        return np.ones((1, 3), dtype=np.float32)

    fake.search_levels = search_levels
    assert kernels.search_levels(gradient, None, 1.0, starts, None, 3, "greedy").tolist() == [[1.0] * 3]
    # By name, and of the CPU, as before.
    named = {"gradient": gradient, "memory": None, "decay": 1.0, "starts": starts, "limits": None, "levels": 3}
    assert kernels.search_levels(**named, method="greedy").tolist() == [[1.0] * 3]
    on_cpu = kernels.search_levels(torch.linspace(-1, 1, 100), None, 1.0, starts, None, 3, "greedy")
    assert on_cpu[0, 0] == -1 and on_cpu[0, 2] == 1


def test_what_a_device_lacks_is_done_by_the_reference(fake: types.ModuleType) -> None:
    symbols, values, starts = np.zeros(5, dtype=np.uint8), torch.ones(1, 3), np.array([0, 5])
    kernels.spread_levels(symbols, values, starts, torch.empty(5, device=DEVICE), False)  # plain torch takes it
    called = []
    fake.spread_levels = where(lambda out: out.dtype == torch.float16)(lambda *args: called.append(args[3].dtype))
    for dtype in (torch.float16, torch.float32):  # the condition is met, and not met
        kernels.spread_levels(symbols, values, starts, torch.empty(5, dtype=dtype, device=DEVICE), False)
    assert called == [torch.float16]


def test_a_codec_runs_where_kernels_were_written_for_it(
    fake: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    orq, topk, co3 = (gradwire.codec(spec) for spec in ("orq", "topk", "co3"))
    assert all(codec.runs_on(torch.device("cpu")) for codec in (orq, topk, co3))
    # The device has levels, and plain torch does for the statistics. It has no kernel of topk or co3.
    assert [codec.runs_on(DEVICE) for codec in (orq, topk, co3)] == [True, False, False]
    # Single calls on co3's tensors leave them there too, since plain torch does for them; those of topk are copied.
    taken = [kernels.takes(DEVICE, codec.converter.families) for codec in (orq, topk, co3)]
    assert taken == [True, False, True]
    monkeypatch.setitem(dispatch.IMPLEMENTATIONS, (DEVICE.type, "quantize"), fake.__name__)
    assert [codec.runs_on(DEVICE) for codec in (orq, topk, co3)] == [True, False, True]


def test_another_implementation_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("fake_quantize")
    module.absmax = lambda x: 7.0
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(dispatch.IMPLEMENTATIONS, ("cpu", "quantize"), module.__name__)
    dispatch.bind(vars(kernels))
    try:
        assert kernels.absmax(torch.ones(3)) == 7.0
        assert kernels.moments(torch.ones(3)) == (3, 3.0, 3.0)
    finally:
        monkeypatch.undo()
        dispatch.bind(vars(kernels))
    assert kernels.absmax(torch.ones(3)) == 1.0


def test_every_kernel_has_its_definition_in_the_reference() -> None:
    names: dict[str, str] = {}
    for family in dispatch.FAMILIES:
        defined = public_functions(importlib.import_module(f"gradwire.kernels.reference.{family}"))
        assert defined, family
        for name in defined:
            assert names.setdefault(name, family) == family, f"{name} is defined in {names[name]} and in {family}"
            assert inspect.signature(getattr(kernels, name)) == inspect.signature(defined[name])
        for (device, of), path in dispatch.IMPLEMENTATIONS.items():
            if of != family or dispatch.implementation(device, of) is None:
                continue
            for name, kernel in public_functions(importlib.import_module(path)).items():
                assert name in defined, f"{path}.{name} has no definition in the reference"
                assert inspect.signature(kernel) == inspect.signature(defined[name]), f"{path}.{name}"
    assert {family for _, family in dispatch.IMPLEMENTATIONS} <= set(dispatch.FAMILIES)
    assert set(dispatch.DECIDED_BY) <= set(names)


def test_converters_name_families_that_there_are() -> None:
    for entry in gradwire.recipes():
        families = gradwire.codec(entry.name).converter.families
        assert families and set(families) <= set(dispatch.FAMILIES), entry.name


def test_backends_are_switched_and_restored() -> None:
    with pytest.raises(ValueError, match="there are no 'mmx' kernels"), kernels.use("mmx"):
        pass
    with kernels.use("reference"):
        assert dispatch.implementation("cpu", "levels") is None
        for name in kernels.instruction_sets():
            with kernels.use(name):
                assert dispatch.implementation("cpu", "levels") is not None
        assert dispatch.implementation("cpu", "levels") is None
    assert (dispatch.implementation("cpu", "levels") is None) == (not kernels.instruction_sets())


@pytest.mark.thorough
def test_triton_is_not_imported_where_no_tensor_needs_it() -> None:
    code = "import sys, gradwire, gradwire.backward; assert not any(m.startswith('triton') for m in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
