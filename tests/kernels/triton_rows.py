"""The checks of test_triton_rows.py: they need Triton's interpreter, which has to be on before Triton is imported."""

from __future__ import annotations

import functools
import itertools
import math

import pytest
import torch
from triton.runtime import interpreter

from gradwire import kernels
from gradwire.backward.autograd import weight_gradient
from gradwire.backward.row_choice import Choice
from gradwire.backward.row_memory import RowMemory
from gradwire.backward.row_scales import Factors
from gradwire.kernels import dispatch
from gradwire.kernels.cuda import rows as triton_rows
from gradwire.kernels.reference import rows as reference
from gradwire.kernels.reference.rows import Side

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MEMORIES = (None, torch.float32, torch.bfloat16)
ENOUGH, NAN = torch.tensor(5.0, dtype=torch.float64), torch.tensor(math.nan, dtype=torch.float64)


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


def side(count, columns, dtype=torch.float32, memory_dtype=None, size=1.0, most=math.inf):
    generator = torch.Generator().manual_seed(count * 1000 + columns)
    rows = (torch.randn(count, columns, generator=generator) * size).to(dtype)
    memory = None
    if memory_dtype is not None:
        memory = (torch.randn(count, columns, generator=generator) * size).to(memory_dtype)
    return Side(rows, memory, 0.3, 7.0, most)


def sides(count, columns, dtype=torch.float32, memory_dtype=None, **more):
    return [side(count, n, dtype, memory_dtype, **more) for n in columns]


def with_mean(both):
    return [both[0]._replace(mean=torch.randn(both[0].rows.shape[1]).to(both[0].rows.dtype)), both[1]]


def copies(both):
    return [s._replace(memory=None if s.memory is None else s.memory.clone()) for s in both]


