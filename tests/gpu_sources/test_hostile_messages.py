"""Messages that no rank would send, averaged by the kernels for GPUs, run on the CPU: they are left to the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

import gradwire
from gradwire.frame import headers
from gradwire.gpu.decoder import FrameTarget, MessageDecoder
from gradwire.gpu.encoder import MessageEncoder
from gradwire.gpu.families import FrameTask, TensorTask
from support.cuda_on_cpu import cuda_on_cpu
from support.helpers import assemble, repair

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def gpu() -> Iterator[None]:
    with cuda_on_cpu():
        yield


def numbers(count: int, seed: int = 0) -> torch.Tensor:
    x = torch.randn(count, generator=torch.Generator().manual_seed(seed))
    return x * x.abs()


def frame_of(codec: gradwire.Codec, sizes: Sequence[int], seed: int = 0) -> bytes:
    """Return a frame of the kernels, with a segment for each size."""
    tensors = [TensorTask(numbers(n, seed + i) * 10.0**i) for i, n in enumerate(sizes)]
    out = torch.empty(4 * sum(sizes) + 8192, dtype=torch.uint8)
    length = MessageEncoder(CPU).encode([FrameTask(codec.converter, tensors, (sum(sizes),))], out).wait()
    assert length is not None
    return bytes(out[:length].numpy())


def message(data: bytes) -> torch.Tensor:
    """Return the bytes of a message; those behind it may be loaded, as a word has four, but do not count."""
    return torch.frombuffer(bytearray(data + bytes(64)), dtype=torch.uint8)[: len(data)]


def averages(codec: gradwire.Codec, sizes: Sequence[int], *messages: bytes) -> bool:
    """Tell whether the kernels make a mean of these messages."""
    target = FrameTarget(codec.converter, [torch.empty(n) for n in sizes])
    present = [[True] * len(sizes)] * len(messages)
    return MessageDecoder(CPU).average([target], [message(m) for m in messages], present, 1 / len(messages)).wait()


@pytest.mark.parametrize("spec", ["co3", "ecq", "stc", "qsgd"])
def test_bytes_behind_the_last_frame(spec: str) -> None:
    codec = gradwire.codec(spec)
    frame = frame_of(codec, [3000])
    assert averages(codec, [3000], frame, frame)
    for more in (frame, b"\0", frame[:20]):
        assert not averages(codec, [3000], frame + more, frame)
        assert not averages(codec, [3000], frame, frame + more)


def test_bytes_of_a_rank_that_has_no_frame() -> None:
    codec = gradwire.codec("co3")
    frame = frame_of(codec, [3000])
    target = FrameTarget(codec.converter, [torch.empty(3000)])
    decoder, present = MessageDecoder(CPU), [[True], [False]]
    for more, expected in ((b"", True), (frame, False), (b"", True)):
        assert decoder.average([target], [message(frame), message(more)], present, 0.5).wait() == expected


@pytest.mark.parametrize("spec", ["co3", "ecq", "qsgd"])
def test_segments_of_other_lengths(spec: str) -> None:
    """They add up, but each has a step of its own, which would be another's."""
    codec = gradwire.codec(spec)
    frame = frame_of(codec, [1000, 300, 700])
    assert averages(codec, [1000, 300, 700], frame)
    assert not averages(codec, [700, 300, 1000], frame)
    assert not averages(codec, [1000, 299, 701], frame)


def test_a_shape_whose_product_overflows() -> None:
    codec = gradwire.codec("co3")
    frame = frame_of(codec, [3000])
    header = headers.read_header(memoryview(frame))
    payload, odd = frame[header.length :], 2**40 + 15
    shape = (odd, 3000 * pow(odd, -1, 2**64) % 2**64)
    if shape[1] >= 2**63:  # more than a varint may have
        shape = (odd, shape[1] // 2, 2)
    assert shape[0] * shape[1] * (shape[2] if len(shape) > 2 else 1) % 2**64 == 3000
    assert averages(codec, [3000], assemble(payload, (3, 1000), header.codec))
    assert not averages(codec, [3000], assemble(payload, shape, header.codec))


def test_nothing_is_left_of_the_message_before() -> None:
    """Where not even a header can be read, what the last message left behind in the scratch must not be used."""
    codec = gradwire.codec("stc")
    frame = frame_of(codec, [100000])
    decoder, target = MessageDecoder(CPU), FrameTarget(codec.converter, [torch.empty(100000)])
    good, bad = message(frame), message(repair(b"XW" + frame[2:]))
    assert decoder.average([target], [good], [[True]], 1.0).wait()
    scratch = decoder.workspace.room("own", 0)
    before = scratch.clone()
    good.fill_(0x5A)  # its memory is somebody else's now
    assert not decoder.average([target], [bad], [[True]], 1.0).wait()
    assert torch.equal(scratch, before)
