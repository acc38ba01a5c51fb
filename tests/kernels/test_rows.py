"""The kernels of rows: native code against the reference, on every instruction set and on several threads.

Rows that are taken and the memory have the reference's bits, but for those of NaNs. Squares may be summed in another
order than the reference's, yet always in the same one: scores have the same bits on every instruction set.
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
from gradwire.kernels.reference.rows import Side
from support.cases import for_each
from support.helpers import bits, check_same, native

pytestmark = pytest.mark.skipif(native is None, reason="no native module (test_coders says so, if that is wrong)")
if native:
    from gradwire.kernels.cpu import rows as cpu
SETS = native.instruction_sets() if native else []
DTYPES = (torch.float32, torch.bfloat16)
EDGES = [0.0, -0.0, 1e-45, -3e-40, 1.1754944e-38, 1.0, -1.0, 3.4028235e38, -3.4028235e38, 0.00390625, 1.00390625]
NOT_FINITE = [float("nan"), float("inf"), float("-inf")]
FINITE = torch.tensor(1.0, dtype=torch.float64)


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


def copied(side: Side) -> Side:
    return side._replace(memory=None if side.memory is None else side.memory.clone())


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[Side], float, torch.Tensor]:
    """Both sides, keep and chosen rows: smooth values, zeros of both signs, the ends of fp32, ties of bf16."""
    count = draw(st.integers(0, 9))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    edges = EDGES + (NOT_FINITE if draw(st.booleans()) else [])
    factor = st.sampled_from([1.0, 0.0, 0.1, 0.7071067811865476, 65536.0, 1e-30, 1e300])

    def matrix(columns: int, dtype: torch.dtype) -> torch.Tensor:
        smooth, edge = rng.standard_normal((count, columns)), rng.choice(edges, (count, columns))
        mixed = np.where(rng.random((count, columns)) < draw(st.sampled_from([0, 0.1, 0.5])), edge, smooth)
        return torch.from_numpy(mixed.astype(np.float32)).to(dtype)

    def side(remembers: bool) -> Side:
        columns = draw(st.sampled_from([0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 48, 100]))
        rows, memory = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(DTYPES))
        most = draw(st.sampled_from([3.0, 3.4028234663852886e38, float("inf")]))
        own = matrix(columns, memory) if remembers else None
        mean = matrix(columns, rows).sum(0) / 4 if draw(st.booleans()) else None
        return Side(matrix(columns, rows), own, draw(factor), draw(factor), most, mean)

    remembers = draw(st.booleans())
    chosen = np.flatnonzero(rng.random(count) < draw(st.sampled_from([0, 0.3, 1])))
    return [side(remembers), side(remembers)], draw(factor), torch.from_numpy(chosen)


@settings(max_examples=8 * settings().max_examples)
@given(batches())
def test_joined_rows_are_those_of_the_reference_and_scores_so_to_rounding(batch):
    sides, keep, _ = batch
    expected = [copied(side) for side in sides]
    of_reference = reference.join_rows(*expected, keep)
    scores = []
    for _ in each_set():
        own = [copied(side) for side in sides]
        assert all(cpu.can(side) for side in own)
        scores.append(cpu.join_rows(*own, keep))
        for mine, theirs in zip(own, expected, strict=True):
            check_same_but_for_nans(mine.memory, theirs.memory)
    # Two sums of up to 100 squares, two roots and a product: less than 120 roundings of 2⁻⁵³ in any order.
    torch.testing.assert_close(scores[0], of_reference, rtol=120 * 2.0**-53, atol=0.0, equal_nan=True)
    for others in scores[1:]:
        check_same_but_for_nans(others, scores[0])


@settings(max_examples=4 * settings().max_examples)
@given(batches())
def test_taken_rows_and_what_is_left_are_those_of_the_reference(batch):
    sides, _, chosen = batch
    left = [copied(side) for side in sides]
    expected = reference.take_rows(*left, chosen, FINITE)
    for _ in each_set():
        own = [copied(side) for side in sides]
        for mine, theirs in zip(cpu.take_rows(*own, chosen, FINITE), expected, strict=True):
            assert mine.shape == theirs.shape  # with room for the mean, if there is one
            check_same_but_for_nans(mine[: len(chosen)], theirs[: len(chosen)])
        for mine, theirs in zip(own, left, strict=True):
            check_same_but_for_nans(mine.memory, theirs.memory)


@given(batches())
def test_where_something_is_not_finite_nothing_leaves_the_memory(batch):
    sides, _, chosen = batch
    before = [None if side.memory is None else bits(side.memory) for side in sides]
    for _ in each_set():
        taken = cpu.take_rows(*sides, chosen, torch.tensor(torch.nan, dtype=torch.float64))
        for rows, side, stored in zip(taken, sides, before, strict=True):
            assert rows.shape == (len(chosen) + (sides[0].mean is not None), side.rows.shape[1])
            assert rows.dtype == side.rows.dtype
            assert bool(rows.isnan().all())
            assert stored is None or bits(side.memory) == stored


@for_each("bad", [torch.nan, torch.inf, 200.0])
@for_each("at", [0, 1])
def test_a_row_that_one_side_cannot_hold_changes_neither(at, bad):
    for name in each_set():
        sides = [Side(torch.ones(3, 20), torch.ones(3, 20), most=100.0), Side(torch.ones(3, 4), torch.ones(3, 4))]
        sides[at] = sides[at]._replace(most=100.0)
        sides[at].rows[1, 3] = bad
        scores = cpu.join_rows(*sides, 1.0)
        assert scores.isnan().tolist() == [False, True, False], name
        for side in sides:
            assert side.memory.unique(dim=1).flatten().tolist() == [2.0, 1.0, 2.0], name


@pytest.mark.parametrize("memory", DTYPES)
@pytest.mark.parametrize("at", [0, 1])
def test_a_row_that_is_zero_on_one_side_brings_nothing(at, memory):
    for name in [*each_set(), "reference"]:
        sides = [Side(torch.ones(4, columns), torch.ones(4, columns, dtype=memory)) for columns in (20, 4)]
        sides[at].rows[1:3] = 0.0
        sides[at] = sides[at]._replace(rows=sides[at].rows + 3.0, mean=torch.full_like(sides[at].rows[0], 3.0))
        sides[1 - at].rows[2, 3] = torch.nan
        join = reference.join_rows if name == "reference" else cpu.join_rows
        scores = join(*sides, 0.5)
        assert scores.isnan().tolist() == [False, False, True, False], name
        for side in sides:
            assert side.memory.float().unique(dim=1).flatten().tolist() == [1.5, 0.5, 1.0, 1.5], name


@pytest.mark.parametrize("remembers", [False, True])
def test_any_number_of_threads_gives_the_same_bits(remembers):
    """Large enough that seven threads are started, in blocks that do not come out even."""
    torch.manual_seed(0)
    sizes = ((2999, 737), (2999, 501))
    first = [Side(torch.randn(size), torch.randn(size) if remembers else None, 0.3, 1.3, 40.0) for size in sizes]
    chosen = torch.randperm(2999)[:1500].sort().values
    outcomes = []
    for threads in (1, 2, 7):
        torch.set_num_threads(threads)
        own = [copied(side) for side in first]
        outcomes.append([cpu.join_rows(*own, 0.7), *cpu.take_rows(*own, chosen, FINITE), *(s.memory for s in own)])
    torch.set_num_threads(1)
    own = [copied(side) for side in first]
    reference.join_rows(*own, 0.7)
    expected = [*reference.take_rows(*own, chosen, FINITE), *(side.memory for side in own)]
    for mine, theirs in zip(outcomes[0][1:], expected, strict=True):
        check_same_but_for_nans(mine, theirs)
    for outcome in outcomes[1:]:
        for one, other in zip(outcomes[0], outcome, strict=True):
            check_same_but_for_nans(one, other)


@given(st.lists(st.sampled_from([*EDGES, *NOT_FINITE]) | st.floats(), max_size=40), st.data())
def test_the_largest_keys_are_found_and_of_equal_ones_the_first(keys, data):
    count = data.draw(st.integers(0, len(keys)))
    in_order = sorted(range(len(keys)), key=lambda j: (keys[j] == keys[j], -keys[j] if keys[j] == keys[j] else 0, j))
    found = cpu.largest(torch.tensor(keys, dtype=torch.float64), count)
    assert found.tolist() == sorted(in_order[:count])


@pytest.mark.parametrize(
    "keys", [torch.rand(5000, dtype=torch.float64), torch.rand(5000), torch.rand(99).double()[::3]]
)
def test_the_largest_keys_are_those_of_the_reference(keys):
    check_same(kernels.largest(keys, 20), reference.largest(keys, 20))


def test_more_keys_than_there_are_cannot_be_chosen():
    with pytest.raises(ValueError, match="more wanted"):
        cpu.largest(torch.rand(5, dtype=torch.float64), 6)


def test_many_chosen_rows():
    """From 32 MB on their pages are asked for in another way."""
    rows = torch.arange(9000.0).repeat(1001, 1).t().contiguous()
    chosen = torch.arange(100, 8900)
    for memory in (None, rows.clone()):
        sides = Side(rows, memory), Side(rows[:, :1].contiguous(), None if memory is None else torch.ones(9000, 1))
        check_same(cpu.take_rows(*sides, chosen, FINITE)[0], rows[100:8900])


def test_only_the_first_slots_of_a_longer_memory_are_written():
    memory, other = torch.ones(6, 33), torch.ones(6, 5)
    for name in each_set():
        before = memory[4:].clone()
        sides = Side(torch.ones(4, 33), memory[:4]), Side(torch.ones(4, 5), other[:4])
        cpu.join_rows(*sides, 1.0)
        cpu.take_rows(*sides, torch.tensor([0, 3]), FINITE)
        assert not memory[[0, 3]].any(), name
        assert memory[1].min() >= 2, name
        check_same(memory[4:], before)


def test_rows_that_need_a_gradient_are_taken_as_they_are():
    rows, others = torch.randn(5, 9, requires_grad=True), torch.ones(5, 4)
    sides = Side(rows, None), Side(others, None)
    taken = cpu.take_rows(*sides, torch.tensor([1, 4]), FINITE)
    check_same(taken[0], rows.detach()[[1, 4]])
    torch.testing.assert_close(cpu.join_rows(*sides, 1.0), 2 * rows.detach().double().norm(dim=1))


class Wrapped(torch.Tensor):
    pass


def test_other_tensors_go_to_the_reference():
    matrix = torch.randn(6, 8)
    others = [matrix.t(), matrix[:, :4], matrix[::2], matrix.double(), matrix.half(), matrix[0], matrix.to("meta")]
    negated = torch.complex(torch.ones(1, 1), torch.ones(1, 1)).conj().imag  # its data has the other sign
    for other in [*others, matrix.as_subclass(Wrapped), negated]:
        assert not cpu.can(Side(other, None))
        assert not cpu.can(Side(matrix, other))
    for mean in (matrix, matrix[0].double(), matrix[0].bfloat16(), torch.ones(16)[::2]):
        assert not cpu.can(Side(matrix, None, mean=mean))
    assert cpu.can(Side(matrix[1:3], matrix[2:4].bfloat16(), mean=matrix[0]))
    memory = torch.zeros(8, 6).t()
    sides = Side(matrix, memory), Side(matrix, torch.zeros(6, 8))
    kernels.join_rows(*sides, 1.0)
    check_same(kernels.take_rows(*sides, torch.tensor([0]), FINITE)[0], matrix[:1])
    check_same(memory[1:].contiguous(), matrix[1:])


@pytest.mark.parametrize("chosen", [[1, 0], [2, 2], [-1, 2], [0, 4]])
def test_chosen_rows_must_be_ascending_and_inside(chosen):
    side = Side(torch.ones(4, 3), torch.ones(4, 3))
    with pytest.raises(ValueError, match="ascending"):
        cpu.take_rows(side, side, torch.tensor(chosen), FINITE)
    assert side.memory.tolist() == [[1.0] * 3] * 4


def test_shapes_that_do_not_match_are_refused():
    good = Side(torch.ones(4, 3), torch.ones(4, 3))
    for other in (
        good._replace(memory=torch.ones(3, 4)),
        Side(torch.ones(5, 3), torch.ones(5, 3)),
        Side(good.rows, None),
        good._replace(mean=torch.ones(4)),
    ):
        for sides in ((good, other), (other, good)):
            with pytest.raises(ValueError, match=r"shape|numbers of rows|both sides"):
                cpu.join_rows(*sides, 1.0)
            with pytest.raises(ValueError, match=r"shape|numbers of rows|both sides"):
                cpu.take_rows(*sides, torch.tensor([0]), FINITE)