def check_memories(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert a.memory is None or torch.equal(a.memory, b.memory)


def check_joined(both, keep=0.9):
    assert all(map(triton_rows.can, both))
    ours, theirs = copies(both), copies(both)
    found, expected = triton_rows.join_rows(*ours, keep), reference.join_rows(*theirs, keep)
    # Sums of fp64 in two orders; each is within about √n roundings of the truth.
    columns = sum(s.rows.shape[1] for s in both)
    torch.testing.assert_close(found, expected, rtol=4e-16 * math.sqrt(columns + 16), atol=0, equal_nan=True)
    check_memories(ours, theirs)
    return found, ours


def check_taken(both, chosen, total=ENOUGH):
    ours, theirs = copies(both), copies(both)
    found = triton_rows.take_rows(*ours, chosen, total)
    for a, b, of in zip(found, reference.take_rows(*theirs, chosen, total), both, strict=True):
        assert a.dtype == of.rows.dtype and a.shape == b.shape
        filled = slice(len(chosen))  # not the row of a mean, which is the caller's to fill
        assert torch.equal(torch.nan_to_num(a[filled], 123.0), torch.nan_to_num(b[filled], 123.0))
    check_memories(ours, theirs)
    for s in ours:
        assert s.memory is None or total.isnan() or not torch.signbit(s.memory[chosen]).any()
    return found, ours


SHAPES = [(1, (1, 1)), (3, (130, 7)), (40, (1, 10)), (37, (10, 10)), (2, (4100, 33))]


@pytest.mark.parametrize("count, columns", SHAPES)
def test_every_dtype_and_shape(count, columns):
    for dtype, memory_dtype in itertools.product(DTYPES, MEMORIES):
        both = sides(count, columns, dtype, memory_dtype)
        for each in (both, with_mean(both)):
            check_joined(each)
            check_taken(each, torch.randperm(count)[: (count + 1) // 2].sort().values)


@pytest.mark.parametrize("memory_dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_sides_of_different_dtypes(memory_dtypes):
    both = [side(9, 33, torch.bfloat16, memory_dtypes[0]), side(9, 12, torch.float32, memory_dtypes[1])]
    check_joined(both)
    check_taken(both, torch.arange(1, 9, 2))


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("held", [16384, 16])
def test_a_row_that_is_zero_on_one_side_brings_nothing(at, held, monkeypatch):
    monkeypatch.setattr(triton_rows, "HELD", held)
    monkeypatch.setattr(triton_rows, "JOINED", min(held, triton_rows.JOINED))
    both = sides(9, (33, 20), torch.bfloat16, torch.float32)
    both[at].rows[3:5] = 0.0
    both[1 - at].rows[4, 17] = torch.nan
    scores, ours = check_joined(both, keep=1.0)
    assert scores.isnan().nonzero().flatten().tolist() == [4]
    for before, after in zip(both, ours, strict=True):
        assert torch.equal(after.memory[3:5], before.memory[3:5])


@pytest.mark.parametrize("columns", [(130, 20), (10, 300), (9, 10)])
@pytest.mark.parametrize("memory_dtype", MEMORIES)
def test_rows_that_are_wider_than_registers(columns, memory_dtype, monkeypatch):
    for name, value in (("HELD", 128), ("JOINED", 64), ("TAKEN", 64)):
        monkeypatch.setattr(triton_rows, name, value)
    both = sides(7, columns, torch.bfloat16, memory_dtype, most=0.95 * math.sqrt(max(columns)))
    scores, _ = check_joined(both)
    if memory_dtype and min(columns) > 9:
        assert 0 < scores.isnan().sum() < 7, "some rows should be too large, and some not"
    check_joined(with_mean(both))
    for each in (both, with_mean(both)):
        check_taken(each, torch.arange(1, 7, 2))
        check_taken(each, torch.arange(1, 7, 2), NAN)


@pytest.mark.parametrize("count, columns", [(0, (5, 5)), (4, (0, 3)), (4, (3, 0)), (0, (0, 0))])
@pytest.mark.parametrize("memory_dtype", MEMORIES)
def test_nothing(count, columns, memory_dtype):
    both = sides(count, columns, memory_dtype=memory_dtype)
    check_joined(both)
    check_taken(both, torch.arange(count // 2))


@pytest.mark.parametrize("memory_dtype", MEMORIES)
def test_none_chosen_and_all_chosen(memory_dtype):
    both = sides(37, (70, 3), torch.bfloat16, memory_dtype)
    for chosen in (torch.arange(0), torch.arange(37)):
        check_taken(both, chosen)


@pytest.mark.parametrize("size", [1e-25, 1e18, 1e-42], ids=["tiny", "large", "subnormal"])
def test_scores_of_tiny_and_large_rows(size):
    scores, _ = check_joined(sides(5, (70, 90), memory_dtype=torch.float32, size=size))
    assert (scores > size * size).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e4])
@pytest.mark.parametrize("where", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_that_does_not_fit_changes_no_memory(dtype, where, bad):
    both = sides(6, (70, 20), dtype, torch.float32, most=1000.0)
    both[where].rows[4, 19] = bad
    scores, joined = check_joined(both)
    assert scores.isnan().tolist() == [False] * 4 + [True, False]
    for before, after in zip(both, joined, strict=True):
        assert torch.equal(before.memory[4], after.memory[4]) and not torch.equal(before.memory[5], after.memory[5])
    scores, _ = check_joined([s._replace(memory=None) for s in both])
    assert scores[4].isnan()


@pytest.mark.parametrize("memory_dtype", MEMORIES)
def test_nothing_is_taken_where_the_total_is_nan(memory_dtype):
    both = sides(6, (70, 20), torch.bfloat16, memory_dtype)
    taken, after = check_taken(both, torch.tensor([1, 4]), NAN)
    assert all(t.isnan().all() for t in taken)
    check_memories(after, both)
    check_taken(both, torch.tensor([1, 4]), ENOUGH + math.inf)  # finite rows whose scores are too large to add


def keys_of(name):
    generator = torch.Generator().manual_seed(3)
    keys = torch.randn(75, dtype=torch.float64, generator=generator)
    return {
        "positive": keys.exp(),
        "signed": keys,
        "negative": -keys.exp() * 1e300,
        "ties": (keys * 2).round() + 0.0,  # no -0.0, which the reference takes for 0.0
        "equal": torch.full((64,), -2.5, dtype=torch.float64),
        "the last bit": 1 + torch.arange(40, dtype=torch.float64).flip(0) * 2**-52,
        "infinite": torch.cat([keys, keys.new_tensor([-math.inf] * 5 + [math.inf] * 3)]),
        "nan": torch.cat([keys[:20], keys.new_tensor([math.nan, -math.inf, 0.0, -math.nan]), keys[20:]]),
        "one": keys[:1],
        "zeros": torch.cat([keys.new_zeros(30), keys.abs(), keys.new_zeros(30)]),
    }[name]


NAMES = ("positive", "signed", "negative", "ties", "equal", "the last bit", "infinite", "nan", "one", "zeros")


@pytest.mark.parametrize("name", NAMES)
def test_largest(name):
    keys = keys_of(name)
    for count in {1, 2, len(keys) // 3, len(keys) - 1, len(keys)} & set(range(1, len(keys) + 1)):
        found = triton_rows.largest(keys, count)
        # A stable sort: of equal keys the first ones, and NaN before all others.
        expected = keys.sort(descending=True, stable=True).indices[:count].sort().values
        assert found.dtype == torch.int64 and found.tolist() == expected.tolist()


def test_the_largest_of_what_the_kernel_does_not_know():
    keys = keys_of("signed")
    for other in (keys.float(), keys[::2], keys[:0], keys.repeat(300)):
        count = len(other) // 2
        found = triton_rows.largest(other, count)
        assert torch.equal(other[found].sort(descending=True).values, other.topk(count).values)


def test_what_the_reference_has_to_do():
    good = side(4, 6, memory_dtype=torch.float32)
    rows, memory = good[:2]
    assert triton_rows.can(good) and triton_rows.can(Side(rows, None))
    negated = torch.complex(torch.ones(1, 1), torch.ones(1, 1)).conj().imag  # its data has the other sign
    subclass = rows.as_subclass(type("Wrapped", (torch.Tensor,), {}))
    for wrong in (rows.double(), rows.t(), rows[:, :3], rows[0], rows.int(), negated, subclass):
        assert not triton_rows.can(Side(wrong, None))
    for wrong in (memory.double(), memory.half(), memory[:, :3], memory[:3], memory.t().contiguous().t()):
        assert not triton_rows.can(Side(rows, wrong))


@pytest.mark.parametrize("memory_dtype", MEMORIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_gradients_of_a_training(dtype, memory_dtype, monkeypatch):
    """Five batches of changing size, one of them not finite, through `weight_gradient` and its dispatch."""

    def counted(kernel, called):
        @functools.wraps(kernel)
        def counting(*args):
            called.append(kernel.__name__)
            return kernel(*args)

        return counting

    def gradients(which):
        called = []
        for name in ("join_rows", "largest", "take_rows"):
            monkeypatch.setattr(which, name, counted(getattr(which, name), called))
        monkeypatch.setitem(dispatch.IMPLEMENTATIONS, ("cpu", "rows"), which.__name__)
        dispatch.bind(vars(kernels))
        memory = RowMemory(0.9, memory_dtype) if memory_dtype else None
        found = []
        for step, count in enumerate((24, 24, 9, 24, 30)):
            inputs, outputs = (s.rows for s in sides(count, (33, 12), dtype))
            if step == 3:
                outputs[5, 5] = math.inf
            factors = Factors(0.5, 0.25, 2.0, 4.0)
            found.append(weight_gradient(inputs, outputs, Choice(0.25), memory, factors))
        assert called == ["join_rows", "largest", "take_rows"] * 5
        return [*found, memory.inputs, memory.outputs] if memory else found

    ours, theirs = gradients(triton_rows), gradients(reference)
    monkeypatch.undo()
    dispatch.bind(vars(kernels))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    assert theirs[3].isnan().all() and theirs[4].isfinite().all()
