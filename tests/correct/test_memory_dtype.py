"""Error memory in bf16, rounded at random: half the room, and nothing is lost on average."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire import ddp
from gradwire.correct.error_memory_by_parameter import ErrorMemory
from gradwire.correct.memory_dtype import keep, memory_dtype
from gradwire.errors import SpecError


@given(st.integers(0, 2**63), st.floats(-(2.0**100), 2.0**100, width=32))
def test_a_number_becomes_one_of_its_two_neighbours(seed: int, value: float) -> None:
    memory = torch.full((64,), float("nan"), dtype=torch.bfloat16)
    keep(torch.full((64,), value), memory, seed)
    bits = torch.tensor(value).view(torch.int32) & -65536
    neighbours = {float(bits.view(torch.float32)), float((bits + 65536).view(torch.float32))}
    assert set(memory.float().tolist()) <= neighbours


def test_the_mean_is_right() -> None:
    values = torch.linspace(-3, 3, 41).repeat_interleave(1 << 14)
    memory = torch.empty_like(values, dtype=torch.bfloat16)
    keep(values, memory, seed=7)
    bias = (memory.float() - values).view(41, -1).mean(1)
    spacing = values.view(41, -1)[:, 0].abs().clamp(min=1e-30) * 2**-7
    assert (bias.abs() < spacing * 0.02).all()  # 5 standard deviations are 0.5 · 5 / 128 of a spacing


def test_small_additions_are_not_lost() -> None:
    """To nearest, 1 + 2⁻¹² is 1 for ever; at random it grows as it should."""
    memory = torch.ones(4096, dtype=torch.bfloat16)
    for step in range(1024):
        keep(memory.float() + 2.0**-12, memory, seed=step)
    assert abs(float(memory.float().mean()) - 1.25) < 0.005


def test_the_same_seed_gives_the_same_memory_and_leaves_generators_alone() -> None:
    values, state = torch.randn(1000), torch.get_rng_state()
    first, second, other = (torch.empty(1000, dtype=torch.bfloat16) for _ in range(3))
    keep(values, first, 1)
    keep(values, second, 1)
    keep(values, other, 2)
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)


def test_nothing_becomes_infinite_and_zero_stays_zero() -> None:
    values = torch.tensor([3.4e38, -3.4e38, 0.0, -0.0, 1e-45])
    memory = torch.empty(5, dtype=torch.bfloat16)
    for seed in range(20):
        keep(values, memory, seed)
        assert memory.isfinite().all()
        assert (memory[2:4] == 0).all()


def test_memory_has_the_dtype_that_was_named() -> None:
    before, after = ErrorMemory(memory_dtype("bf16")).buffers("w", torch.zeros(5))
    assert before.dtype == after.dtype == torch.bfloat16
    with pytest.raises(SpecError, match="fp32"):
        memory_dtype("fp16")
    with pytest.raises(SpecError, match="memory"):
        ddp.State("homomorphic", torch.nn.Linear(2, 2), memory="bf16")
    with pytest.raises(SpecError, match="hierarchical"):
        ddp.State("co3", torch.nn.Linear(2, 2), memory="bf16", aggregate="hierarchical")
