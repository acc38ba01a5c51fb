"""SparseLoCo's form: the largest entries of every chunk, sent in the usual sparse frames."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradwire
from gradwire import kernels
from gradwire.convert.sparse import sent_positions
from gradwire.errors import SpecError
from support.cases import for_each
from support.helpers import check_same, encode_into
from support.plain_decoder import plain_decode


def largest_by_hand(u: torch.Tensor, chunk: int, count: int) -> list[int]:
    """Sorted by magnitude, then by position, chunk by chunk."""
    chosen: list[int] = []
    for start in range(0, u.numel(), chunk):
        places = range(start, min(start + chunk, u.numel()))
        best = sorted((-abs(float(u[i])), i) for i in places if u[i] != 0)[:count]
        chosen += sorted(i for _, i in best)
    return chosen


NUMBERS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(st.lists(NUMBERS, max_size=70), st.integers(2, 40), st.integers(1, 39))
def test_the_largest_of_every_chunk(values: list[float], chunk: int, count: int) -> None:
    u = torch.tensor(values, dtype=torch.float32)
    found = kernels.largest_of_chunks(u, chunk, count)
    assert found.dtype == torch.int64 and found.tolist() == largest_by_hand(u, chunk, count)


def test_of_equal_magnitudes_the_first_and_of_zeros_none() -> None:
    u = torch.tensor([1.0, -1, 1, 0, 0, -0.0, 5, 0, 2e-45, 0, 0, 0])
    assert kernels.largest_of_chunks(u, 4, 2).tolist() == [0, 1, 6, 8]


def test_it_does_not_matter_how_much_is_looked_at_together(monkeypatch: pytest.MonkeyPatch) -> None:
    u = torch.randn(10_007, generator=torch.Generator().manual_seed(0))
    expected = kernels.largest_of_chunks(u, 96, 2)
    monkeypatch.setattr("gradwire.kernels.reference.sparse.LOOKED_AT_TOGETHER", 1000)
    assert torch.equal(kernels.largest_of_chunks(u, 96, 2), expected)


@for_each("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_what_is_sent_and_what_stays_add_up(dtype: torch.dtype) -> None:
    """u = ĝ + e to fp32 rounding, through real frames; and the plain decoder reads them as sparse ones."""
    generator = torch.Generator().manual_seed(1)
    gradient = torch.randn(4096 + 100, generator=generator).to(dtype)
    memory = torch.randn(4196, generator=generator)
    recipe, after = gradwire.recipe("sparseloco"), torch.empty_like(memory)
    frame = encode_into(recipe.codec, gradient, residual=memory, residual_out=after, decay=recipe.decay)
    decoded = gradwire.decode(frame)
    u = gradient.float() + memory * recipe.decay
    torch.testing.assert_close(decoded.float() + after, u, rtol=1e-6, atol=1e-6)
    assert sent_positions(frame).tolist() == largest_by_hand(u, 256, 3)
    assert (
        decoded.dtype == dtype
        and len(set(decoded[decoded != 0].abs().tolist())) == recipe.codec.converter.count_of_levels
    )
    check_same(decoded, plain_decode(frame).tensor)


def test_memory_in_place_is_the_same() -> None:
    gradient, memory = torch.randn(5000), torch.randn(5000)
    codec = gradwire.codec("sparseloco")
    after = torch.empty_like(memory)
    frame = encode_into(codec, gradient, residual=memory, residual_out=after, decay=0.95)
    assert encode_into(codec, gradient, residual=memory, decay=0.95) == frame
    assert torch.equal(memory, after)


def test_what_is_not_finite_travels_as_it_is() -> None:
    gradient, memory = torch.randn(5000), torch.randn(5000)
    gradient[7] = torch.nan
    before, codec = memory.clone(), gradwire.codec("sparseloco")
    frame = encode_into(codec, gradient, residual=memory, decay=0.95)
    assert torch.equal(gradwire.decode(frame).isnan(), gradient.isnan()) and torch.equal(memory, before)


@for_each(
    ("spec", "most"),
    [
        ("sparseloco", 0.11),
        ("sparseloco:k=64,chunk=4096,bits=2", 0.15),  # the paper's own packing takes 14 · 64 / 4096 = 0.219
    ],
)
def test_bits_of_a_round(spec: str, most: float) -> None:
    """Entropy-coded positions and levels of a large tensor whose entries are independent, which is the worst case."""
    codec, x = gradwire.codec(spec), torch.randn(1 << 19, generator=torch.Generator().manual_seed(2))
    bits = 8 * len(codec.encode(x)) / x.numel()
    k, chunk = codec.converter.of_chunk, codec.converter.chunk
    least = math.log2(math.comb(chunk, k)) / chunk  # of the positions alone
    assert least < bits <= most


@for_each("spec", ["sparseloco:k=256", "sparseloco:k=0", "sparseloco:chunk=1", "sparseloco:k=3,chunk=3"])
def test_bad_parameters(spec: str) -> None:
    with pytest.raises(SpecError, match=r"chunk|from 1|from 2"):
        gradwire.recipe(spec)
