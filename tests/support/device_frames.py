"""Frames that kernels for GPUs make, beside those of the host's codecs, for tests under `cuda_on_cpu`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

import gradwire
from gradwire import codecs
from gradwire.convert.minifloat import read_format
from gradwire.convert.segments import Segments, read_step
from gradwire.cuda_runtime.launcher import Kernel
from gradwire.frame import headers
from gradwire.frame.byte_fields import Reader
from gradwire.frame.headers import SEGMENTED
from gradwire.gpu.encoder import MessageEncoder
from gradwire.gpu.families import FrameTask, TensorTask
from gradwire.small_float_formats import Format
from support.cuda_on_cpu import CudaOnCpu

HOST = torch.device("cpu")
DECAY = 0.75
POISON = 0xAA
Make = Callable[[int], torch.Tensor]


def heavy(count: int) -> torch.Tensor:
    """Return numbers with heavier tails than a Normal."""
    x = torch.randn(count)
    return x * x.abs()


def tensor_tasks(
    sizes: Sequence[int], make: Make = heavy, dtype: torch.dtype = torch.float32, remembers: bool = True,
    offset: int = 0,
) -> list[TensorTask]:  # fmt: skip
    """Return tensors that begin `offset` entries behind where they were allocated, and a poisoned new memory."""
    tasks = []
    for size in sizes:
        gradient = make(size + offset).to(dtype)[offset:]
        before = (make(size + offset) * 0.1)[offset:] if remembers else None
        after = torch.full((size + offset,), float("nan"))[offset:] if remembers else None
        tasks.append(TensorTask(gradient, before, after))
    return tasks


def frame_task(spec: str, tensors: Sequence[TensorTask]) -> FrameTask:
    """Return the task of one frame with these tensors."""
    return FrameTask(gradwire.codec(spec).converter, tensors, (sum(t.gradient.numel() for t in tensors),), DECAY)


def encode(tasks: Sequence[FrameTask], encoder: MessageEncoder | None = None) -> list[bytes]:
    """Return the frames that the kernels make, which are the same when made again, and write nothing behind them."""
    encoder, messages = encoder or MessageEncoder(HOST), []
    for _ in range(2):
        out = torch.full((sum(4 * task.count + 4096 for task in tasks),), POISON, dtype=torch.uint8)
        for tensor in (t for task in tasks for t in task.tensors):
            if tensor.after is not None:
                tensor.after.fill_(float("nan"))
        length = encoder.encode(tasks, out).wait()
        assert length is not None
        assert bool((out[length:] == POISON).all())
        messages.append(bytes(out[:length].numpy()))
    assert messages[0] == messages[1]
    return [bytes(frame) for frame in headers.split(memoryview(messages[0]))]


def encode_on_host(spec: str, task: FrameTask) -> tuple[bytes, torch.Tensor | None]:
    """Return the frame that the host's codec makes of a task, and the new memory."""
    codec = gradwire.codec(spec)
    gradient = torch.cat([t.gradient for t in task.tensors])
    before = [t.before for t in task.tensors if t.before is not None]
    memory = torch.cat(before) if before else None
    after = torch.full_like(memory, float("nan")) if memory is not None else None
    out = torch.empty(codec.max_frame_bytes(gradient) + 4096, dtype=torch.uint8)
    segments = [t.gradient.numel() for t in task.tensors] if len(task.tensors) > 1 else ()
    length = codec.encode_into(
        gradient, out, residual=memory, residual_out=after, decay=task.decay, segments=segments
    )  # fmt: skip
    return bytes(out[:length].numpy()), after


def compensated(tensor: TensorTask, decay: float) -> torch.Tensor:
    """Return u = g + decay·e of a tensor, limited to finite numbers."""
    u = tensor.gradient.float()
    if tensor.before is None:
        return u
    most = torch.finfo(torch.float32).max
    return (u + tensor.before * torch.tensor(decay)).clamp(-most, most)


def steps_of(frame: bytes) -> tuple[Format, list[tuple[int, float]], Reader]:
    """Return the format of a minifloat frame, (length, step) of its segments, and the reader at the coding byte."""
    header, payload = codecs.open_frame(np.frombuffer(frame, dtype=np.uint8))
    reader = Reader(memoryview(payload))
    fmt = read_format(reader)
    if header.flags & SEGMENTED:
        return fmt, list(Segments(reader, header.elements)), reader
    return fmt, [(header.elements, read_step(reader))], reader


def arrived(message: bytes) -> torch.Tensor:
    """Return a message as a tensor of bytes, with poison behind it."""
    return torch.frombuffer(bytearray(message + bytes([POISON]) * 64), dtype=torch.uint8)[: len(message)]


def kernels_of(source: str, *names: str) -> list[Kernel]:
    """Return kernels of a program that a test wrote."""
    backend = CudaOnCpu()
    program = backend.load(source, "of_a_test.cu", HOST)
    return [backend.kernel(program, name, HOST) for name in names]
