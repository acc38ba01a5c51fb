"""ECQ's kernels for GPUs, run on the CPU: frames decode to what the memory says, and are as good as the CPU's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

import gradwire
from gradwire import kernels
from gradwire.frame import headers
from gradwire.gpu.encoder import MessageEncoder, can_encode
from gradwire.gpu.families import FrameTask, TensorTask
from gradwire.gpu.structures import NONFINITE, STATUS
from support.cuda_on_cpu import cuda_on_cpu

CPU = torch.device("cpu")
DECAY = 0.9


@pytest.fixture(scope="module")
def encoder() -> Iterator[MessageEncoder]:
    with cuda_on_cpu():
        yield MessageEncoder(CPU)


def normal(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def peaked(n: int, seed: int = 0) -> torch.Tensor:
    """Entries with a tail, as gradients have it: some are outliers of any grid."""
    return normal(n, seed) * normal(n, seed + 1)


def heavy(n: int, seed: int = 0) -> torch.Tensor:
    return normal(n, seed) * normal(n, seed + 1).abs() ** 3


def task_of(codec: gradwire.Codec, gradients: Sequence[torch.Tensor], memories: bool = True) -> FrameTask:
    tensors = []
    for k, g in enumerate(gradients):
        before = normal(g.numel(), 77 + k) * 0.1 * float(g.double().square().mean().sqrt())
        tensors.append(TensorTask(g, before, torch.full_like(before, math.nan)) if memories else TensorTask(g))
    return FrameTask(codec.converter, tensors, (sum(g.numel() for g in gradients),), DECAY)


def there(memory: torch.Tensor | None) -> torch.Tensor:
    assert memory is not None
    return memory


def encode(encoder: MessageEncoder, tasks: Sequence[FrameTask]) -> list[bytes] | None:
    out = torch.full((sum(9 * t.count + 1024 for t in tasks),), 0xAA, dtype=torch.uint8)
    length = encoder.encode(tasks, out).wait()
    return None if length is None else [bytes(f) for f in headers.split(memoryview(out[:length].numpy()))]


def compensated(task: FrameTask) -> torch.Tensor:
    parts = []
    for t in task.tensors:
        u = t.gradient.float()
        parts.append(u if t.before is None else u + t.before * DECAY)
    return torch.cat(parts)


def checked(encoder: MessageEncoder, tasks: Sequence[FrameTask]) -> list[bytes]:
    """Encode; every frame must decode to what the new memory leaves out, exactly."""
    frames = encode(encoder, tasks)
    assert frames is not None and len(frames) == len(tasks)
    for frame, task in zip(frames, tasks, strict=True):
        decoded = gradwire.decode(frame)
        assert decoded.dtype == task.dtype
        if task.tensors[0].after is not None:
            after = torch.cat([t.after for t in task.tensors if t.after is not None])
            assert torch.equal(after, compensated(task) - decoded.float())
    return frames


def of_cpu(codec: gradwire.Codec, task: FrameTask) -> tuple[int, float]:
    """Return length and squared error of the CPU's frame."""
    gradient = torch.cat([t.gradient for t in task.tensors])
    memory = torch.cat([t.before for t in task.tensors if t.before is not None])
    after, out = torch.empty_like(memory), torch.empty(codec.max_frame_bytes(gradient), dtype=torch.uint8)
    segments = [t.gradient.numel() for t in task.tensors] if len(task.tensors) > 1 else ()
    length = codec.encode_into(gradient, out, residual=memory, residual_out=after, decay=DECAY, segments=segments)
    return length, float(after.double().square().sum())


def error_of(task: FrameTask) -> float:
    return sum(float(t.after.double().square().sum()) for t in task.tensors if t.after is not None)


def assert_as_good(codec: gradwire.Codec, task: FrameTask, frame: bytes) -> None:
    """A frame may be shorter and its error larger, or the other way round: a factor of four is a bit an entry."""
    length, error = of_cpu(codec, task)
    assert len(frame) < 1.02 * length + 8
    # Lanes for a GPU take half a hundredth.
    saved = max(8 * (1.005 * length - len(frame)), 8 * 0.005 * length) / task.count
    assert error_of(task) < 1.03 * error * 4**saved


@pytest.mark.parametrize("draw", [normal, peaked, heavy])
@pytest.mark.parametrize("size", [1, 2, 31, 33, 4095, 65537])
def test_frames_decode_and_are_as_good_as_the_cpus(
    encoder: MessageEncoder, draw: Callable[[int], torch.Tensor], size: int
) -> None:
    codec = gradwire.codec("ecq")
    task = task_of(codec, [draw(size)])
    (frame,) = checked(encoder, [task])
    if size > 1000:
        assert_as_good(codec, task, frame)


@pytest.mark.parametrize("rate", [0.05, 0.5, 1.0, 3.0, 5.0, 8.0])
def test_rates_are_met(encoder: MessageEncoder, rate: float) -> None:
    codec = gradwire.codec(f"ecq:rate={rate}")
    task = task_of(codec, [peaked(30011)])
    (frame,) = checked(encoder, [task])
    assert_as_good(codec, task, frame)
    assert len(frame) == pytest.approx(rate * task.count / 8, rel=0.02, abs=40)


@pytest.mark.parametrize("nmse", [1e-4, 0.003, 0.05, 0.5])
@pytest.mark.parametrize("size", [3000, 70001])
def test_errors_are_met(encoder: MessageEncoder, size: int, nmse: float) -> None:
    codec = gradwire.codec(f"ecq:nmse={nmse}")
    task = task_of(codec, [peaked(size)])
    (frame,) = checked(encoder, [task])
    length, error = of_cpu(codec, task)
    assert error_of(task) < 1.04 * error
    assert len(frame) < 1.02 * length + size / 1024 + 8
    checked(encoder, [task_of(codec, [heavy(300), torch.zeros(20), peaked(2000, 3)])])
    checked(encoder, [task_of(codec, [torch.zeros(size)], memories=False)])


