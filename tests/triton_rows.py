"""The checks of test_triton_rows.py: they need Triton's interpreter, which has to be on before Triton is imported."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from triton.runtime import interpreter

from gradwire import kernels
from gradwire.backward.choice import Choice
from gradwire.backward.function import weight_gradient
from gradwire.backward.memory import RowMemory
from gradwire.backward.scales import Factors
from gradwire.kernels.cuda import rows as triton_rows
from gradwire.kernels.reference import rows as reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MEMORIES = (None, torch.float32, torch.bfloat16)
YES, NO = torch.tensor(True), torch.tensor(False)


@pytest.fixture(autouse=True, scope="module")
def rounding_to_bf16():
    """The interpreter cuts fp32 off to get bf16; compiled kernels round to nearest, as torch does."""
    cast = interpreter.InterpreterBuilder.cast_impl

    def rounding(self, source, to):
        if (source.dtype.scalar.name, to.scalar.name) != ("fp32", "bf16"):
            return cast(self, source, to)
        rounded = torch.from_numpy(source.data.copy()).to(torch.bfloat16).view(torch.uint16)
        return interpreter.TensorHandle(rounded.numpy(), to.scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "cast_impl", rounding)
        yield


@pytest.fixture(autouse=True)
def several_programs_for_few_places(monkeypatch):
    monkeypatch.setattr(triton_rows, "PLACES", 16)


def batch(count, columns, dtype=torch.float32, memory_dtype=None, size=1.0):
    generator = torch.Generator().manual_seed(count * 1000 + columns)
    rows = (torch.randn(count, columns, generator=generator) * size).to(dtype)
    if memory_dtype is None:
        return rows, None
    return rows, (torch.randn(count, columns, generator=generator) * size).to(memory_dtype)


def check_norms(rows, memory, keep=0.9, scale=0.3):
    assert triton_rows.can(rows, memory)
    ours, theirs = (k.row_norms(rows, memory, keep, scale) for k in (triton_rows, reference))
    # Sums of fp64 in two orders; each is within about √n roundings of the truth.
    torch.testing.assert_close(ours, theirs, rtol=4e-16 * math.sqrt(rows.shape[1] + 16), atol=0, equal_nan=True)


def check_taken(rows, memory, chosen, finite=YES, keep=0.9, scale=0.3, gain=7.0):
    after = [None if memory is None else memory.clone() for _ in range(2)]
    ours = triton_rows.take_rows(rows, after[0], keep, scale, gain, chosen, finite)
    theirs = reference.take_rows(rows, after[1], keep, scale, gain, chosen, finite)
    assert ours.dtype == rows.dtype and ours.shape == theirs.shape
    assert torch.equal(torch.nan_to_num(ours, 123.0), torch.nan_to_num(theirs, 123.0))
    if memory is not None:
        assert torch.equal(after[0], after[1])
        assert not torch.signbit(after[0][chosen]).any() or not finite
    return ours, after[0]


@pytest.mark.parametrize("count, columns", [(1, 1), (3, 130), (40, 1), (37, 10), (2, 4100)])
def test_every_dtype_and_shape(count, columns):
    for dtype, memory_dtype in itertools.product(DTYPES, MEMORIES):
        rows, memory = batch(count, columns, dtype, memory_dtype)
        check_norms(rows, memory)
        check_taken(rows, memory, torch.randperm(count)[: (count + 1) // 2].sort().values)


@pytest.mark.parametrize("count, columns", [(3, 130), (37, 10)])
def test_more_tiles_than_one(count, columns, monkeypatch):
    monkeypatch.setattr(triton_rows, "TILE", 64)
    rows, memory = batch(count, columns, torch.bfloat16, torch.float32)
    check_norms(rows, memory)
    check_taken(rows, memory, torch.arange(1, count, 2))
    check_taken(rows, None, torch.arange(1, count, 2))


@pytest.mark.parametrize("count, columns", [(0, 5), (4, 0), (0, 0)])
@pytest.mark.parametrize("memory_dtype", MEMORIES)
def test_nothing(count, columns, memory_dtype):
    rows, memory = batch(count, columns, memory_dtype=memory_dtype)
    check_norms(rows, memory)
    check_taken(rows, memory, torch.arange(count // 2))


@pytest.mark.parametrize("memory_dtype", MEMORIES)
def test_none_chosen_all_chosen_and_out_of_order(memory_dtype):
    rows, memory = batch(37, 70, torch.bfloat16, memory_dtype)
    for chosen in (torch.arange(0), torch.arange(37), torch.tensor([36, 0, 17])):
        check_taken(rows, memory, chosen)


@pytest.mark.parametrize("size", [1e-25, 1e18, 1e-42], ids=["tiny", "large", "subnormal"])
def test_norms_of_tiny_and_large_rows(size):
    rows, memory = batch(5, 70, memory_dtype=torch.float32, size=size)
    check_norms(rows, memory, 1.0, 1.0)
    assert (triton_rows.row_norms(rows, memory, 1.0, 1.0) > size).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite(dtype, bad):
    rows, memory = batch(6, 70, dtype, torch.float32)
    rows[4, 69] = bad
    check_norms(rows, memory)
    taken, after = check_taken(rows, memory, torch.tensor([1, 4]), NO)
    assert taken.isnan().all() and torch.equal(after, memory)
    assert check_taken(rows, None, torch.tensor([1, 2]), NO)[0].isnan().all()
    check_taken(rows, memory, torch.tensor([1, 4]), YES)  # the kernel believes what it is told


def test_what_the_reference_has_to_do():
    rows, memory = batch(4, 6, memory_dtype=torch.float32)
    assert triton_rows.can(rows, memory) and triton_rows.can(rows, None)
    for wrong in (rows.double(), rows.t(), rows[:, :3], rows[0], rows.int()):
        assert not triton_rows.can(wrong, None)
    for wrong in (memory.double(), memory.half(), memory[:, :3], memory[:3], memory.t().contiguous().t()):
        assert not triton_rows.can(rows, wrong)


@pytest.mark.parametrize("memory_dtype", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_gradients_of_a_training(dtype, memory_dtype, monkeypatch):
    """Five batches of changing size, one of them not finite, through `weight_gradient` and its dispatch."""
    called = []

    def gradients(which):
        called.clear()
        monkeypatch.setattr(kernels.rows, "_of_device", lambda device: which)
        for name in ("row_norms", "take_rows"):
            kernel = getattr(which, name)
            monkeypatch.setattr(which, name, lambda *a, kernel=kernel: called.append(which) or kernel(*a))
        memory = RowMemory(0.9, memory_dtype) if memory_dtype else None
        found = []
        for step, count in enumerate((24, 24, 9, 24, 30)):
            inputs, outputs = batch(count, 33, dtype)[0], batch(count, 12, dtype)[0]
            if step == 3:
                outputs[5, 5] = math.inf
            factors = Factors(0.5, 0.25, 8.0)
            found.append(weight_gradient(inputs, outputs, Choice(0.25), memory, factors))
        assert len(called) == 4 * len(found)
        return [*found, memory.inputs, memory.outputs] if memory else found

    ours, theirs = gradients(triton_rows), gradients(reference)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    assert theirs[3].isnan().all() and theirs[4].isfinite().all()
