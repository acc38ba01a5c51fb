"""CO3's frames that the GPU's kernels make: what they decode to, what they leave to the memory, how long they are."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import gradwire
from gradwire.convert.minifloat import values
from gradwire.gpu.encoder import MessageEncoder, can_encode, family_of
from gradwire.gpu.families import FrameTask, TensorTask
from gradwire.gpu.presence import NonzeroFinder
from gradwire.gpu.structures import NONFINITE, STATUS
from gradwire.kernels.reference.quantize import to_symbols
from support.device_frames import (
    HOST,
    Make,
    compensated,
    encode,
    encode_on_host,
    frame_task,
    heavy,
    steps_of,
    tensor_tasks,
)

SPECS = ["co3", "co3:format=fp8", "co3:format=e4m3"]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


pytestmark = pytest.mark.usefixtures("kernels_on_cpu")


@pytest.fixture(scope="module")
def encoder() -> MessageEncoder:
    """One for many messages, as in training: scratch and layouts of others must not matter."""
    return MessageEncoder(HOST)


def check(frame: bytes, task: FrameTask) -> None:
    """Check that the frame holds what the reference rounds with the stated steps, and the memory the rest."""
    decoded = gradwire.decode(frame)
    assert decoded.dtype == task.dtype
    assert tuple(decoded.shape) == task.shape
    fmt, segments, _ = steps_of(frame)
    assert [length for length, _ in segments] == [t.gradient.numel() for t in task.tensors]
    parts = decoded.view(-1).float().split([length for length, _ in segments])
    for tensor, part, (_, step) in zip(task.tensors, parts, segments, strict=True):
        u = compensated(tensor, task.decay)
        symbols = to_symbols(u, step, fmt)
        assert torch.equal(part, values(fmt, step, task.dtype)[symbols.long()])
        if tensor.after is not None:
            assert torch.equal(tensor.after, u - part)


def shaped(power: float, scale: float, zeros: float) -> Make:
    """Return numbers |x|^power of a Normal, with a share of zeros."""

    def make(count: int) -> torch.Tensor:
        x = torch.randn(count)
        x = x.sign() * x.abs() ** power * scale
        return torch.where(torch.rand(count) < zeros, 0.0, x).clamp(-3e38, 3e38)

    return make


@given(
    spec=st.sampled_from(SPECS),
    dtype=st.sampled_from(DTYPES),
    sizes=st.lists(st.sampled_from([1, 2, 3, 31, 33, 64, 255, 1025, 4095, 8193]) | st.integers(1, 600), max_size=5),
    joined=st.booleans(),
    power=st.sampled_from([0.3, 1.0, 2.0, 4.0]),
    scale=st.sampled_from([1e-45, 1e-38, 1e-7, 1.0, 300.0, 1e20, 1e37]),
    zeros=st.sampled_from([0.0, 0.5, 0.99, 1.0]),
    remembers=st.booleans(),
    offset=st.sampled_from([0, 0, 1, 3]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=30)
@example("co3", torch.float32, [3, 4095, 1, 17], True, 2.0, 1.0, 0.0, True, 1, 0)
@example("co3:format=fp8", torch.float16, [8193], False, 2.0, 300.0, 0.5, True, 0, 1)
def test_frames_hold_what_the_reference_rounds(
    encoder: MessageEncoder, spec: str, dtype: torch.dtype, sizes: list[int], joined: bool, power: float,
    scale: float, zeros: float, remembers: bool, offset: int, seed: int,
) -> None:  # fmt: skip
    torch.manual_seed(seed)
    scale = min(scale, 1e3) if dtype == torch.float16 else scale
    tensors = tensor_tasks(sizes or [1], shaped(power, scale, zeros), dtype, remembers, offset)
    for tensor in tensors:  # as a rule, gradients are finite
        tensor.gradient.nan_to_num_(posinf=1.0, neginf=-1.0)
    tasks = [frame_task(spec, tensors)] if joined else [frame_task(spec, [tensor]) for tensor in tensors]
    for frame, task in zip(encode(tasks, encoder), tasks, strict=True):
        check(frame, task)


ORDINARY = [
    pytest.param(spec, dtype, marks=[] if i == j else [pytest.mark.thorough])
    for i, spec in enumerate(SPECS)
    for j, dtype in enumerate(DTYPES)
]


@pytest.mark.parametrize(("spec", "dtype"), ORDINARY)
def test_ordinary_frames_are_those_of_the_host(encoder: MessageEncoder, spec: str, dtype: torch.dtype) -> None:
    """The same steps and the same memory, and hardly more bytes."""
    torch.manual_seed(1)
    groups: Sequence[Sequence[int]] = [[10_000], [300, 21, 5, 4001], [70_001]]
    makes = [heavy, torch.randn, lambda n: heavy(n) * (torch.rand(n) < 0.3)]
    tasks = [frame_task(spec, tensor_tasks(sizes, make, dtype)) for sizes, make in zip(groups, makes, strict=True)]
    for frame, task in zip(encode(tasks, encoder), tasks, strict=True):
        check(frame, task)
        other, memory = encode_on_host(spec, task)
        assert steps_of(frame)[:2] == steps_of(other)[:2]
        assert memory is not None
        assert torch.equal(torch.cat([t.after for t in task.tensors if t.after is not None]), memory)
        assert len(frame) <= len(other) * 1.02 + 64


@pytest.mark.parametrize("spec", ["co3", pytest.param("co3:format=fp8", marks=pytest.mark.thorough)])
def test_nearly_empty_tensors_are_looked_at_whole(spec: str) -> None:
    """The sample of a large tensor may miss the few entries that are not zero."""
    torch.manual_seed(2)
    for few in (0, 1, 300):
        gradient = torch.zeros(150_001)
        gradient[torch.randint(150_001, (few,))] = heavy(few) + 3
        task = frame_task(spec, [TensorTask(gradient, torch.zeros(150_001), torch.full((150_001,), float("nan")))])
        [frame] = encode([task])
        check(frame, task)
        other, memory = encode_on_host(spec, task)
        assert steps_of(frame)[:2] == steps_of(other)[:2]
        assert memory is not None and task.tensors[0].after is not None
        assert torch.equal(task.tensors[0].after, memory)
        assert len(frame) <= len(other) * 1.02 + 64 + 2 * 3 * 64  # a GPU has more lanes, whatever the symbols cost


def test_a_message_of_many_tensors() -> None:
    """Of different dtypes, formats and sizes, some of which share frames."""
    torch.manual_seed(3)
    tasks = []
    for i in range(24):
        sizes = [1 + (97 * i + 13 * j) % 1500 for j in range(1 + i % 4)]
        tasks.append(frame_task(SPECS[i % 3], tensor_tasks(sizes, heavy, DTYPES[i % 3], i % 5 != 0, i % 2)))
    tasks.append(FrameTask(tasks[0].converter, tensor_tasks([24]), (2, 1, 3, 4)))
    for frame, task in zip(encode(tasks), tasks, strict=True):
        check(frame, task)


def test_factors_of_memories() -> None:
    """A tensor may have a decay of its own."""
    torch.manual_seed(4)
    tensors = tensor_tasks([500, 41])
    tensors[1].factor = 0.5
    task = frame_task("co3", tensors)
    [frame] = encode([task])
    for tensor, part in zip(tensors, gradwire.decode(frame).split([500, 41]), strict=True):
        assert tensor.after is not None
        assert torch.equal(tensor.after, compensated(tensor, task.decay * tensor.factor) - part)


BAD = [
    pytest.param(bad, dtype, at, marks=[] if i == j == k else [pytest.mark.thorough])
    for i, bad in enumerate((float("nan"), float("inf"), -float("inf")))
    for j, dtype in enumerate(DTYPES)
    for k, at in enumerate((0, 9000, 2))
]


@pytest.mark.parametrize(("bad", "dtype", "at"), BAD)
def test_what_is_not_finite_is_flagged(encoder: MessageEncoder, bad: float, dtype: torch.dtype, at: int) -> None:
    torch.manual_seed(5)
    tensors = tensor_tasks([100, 9001], heavy, dtype)
    out = torch.empty(40_000, dtype=torch.uint8)
    task = frame_task("co3", tensors)
    assert encoder.encode([task], out).wait() is not None
    tensors[1].gradient[at] = bad
    encoded = encoder.encode([task], out)
    assert encoded.wait() is None
    assert encoded.nonfinite
    assert int(encoded.layout.status.numpy().view(STATUS)[0]["bits"]) & NONFINITE
    tensors[1].gradient[at] = 1.0  # and what comes after it is as usual again
    [frame] = encode([task], encoder)
    check(frame, task)


def test_messages_that_are_too_long_are_left_to_the_host(encoder: MessageEncoder) -> None:
    torch.manual_seed(6)
    task, out = frame_task("co3", tensor_tasks([5000])), torch.full((2000,), 0xAA, dtype=torch.uint8)
    encoded = encoder.encode([task], out[:300])
    assert encoded.wait() is None and not encoded.nonfinite
    assert bool((out[300:] == 0xAA).all())


@pytest.mark.parametrize("spec", ["co3:rounding=stochastic", "co3:coder=huffman", "co3:format=e3m3b3"])
def test_rare_options_stay_on_the_host(spec: str) -> None:
    converter = gradwire.codec(spec).converter
    assert family_of(converter) is None
    assert not can_encode(converter, torch.float32, HOST)


def test_other_dtypes_stay_on_the_host() -> None:
    assert can_encode(gradwire.codec("co3").converter, torch.bfloat16, HOST)
    assert not can_encode(gradwire.codec("co3").converter, torch.float64, HOST)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_that_are_not_zero_are_found(dtype: torch.dtype) -> None:
    finder, sizes = NonzeroFinder(HOST), [1, 2, 255, 4096, 4097, 9001]
    for at in (0, 1, -1):
        tensors = [torch.zeros(2 * n + 1, dtype=dtype)[1 : n + 1] for n in sizes for _ in range(2)]
        for tensor in tensors[1::2]:
            tensor[max(at, -len(tensor)) if at < 0 else min(at, len(tensor) - 1)] = 1e-7
        tensors.append(-torch.zeros(5000, dtype=dtype))
        tensors.append(torch.full((3,), float("nan"), dtype=dtype))
        assert finder.find(tensors) == [False, True] * len(sizes) + [False, True]