@pytest.mark.parametrize("scale", [1e-42, 1e-38, 1e-20, 1e20, 1e37])
def test_any_scale(encoder: MessageEncoder, scale: float) -> None:
    checked(encoder, [task_of(gradwire.codec("ecq"), [normal(3000) * scale])])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_small_dtypes(encoder: MessageEncoder, dtype: torch.dtype) -> None:
    checked(encoder, [task_of(gradwire.codec("ecq"), [peaked(5001).to(dtype), heavy(77, 5).to(dtype)])])
    checked(encoder, [task_of(gradwire.codec("ecq"), [normal(9000).mul(3e4).clamp(-65504, 65504).to(dtype)])])


def test_zeros_and_constants(encoder: MessageEncoder) -> None:
    codec = gradwire.codec("ecq")
    for gradient in (torch.zeros(5000), torch.zeros(70000), torch.full((5000,), 0.37), normal(5000).sign()):
        for memories in (True, False):
            frames = checked(encoder, [task_of(codec, [gradient], memories)])
            if not memories and not gradient.any():
                assert not gradwire.decode(frames[0]).any()


@pytest.mark.parametrize(("size", "share"), [(20000, 0.02), (150000, 0.004), (150000, 0.00002)])
def test_sparse_gradients(encoder: MessageEncoder, size: int, share: float) -> None:
    gradient = normal(size) * (torch.rand(size, generator=torch.Generator().manual_seed(1)) < share)
    (frame,) = checked(encoder, [task_of(gradwire.codec("ecq"), [gradient], memories=False)])
    assert torch.allclose(gradwire.decode(frame), gradient, rtol=1e-3, atol=1e-5)


def test_segments(encoder: MessageEncoder) -> None:
    codec = gradwire.codec("ecq")
    sizes = [300, 20, 5, 1, 4000, 1000, 64, 33, 9000, 17]
    gradients = [peaked(n, k) * 10.0 ** (k - 5) for k, n in enumerate(sizes)]
    gradients[3] = torch.zeros(1)
    task = task_of(codec, gradients)
    (frame,) = checked(encoder, [task])
    length, _ = of_cpu(codec, task)
    assert len(frame) < 1.02 * length + 8
    for t in task.tensors:  # every tensor is as good by itself
        u, left = t.gradient + there(t.before) * DECAY, there(t.after)
        if t.gradient.numel() > 200:
            assert float(left.square().sum()) < 0.12 * float(u.square().sum())


def test_segments_of_all_zeros(encoder: MessageEncoder) -> None:
    (frame,) = checked(encoder, [task_of(gradwire.codec("ecq"), [torch.zeros(50), torch.zeros(7)], memories=False)])
    assert not gradwire.decode(frame).any()


def test_many_frames_in_one_message(encoder: MessageEncoder) -> None:
    codec, other = gradwire.codec("ecq"), gradwire.codec("co3")
    tasks = [task_of(codec, [peaked(n, n)]) for n in (4096, 10000, 1, 70001, 33)]
    tasks.append(task_of(codec, [heavy(100, k) for k in range(40)]))
    tasks.insert(2, task_of(other, [peaked(3000)]))
    alone = [checked(encoder, [task])[0] for task in tasks]
    assert checked(encoder, tasks) == alone


def test_misaligned_tensors_in_place(encoder: MessageEncoder) -> None:
    codec = gradwire.codec("ecq")
    expected = task_of(codec, [peaked(20001)])
    (frame,) = checked(encoder, [expected])
    gradient, memory = torch.empty(20002)[1:], torch.empty(20003)[2:]
    gradient.copy_(expected.tensors[0].gradient)
    memory.copy_(there(expected.tensors[0].before))
    task = FrameTask(codec.converter, [TensorTask(gradient, memory, memory)], (20001,), DECAY)
    assert encode(encoder, [task]) == [frame]
    assert torch.equal(memory, there(expected.tensors[0].after))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nonfinite_gradients_are_left_to_the_host(encoder: MessageEncoder, value: float) -> None:
    gradient = peaked(70000)
    gradient[12345] = value
    task = task_of(gradwire.codec("ecq"), [gradient], memories=False)
    encoded = encoder.encode([task], torch.empty(9 * task.count, dtype=torch.uint8))
    assert encoded.wait() is None and encoded.nonfinite
    assert int(encoded.layout.status.numpy().view(STATUS)[0]["bits"]) & NONFINITE


def test_too_many_outliers_are_left_to_the_host(encoder: MessageEncoder) -> None:
    size = 300000
    sampled = kernels.sample(torch.arange(size, dtype=torch.float32), None, 0.0).long()
    gradient = torch.full((size,), 500.0)  # what the sample does not see
    gradient[sampled] = normal(len(sampled))
    task = task_of(gradwire.codec("ecq"), [gradient], memories=False)
    encoded = encoder.encode([task], torch.empty(9 * size, dtype=torch.uint8))
    assert encoded.wait() is None and not encoded.nonfinite


def test_which_converters_have_kernels(encoder: MessageEncoder) -> None:
    def takes(spec: str) -> bool:
        return can_encode(gradwire.codec(spec).converter, torch.float32, CPU)

    assert takes("ecq") and takes("ecq:rate=1.5") and takes("ecq:nmse=0.01")
    assert not takes("ecq:rounding=stochastic")
