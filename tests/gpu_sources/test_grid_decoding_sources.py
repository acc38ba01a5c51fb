"""The mean of grid frames by the kernels for GPUs, run on the CPU: it is the host's, bit for bit."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

import gradwire
from gradwire.codecs.decoding import as_bytes, decode_payload, open_frame
from gradwire.errors import FrameError
from gradwire.frame import headers
from gradwire.gpu.decoder import FrameTarget, MessageDecoder
from gradwire.gpu.encoder import MessageEncoder
from gradwire.gpu.families import FrameTask, TensorTask
from support.cuda_on_cpu import cuda_on_cpu

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def decoder() -> Iterator[MessageDecoder]:
    with cuda_on_cpu():
        yield MessageDecoder(CPU)


def normal(n: int, seed: int) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def peaked(n: int, seed: int) -> torch.Tensor:
    return normal(n, seed) * normal(n, seed + 1000)


def heavy(n: int, seed: int) -> torch.Tensor:
    return normal(n, seed) * normal(n, seed + 1000).abs() ** 3


def sparse(n: int, seed: int) -> torch.Tensor:
    return normal(n, seed) * (torch.rand(n, generator=torch.Generator().manual_seed(seed)) < 0.02)


def frame_of(codec: gradwire.Codec, gradients: Sequence[torch.Tensor]) -> bytes:
    joined = torch.cat(list(gradients))
    out = torch.empty(codec.max_frame_bytes(joined), dtype=torch.uint8)
    segments = [g.numel() for g in gradients] if len(gradients) > 1 else ()
    return bytes(out[: codec.encode_into(joined, out, segments=segments)].numpy())


def message(frames: Sequence[bytes], shift: int = 0) -> torch.Tensor:
    """Put frames at an address that need not be a multiple of anything."""
    data = b"".join(frames)
    return torch.frombuffer(bytearray(bytes(shift) + data + bytes(16)), dtype=torch.uint8)[shift : shift + len(data)]


def host_mean(frames: Sequence[bytes], weight: float) -> torch.Tensor:
    out = torch.empty(0)
    for rank, frame in enumerate(frames):
        header, payload = open_frame(as_bytes(frame))
        out = torch.empty(header.elements, dtype=header.dtype) if not rank else out
        decode_payload(header, payload, out, weight, rank > 0)
    return out


def mean(decoder: MessageDecoder, codec: gradwire.Codec, sizes: Sequence[int], frames: Sequence[bytes], weight: float,
         dtype: torch.dtype = torch.float32) -> torch.Tensor | None:  # fmt: skip
    outs = [torch.full((n,), torch.nan, dtype=dtype) for n in sizes]
    messages = [message([frame], rank) for rank, frame in enumerate(frames)]
    present = [[True] * len(sizes)] * len(frames)
    decoded = decoder.average([FrameTarget(codec.converter, outs)], messages, present, weight)
    return torch.cat(outs) if decoded.wait() else None


@pytest.mark.parametrize("draw", [normal, peaked, heavy, sparse])
@pytest.mark.parametrize("size", [9, 33, 4095, 4097, 100003])
def test_the_mean_is_the_hosts(decoder: MessageDecoder, draw: Callable[[int, int], torch.Tensor], size: int) -> None:
    codec = gradwire.codec("ecq")
    for ranks, weight in ((1, 1.0), (3, 1 / 3)):
        frames = [frame_of(codec, [draw(size, rank)]) for rank in range(ranks)]
        result = mean(decoder, codec, [size], frames, weight)
        assert result is not None and torch.equal(result, host_mean(frames, weight))


@pytest.mark.parametrize("rate", [0.1, 1.0, 4.0, 8.0])
def test_other_rates(decoder: MessageDecoder, rate: float) -> None:
    codec = gradwire.codec(f"ecq:rate={rate}")
    frames = [frame_of(codec, [peaked(20000, rank)]) for rank in range(2)]
    result = mean(decoder, codec, [20000], frames, 0.5)
    assert result is not None and torch.equal(result, host_mean(frames, 0.5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_segments_and_dtypes(decoder: MessageDecoder, dtype: torch.dtype) -> None:
    codec, sizes = gradwire.codec("ecq"), [300, 20, 5, 4000, 1, 9000, 64]
    frames = [
        frame_of(codec, [(heavy(n, 10 * rank + k) * 10.0 ** (k - 5)).to(dtype) for k, n in enumerate(sizes)])
        for rank in range(3)
    ]
    result = mean(decoder, codec, sizes, frames, 1 / 3, dtype)
    assert result is not None and torch.equal(result, host_mean(frames, 1 / 3))


def clusters(n: int, seed: int) -> torch.Tensor:
    """Entries whose outliers stand close together, with a long way between: codes of many zeros."""
    x = normal(n, seed)
    for first in (0, n // 2, n - 400):
        x[first : first + 400] *= 400.0
    return x


def periodic(n: int, seed: int) -> torch.Tensor:
    """Entries whose outliers all have the same code, which wrong starts never run into."""
    x = normal(n, seed)
    x[::64] = 1000.0
    return x


@pytest.mark.parametrize("draw", [clusters, periodic])
def test_outliers_whose_codes_are_hard_to_find(
    decoder: MessageDecoder, draw: Callable[[int, int], torch.Tensor]
) -> None:
    codec, size = gradwire.codec("ecq"), 150_000
    frames = [frame_of(codec, [draw(size, rank)]) for rank in range(2)]
    result = mean(decoder, codec, [size], frames, 0.5)
    assert result is not None and torch.equal(result, host_mean(frames, 0.5))


def test_a_tensor_that_a_rank_has_not(decoder: MessageDecoder) -> None:
    codec, sizes = gradwire.codec("ecq"), [5000, 300]
    gradients = [heavy(n, n) for n in sizes]
    messages = [message([frame_of(codec, [g]) for g in gradients]), message([frame_of(codec, [gradients[1]])])]
    outs = [torch.full((n,), torch.nan) for n in sizes]
    targets = [FrameTarget(codec.converter, [out]) for out in outs]
    assert decoder.average(targets, messages, [[True, True], [False, True]], 0.5).wait()
    for n, out, ranks in zip(sizes, outs, (1, 2), strict=True):
        assert torch.equal(out, host_mean([frame_of(codec, [heavy(n, n)])] * ranks, 0.5))


def test_what_the_kernels_encode(decoder: MessageDecoder) -> None:
    codec, sizes = gradwire.codec("ecq"), [3000, 77, 20000]
    frames = []
    for rank in range(2):
        tensors = [TensorTask(heavy(n, rank + n)) for n in sizes]
        out = torch.empty(9 * sum(sizes), dtype=torch.uint8)
        length = MessageEncoder(CPU).encode([FrameTask(codec.converter, tensors, (sum(sizes),))], out).wait()
        assert length is not None
        frames.append(bytes(out[:length].numpy()))
    result = mean(decoder, codec, sizes, frames, 0.5)
    assert result is not None and torch.equal(result, host_mean(frames, 0.5))


def test_damaged_frames_are_left_to_the_host(decoder: MessageDecoder) -> None:
    """The checksum is made right again: what is read must not matter for where is written."""
    codec = gradwire.codec("ecq")
    frame = frame_of(codec, [heavy(3000, 1)])
    generator = torch.Generator().manual_seed(5)
    places = torch.randint(9, len(frame), (150,), generator=generator).tolist()
    refused = 0
    for place in [*places, *range(len(frame) - 40, len(frame)), *range(10, 40)]:
        damaged = bytearray(frame)
        damaged[place] ^= 1 << int(torch.randint(8, (1,), generator=generator))
        damaged[5:9] = zlib.crc32(damaged[9:], zlib.crc32(damaged[:5])).to_bytes(4, "little")
        result = mean(decoder, codec, [3000], [bytes(damaged)], 1.0)
        try:
            expected = host_mean([bytes(damaged)], 1.0)
        except FrameError:
            expected = None
        if expected is None:
            assert result is None
        refused += result is None
        if result is not None and expected is not None:
            assert torch.equal(result, expected)
    assert refused > 50
    assert headers.split(memoryview(frame))
