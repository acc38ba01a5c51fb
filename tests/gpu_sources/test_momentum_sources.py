"""Velocities and masks of whole messages, by the GPU's kernels on the CPU: what torch computes tensor by tensor."""

from __future__ import annotations

import pytest
import torch

from gradwire.aggregate.messages.device_momentum import MomentumOfMessages
from gradwire.aggregate.messages.frame_coding import MemorySlot
from gradwire.aggregate.messages.tensor_parts import TensorPart
from gradwire.correct.momentum import Factor
from gradwire.correct.worker_memories import WorkerMemories
from support.cuda_on_cpu import cuda_on_cpu

SIZES = [1, 31, 4096, 4097, 10001]
Tensors = dict[str, torch.Tensor]


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal, or as good as that where this machine's torch does not fuse a product with a sum."""
    return torch.equal(a, b) or torch.allclose(a.float(), b.float(), rtol=1e-6, atol=1e-9)


def random(seed: int, dtype: torch.dtype = torch.float32) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {f"t{n}": torch.randn(n, generator=generator).to(dtype) for n in SIZES}


def memories_for(parameters: Tensors, nesterov: bool, decay: float) -> WorkerMemories:
    memories = WorkerMemories()
    memories.take_over_momentum({n: Factor(p, 0.9, nesterov, decay) for n, p in parameters.items()})
    return memories


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("nesterov", "decay"), [(False, 0.0), (True, 0.0), (False, 0.01), (True, 0.01)])
def test_velocities_are_torch_s(dtype: torch.dtype, nesterov: bool, decay: float) -> None:
    parameters = random(0, dtype)
    ours, torchs = (memories_for(parameters, nesterov, decay) for _ in range(2))
    momentum = MomentumOfMessages(ours)
    for step in range(4):
        gradients = random(step + 1, dtype)
        with cuda_on_cpu():
            found = momentum.accelerated(list(gradients.items()))
        for (name, gradient), got in zip(gradients.items(), found, strict=True):
            assert got.dtype == torch.float32
            assert close(got, torchs.accelerated(name, gradient)), (name, step)
        for memories in (ours, torchs):
            memories.rollback() if step == 1 else memories.commit()
    for name, velocity in torchs.velocity.memory.items():
        assert close(ours.velocity.memory[name], velocity)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_means_become_velocities_in_place(dtype: torch.dtype) -> None:
    ours, torchs = (memories_for(random(0), False, 0.0) for _ in range(2))
    for step in range(3):
        means = random(step + 1, dtype)
        want = {name: torchs.accelerated(name, mean).to(dtype) for name, mean in means.items()}
        with cuda_on_cpu():
            MomentumOfMessages(ours).accelerate(list(means.items()))
        assert all(torch.equal(means[name], want[name]) for name in means)
        for memories in (ours, torchs):
            memories.commit()


def test_buffers_are_used_again() -> None:
    memories = memories_for(random(0), False, 0.0)
    momentum, addresses = MomentumOfMessages(memories), []
    for step in range(6):
        with cuda_on_cpu():
            found = momentum.accelerated(list(random(step).items()))
        addresses.append({v.data_ptr() for v in found})
        memories.commit()
    assert addresses[2:4] == addresses[4:6]
    assert not addresses[4] & addresses[5]


def test_nan_and_infinity_stay_what_they_are() -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        mean = torch.tensor([float("nan"), float("inf"), -float("inf"), 1.0], dtype=dtype)
        memories = WorkerMemories()
        memories.take_over_momentum({"a": Factor(torch.ones(4), 0.9, False, 0.0)})
        want = mean.clone()
        with cuda_on_cpu():
            MomentumOfMessages(memories).accelerate([("a", mean)])
        assert torch.equal(mean.nan_to_num(7.0), want.nan_to_num(7.0))


@pytest.mark.parametrize("whole", [True, False])
def test_masks_are_what_was_sent(whole: bool) -> None:
    ours, torchs = (memories_for(random(0), False, 0.0) for _ in range(2))
    momentum, gradients = MomentumOfMessages(ours), random(1)
    sent, generator = [], torch.Generator().manual_seed(5)
    with cuda_on_cpu():
        values = dict(zip(gradients, momentum.accelerated(list(gradients.items())), strict=True))
    for name, tensor in gradients.items():
        torchs.accelerated(name, tensor)
        lo, hi = (0, len(tensor)) if whole else (len(tensor) // 3, len(tensor))
        part = TensorPart(name, tensor, lo, hi)
        before = torch.randn(hi - lo, generator=generator)
        wanted = part.of(values[name]) + before * torch.tensor(0.7)
        is_sent = torch.rand(hi - lo, generator=generator) < 0.2
        after = torch.where(is_sent, torch.zeros(()), wanted)
        sent.append((part, part.of(values[name]), MemorySlot(before, after, 0.5), 1.4))
        torchs.note_sent(name, is_sent, lo)
    with cuda_on_cpu():
        momentum.note_sent(sent)
    for memories in (ours, torchs):
        memories.commit()
    assert all(torch.equal(v, torchs.velocity.memory[name]) for name, v in ours.velocity.memory.items())


def test_what_has_no_kernels_goes_one_by_one() -> None:
    gradient = torch.randn(9, dtype=torch.float64)
    memories = memories_for({"a": torch.ones(9)}, True, 0.1)
    with cuda_on_cpu():
        (found,) = MomentumOfMessages(memories).accelerated([("a", gradient)])
    assert torch.equal(found, memories_for({"a": torch.ones(9)}, True, 0.1).accelerated("a", gradient))
    assert MomentumOfMessages(memories).accelerated([("b", gradient)]) == [gradient]
