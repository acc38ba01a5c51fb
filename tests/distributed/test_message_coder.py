"""The messages of one rank, without other ranks: random numbers of its own, and blocks that belong to their keys."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

import gradwire
from gradwire.aggregate.messages.message_coder import MessageCoder
from gradwire.aggregate.messages.model_recipes import ModelRecipes
from gradwire.aggregate.messages.step_ledger import StepLedger
from gradwire.aggregate.messages.tensor_parts import TensorPart, whole_tensors
from gradwire.aggregate.transport.message_prefix import PREFIX
from gradwire.correct.worker_memories import WorkerMemories
from support.cuda_on_cpu import cuda_on_cpu
from support.helpers import gradient

STOCHASTIC = ["qsgd", "terngrad", "orq", "co3:rounding=stochastic"]


def coder(spec: str, rank: int = 0, dtype: torch.dtype = torch.float32) -> MessageCoder:
    return MessageCoder(ModelRecipes(spec), WorkerMemories(dtype), StepLedger(), rank, world=3)


def message(by: MessageCoder, name: str, tensor: torch.Tensor) -> bytes:
    block, length = by.encode("key", by.plan(whole_tensors([(name, tensor)])))
    return bytes(block[PREFIX : PREFIX + length].numpy())


@pytest.mark.parametrize("spec", STOCHASTIC)
def test_random_numbers_differ_between_ranks_steps_and_parameters(spec):
    """Ranks that round alike would not average their errors out; a repeated run must round as the first one did."""
    tensor = gradient(5000)
    first = message(coder(spec), "weight", tensor)
    assert message(coder(spec), "weight", tensor) == first
    assert message(coder(spec, rank=1), "weight", tensor) != first
    assert message(coder(spec), "bias", tensor) != first
    later = coder(spec)
    later.end_step()
    assert message(later, "weight", tensor) != first


def test_a_message_under_way_is_not_overwritten_by_one_with_another_key():
    by, tensors = coder("co3"), [gradient(5000, seed=seed) for seed in range(3)]
    blocks = [by.encode(("bucket", i), by.plan(whole_tensors([(str(i), t)]))) for i, t in enumerate(tensors)]
    for (block, length), tensor in zip(blocks, tensors, strict=True):
        decoded = gradwire.decode(block[PREFIX : PREFIX + length])
        assert torch.equal(decoded, gradwire.decode(gradwire.codec("co3").encode(tensor)))


def test_what_was_sent_and_what_is_remembered_is_what_came_in():
    by, tensor = coder("co3:decay=1"), gradient(9000)
    sent = torch.zeros(9000, dtype=torch.float64)
    for _ in range(5):
        sent += gradwire.decode(message(by, "weight", tensor)).double()
        by.end_step()
    remembered = by.memories.errors.memory["weight"].double()
    torch.testing.assert_close(sent + remembered, 5 * tensor.double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("emulated", [False, True])
@pytest.mark.parametrize("spec", ["co3:decay=1", "topk:p=0.01"])
def test_memory_in_bf16_loses_nothing_on_average(spec, emulated):
    """By the host's codecs and by the GPU's kernels; with topk most entries are added up for many steps."""
    by, tensor = coder(spec, dtype=torch.bfloat16), gradient(9000)
    sent, steps = torch.zeros(9000, dtype=torch.float64), 40
    with cuda_on_cpu() if emulated else nullcontext():
        for _ in range(steps):
            sent += gradwire.decode(message(by, "weight", tensor)).double()
            by.end_step()
    memory = by.memories.errors.memory["weight"]
    assert memory.dtype == torch.bfloat16
    lost = steps * tensor.double() - sent - memory.double()
    size = memory.double().abs().mean()
    assert lost.mean().abs() < 0.01 * size
    assert lost.abs().mean() < 0.02 * size * steps**0.5


@pytest.mark.parametrize("finite", [True, False])
def test_the_memory_of_a_step_counts_only_if_all_ranks_were_finite(finite):
    by = coder("co3")
    message(by, "weight", gradient(9000))
    by.ledger.note_finite(finite)
    by.end_step()
    assert bool(by.memories.errors.memory["weight"].any()) == finite
    assert by.ledger.finite and by.ledger.steps == 1


def test_parts_cover_a_tensor_without_overlap():
    tensor = torch.zeros(100_003)
    for count, aligned in ((1, 64), (3, 64), (7, 4096), (1000, 64)):
        parts = TensorPart("x", tensor, 0, tensor.numel()).cut(count, aligned)
        assert [p.lo for p in parts[1:]] == [p.hi for p in parts[:-1]] and len(parts) <= count
        assert (parts[0].lo, parts[-1].hi) == (0, tensor.numel())
        assert all(p.lo % aligned == 0 for p in parts)
