"""The kernels of rows: native code against the reference, on every instruction set and on several threads.

Rows that are taken and the memory have the reference's bits, but for those of NaNs. Norms may be summed in another
order than the reference's, yet always in the same one: they have the same bits on every instruction set.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire import kernels
from gradwire.kernels.reference import rows as reference
from helpers import bits, check_same, native

pytestmark = pytest.mark.skipif(native is None, reason="no native module (test_coders says so, if that is wrong)")
if native:
    from gradwire.kernels.cpu import rows as cpu
SETS = native.instruction_sets() if native else []
ROWS, MEMORIES = (torch.float32, torch.bfloat16), (None, torch.float32, torch.bfloat16)
EDGES = [0.0, -0.0, 1e-45, -3e-40, 1.1754944e-38, 1.0, -1.0, 3.4028235e38, -3.4028235e38, 0.00390625, 1.00390625]
NOT_FINITE = [float("nan"), float("inf"), float("-inf")]
YES = torch.tensor(True)


@pytest.fixture(autouse=True)
def best_set_and_one_thread_afterwards() -> Iterator[None]:
    yield
    native.use(SETS[-1])
    torch.set_num_threads(1)


def each_set() -> Iterator[str]:
    for name in SETS:
        native.use(name)
        yield name


def check_same_but_for_nans(a: torch.Tensor | None, b: torch.Tensor | None) -> None:
    if a is None or b is None:
        assert a is b
        return
    assert bool((a.isnan() == b.isnan()).all())
    check_same(a.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf), b.nan_to_num(0.0, torch.inf, -torch.inf))


@st.composite
def batches(draw: st.DrawFn) -> dict:
    """rows, memory, keep, scale, gain, chosen: smooth values, zeros of both signs, the ends of fp32, ties of bf16."""
    count, columns = draw(st.integers(0, 9)), draw(st.sampled_from([0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 48, 100]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    edges = EDGES + (NOT_FINITE if draw(st.booleans()) else [])

    def matrix(dtype: torch.dtype) -> torch.Tensor:
        smooth, edge = rng.standard_normal((count, columns)), rng.choice(edges, (count, columns))
        mixed = np.where(rng.random((count, columns)) < draw(st.sampled_from([0, 0.5])), edge, smooth)
        return torch.from_numpy(mixed.astype(np.float32)).to(dtype)

    factor = st.sampled_from([1.0, 0.0, 0.1, 0.7071067811865476, 65536.0, 1e-30, 1e300])
    dtype = draw(st.sampled_from(MEMORIES))
    chosen = np.flatnonzero(rng.random(count) < draw(st.sampled_from([0, 0.3, 1])))
    return {
        "rows": matrix(draw(st.sampled_from(ROWS))), "memory": None if dtype is None else matrix(dtype),
        "keep": draw(factor), "scale": draw(factor), "gain": draw(factor), "chosen": torch.from_numpy(chosen),
    }  # fmt: skip


@settings(max_examples=4 * settings().max_examples)
@given(batches())
def test_taken_rows_and_memory_are_those_of_the_reference(batch):
    memory = batch.pop("memory")
    of_reference = None if memory is None else memory.clone()
    expected = reference.take_rows(memory=of_reference, finite=YES, **batch)
    for _ in each_set():
        own = None if memory is None else memory.clone()
        assert cpu.can(batch["rows"], own)
        taken = cpu.take_rows(memory=own, finite=YES, **batch)
        check_same_but_for_nans(taken, expected)
        check_same_but_for_nans(own, of_reference)


@given(batches())
def test_where_something_is_not_finite_the_memory_stays(batch):
    memory = batch.pop("memory")
    before = None if memory is None else bits(memory)
    for _ in each_set():
        taken = cpu.take_rows(memory=memory, finite=torch.tensor(False), **batch)
        assert taken.shape == (len(batch["chosen"]), batch["rows"].shape[1])
        assert taken.dtype == batch["rows"].dtype
        assert bool(taken.isnan().all())
        assert before is None or bits(memory) == before


@settings(max_examples=4 * settings().max_examples)
@given(batches())
def test_norms_are_those_of_the_reference_to_rounding(batch):
    given_ = [batch[name] for name in ("rows", "memory", "keep", "scale")]
    expected = reference.row_norms(*given_)
    found = [cpu.row_norms(*given_) for _ in each_set()]
    # Sums of up to 100 squares, each rounded, and a root: less than 60 roundings of 2⁻⁵³ in any order.
    torch.testing.assert_close(found[0], expected, rtol=60 * 2.0**-53, atol=0.0, equal_nan=True)
    for norms in found[1:]:
        check_same_but_for_nans(norms, found[0])


@pytest.mark.parametrize("with_memory", [False, True])
def test_any_number_of_threads_gives_the_same_bits(with_memory):
    """Large enough that seven threads are started, in blocks that do not come out even."""
    torch.manual_seed(0)
    rows, first = torch.randn(2999, 1537), torch.randn(2999, 1537) if with_memory else None
    chosen = torch.randperm(2999)[:1500].sort().values
    outcomes = []
    for threads in (1, 2, 7):
        torch.set_num_threads(threads)
        memory = None if first is None else first.clone()
        norms = cpu.row_norms(rows, memory, 0.7, 0.3)
        outcomes.append((norms, cpu.take_rows(rows, memory, 0.7, 0.3, 1.3, chosen, YES), memory))
    torch.set_num_threads(1)
    memory = None if first is None else first.clone()
    check_same_but_for_nans(outcomes[0][1], reference.take_rows(rows, memory, 0.7, 0.3, 1.3, chosen, YES))
    check_same_but_for_nans(outcomes[0][2], memory)
    for outcome in outcomes[1:]:
        for one, other in zip(outcomes[0], outcome, strict=True):
            check_same_but_for_nans(one, other)


def test_many_chosen_rows():
    """From 32 MB on their pages are asked for in another way."""
    rows = torch.arange(9000.0).repeat(1001, 1).t().contiguous()
    chosen = torch.arange(100, 8900)
    check_same(cpu.take_rows(rows, None, 1.0, 1.0, 2.0, chosen, YES), 2 * rows[100:8900])


def test_without_memory_the_other_rows_are_not_read():
    rows = torch.full((4, 40), torch.nan)
    rows[2] = 1.5
    for _ in each_set():
        taken = cpu.take_rows(rows, None, 1.0, 2.0, 1.0, torch.tensor([2]), YES)
        assert taken.tolist() == [[3.0] * 40]


def test_a_memory_that_holds_more_slots_is_written_only_where_the_batch_is():
    memory = torch.ones(6, 33)
    for name in each_set():
        before = memory[4:].clone()
        cpu.take_rows(torch.ones(4, 33), memory[:4], 1.0, 1.0, 1.0, torch.tensor([0, 3]), YES)
        assert not memory[[0, 3]].any(), name
        assert memory[1].min() >= 2, name
        check_same(memory[4:], before)


def test_rows_that_need_a_gradient_are_taken_as_they_are():
    rows = torch.randn(5, 9, requires_grad=True)
    check_same(cpu.take_rows(rows, None, 1.0, 1.0, 1.0, torch.tensor([1, 4]), YES), rows.detach()[[1, 4]])
    torch.testing.assert_close(cpu.row_norms(rows, None, 1.0, 1.0), rows.detach().double().norm(dim=1))


def test_other_tensors_go_to_the_reference():
    matrix = torch.randn(6, 8)
    others = [matrix.t(), matrix[:, :4], matrix[::2], matrix.double(), matrix.half(), matrix[0], matrix.to("meta")]
    for other in others:
        assert not cpu.can(other, None)
        assert not cpu.can(matrix, other)
    assert cpu.can(matrix[1:3], matrix[2:4].bfloat16())
    memory = torch.zeros(8, 6).t()
    taken = kernels.take_rows(matrix, memory, 1.0, 1.0, 1.0, torch.tensor([0]), YES)
    check_same(taken, matrix[:1])
    check_same(memory[1:].contiguous(), matrix[1:])


@pytest.mark.parametrize("chosen", [[1, 0], [2, 2], [-1, 2], [0, 4]])
def test_chosen_rows_must_be_ascending_and_inside(chosen):
    memory = torch.ones(4, 3)
    with pytest.raises(ValueError, match="ascending"):
        cpu.take_rows(torch.ones(4, 3), memory, 1.0, 1.0, 1.0, torch.tensor(chosen), YES)
    assert memory.tolist() == [[1.0] * 3] * 4


def test_shapes_that_do_not_match_are_refused():
    with pytest.raises(ValueError, match="shape"):
        cpu.row_norms(torch.ones(4, 3), torch.ones(3, 4), 1.0, 1.0)
    with pytest.raises(ValueError, match="shape"):
        cpu.take_rows(torch.ones(4, 3), torch.ones(5, 3), 1.0, 1.0, 1.0, torch.tensor([0]), YES)
