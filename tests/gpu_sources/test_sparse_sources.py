"""Sparse frames made by the kernels for GPUs, run on the CPU, against those of the host's codecs."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch

import gradwire
from gradwire import codecs
from gradwire.convert.topk import TopK
from gradwire.frame import headers
from gradwire.gpu.decoder import FrameTarget, MessageDecoder
from gradwire.gpu.encoder import MessageEncoder, PendingMessage, can_encode
from gradwire.gpu.families import FrameTask, TensorTask
from gradwire.gpu.sparse import mask_sent
from support.cuda_on_cpu import cuda_on_cpu

DEVICE = torch.device("cpu")
SPECS = ["topk", "topk:values=fp32", "topk:values=fp16", "sbc", "stc"]


@pytest.fixture(autouse=True)
def gpu() -> Iterator[None]:
    with cuda_on_cpu():
        yield


def numbers(count: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    """Return numbers with the tails of gradients."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, generator=generator)
    return x * x.abs() * scale


def encode(
    codec: gradwire.Codec, tensors: list[TensorTask], decay: float = 0.9, encoder: MessageEncoder | None = None
) -> tuple[list[bytes] | None, PendingMessage]:
    """Return the frames of a message, or None if it is left to the host. Whatever is written was poison before."""
    for tensor in tensors:
        if tensor.after is not None:
            tensor.after.fill_(float("nan"))
    tasks = [FrameTask(codec.converter, [t], (t.gradient.numel(),), decay) for t in tensors]
    out = torch.full((sum(t.gradient.numel() for t in tensors) * 5 + 4096 * len(tensors),), 0xAA, dtype=torch.uint8)
    encoded = (encoder or MessageEncoder(DEVICE)).encode(tasks, out)
    length = encoded.wait()
    return None if length is None else [bytes(f) for f in headers.split(memoryview(out[:length].numpy()))], encoded


def with_memory(gradient: torch.Tensor, seed: int = 1) -> TensorTask:
    scale = float(gradient.float().abs().mean()) / 4
    return TensorTask(gradient, numbers(gradient.numel(), seed, scale), torch.empty(gradient.numel()))


def check(codec: gradwire.Codec, tensor: TensorTask, frame: bytes, decay: float = 0.9) -> torch.Tensor:
    """Hold a frame to the host's: the same entries and values, about the same size, and an exact error memory."""
    decoded = gradwire.decode(frame)
    assert decoded.dtype == tensor.gradient.dtype
    g = tensor.gradient
    u = g.float() if tensor.before is None else g.float() + tensor.before * decay
    if tensor.after is not None:
        assert torch.equal(tensor.after, u - decoded.float())
    out = torch.empty(codec.max_frame_bytes(g), dtype=torch.uint8)
    length = codec.encode_into(
        g.clone(), out, residual=None if tensor.before is None else tensor.before.clone(), decay=decay
    )
    want = gradwire.decode(bytes(out[:length].numpy()))
    assert torch.equal(decoded, want)
    assert (
        len(frame) <= length * 1.02 + 24
    )  # a table of classes takes more than the host's Golomb code where positions are few
    return decoded


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("count", [1, 2, 31, 33, 4095, 8193, 65537, 200003])
def test_frames_hold_what_the_hosts_frames_hold(spec: str, count: int) -> None:
    codec = gradwire.codec(spec)
    tensor = with_memory(numbers(count))
    frames, _ = encode(codec, [tensor])
    assert frames is not None
    check(codec, tensor, frames[0])


@pytest.mark.parametrize(
    "spec", ["topk:p=0.001", "sbc:p=0.0001", "stc:p=0.3", "topk:k=7", "topk:p=0.9", "dgc", "topk:k=1000000"]
)
def test_any_share_of_the_entries(spec: str) -> None:
    codec, tensor = gradwire.codec(spec), with_memory(numbers(70000, 3))
    frames, _ = encode(codec, [tensor])
    assert frames is not None
    check(codec, tensor, frames[0])


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_other_dtypes_and_addresses(spec: str, dtype: torch.dtype) -> None:
    codec = gradwire.codec(spec)
    whole = numbers(9001, 5).to(dtype)
    tensor = TensorTask(whole[1:], numbers(9001, 6)[1:], torch.empty(9003)[3:])
    aligned = with_memory(whole)
    frames, _ = encode(codec, [tensor, aligned])
    assert frames is not None
    check(codec, tensor, frames[0])
    check(codec, aligned, frames[1])


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("scale", [1e-41, 1e-30, 1e30, 3e38])
def test_any_scale(spec: str, scale: float) -> None:
    codec = gradwire.codec(spec)
    tensor = TensorTask((numbers(5000, 7).clamp(-1, 1) * scale), None, torch.empty(5000))
    frames, _ = encode(codec, [tensor])
    assert frames is not None
    check(codec, tensor, frames[0])


@pytest.mark.parametrize("spec", SPECS)
def test_zeros_constants_and_few_numbers(spec: str) -> None:
    codec = gradwire.codec(spec)
    count = 20000
    few = torch.zeros(count)
    few[[5, 600, 19999]] = torch.tensor([1.0, -2.0, 1.0])
    signs = torch.where(torch.rand(count, generator=torch.Generator().manual_seed(0)) < 0.4, -1.0, 1.0)
    for gradient in (torch.zeros(count), torch.full((count,), -0.25), few, signs, -few.abs()):
        tensor = TensorTask(gradient, None, torch.empty(count))
        frames, _ = encode(codec, [tensor])
        assert frames is not None
        check(codec, tensor, frames[0])


@pytest.mark.parametrize("spec", ["topk", "sbc", "stc"])
def test_samples_that_mislead(spec: str) -> None:
    """Too many candidates for the room, and too few of them: one block starts over."""
    codec = gradwire.codec(spec)
    count = 400001
    signs = torch.where(torch.rand(count, generator=torch.Generator().manual_seed(0)) < 0.5, -1.0, 1.0)
    ties = signs.clone()
    ties[::1000] *= 3
    levels = numbers(count, 9).sign() * 2.0 ** (torch.arange(count) // 8 % 3)
    late = numbers(count, 8) * 1e-3
    late[-5000:] *= 1e6
    sparse = torch.zeros(count)
    sparse[100000:160000] = numbers(60000, 4)
    for gradient in (signs, ties, levels, late, sparse):
        for tensor in (TensorTask(gradient, None, torch.empty(count)), TensorTask(gradient, None, None)):
            frames, _ = encode(codec, [tensor])
            assert frames is not None
            check(codec, tensor, frames[0])


@pytest.mark.parametrize("spec", ["topk", "sbc", "stc"])
def test_a_sample_of_the_largest_alone(spec: str) -> None:
    """The kernel's sample meets all of the few large entries, so that there are too few candidates."""
    codec, count = gradwire.codec(spec), 400001
    gradient = numbers(count, 2)
    stratum = count // 4096
    for run in range(0, 4096, 16):
        start = run * stratum + mix(run) % (stratum - 3)
        gradient[start : start + 4] *= 1e4
    tensor = TensorTask(gradient, None, torch.empty(count))
    frames, _ = encode(codec, [tensor])
    assert frames is not None
    check(codec, tensor, frames[0])


@pytest.mark.parametrize("spec", ["topk", "sbc", "stc"])
def test_a_sample_that_meets_none_of_the_largest(spec: str) -> None:
    """The k-th magnitude is larger than the sample lets expect, once with many that are equal to it."""
    codec, count = gradwire.codec(spec), 400001
    sampled = torch.zeros(count, dtype=torch.bool)
    stratum = count // 4096
    for run in range(4096):
        start = run * stratum + mix(run) % (stratum - 3)
        sampled[start : start + 4] = True
    places = (~sampled).nonzero().view(-1)[:300000:20]
    for many in (False, True):
        gradient = numbers(count, 2)
        gradient[places] = torch.where(gradient[places] < 0, -1e4, 1e4) if many else gradient[places] * 1e4
        tensor = TensorTask(gradient, None, torch.empty(count))
        frames, _ = encode(codec, [tensor])
        assert frames is not None
        check(codec, tensor, frames[0])


def mix(x: int) -> int:
    """Mix the bits of a number, as docs/wire-format.md defines it."""
    x = (x ^ x >> 16) * 0x21F0AAAD & 0xFFFFFFFF
    x = (x ^ x >> 15) * 0x735A2D97 & 0xFFFFFFFF
    return x ^ x >> 15


def test_many_tensors_and_codecs_in_one_message() -> None:
    encoder = MessageEncoder(DEVICE)
    sizes = [1, 40, 3000, 70001, 17, 9000]
    for spec in ("topk", "sbc", "stc"):
        codec = gradwire.codec(spec)
        for seed in range(2):
            tensors = [with_memory(numbers(n, seed + i), seed) for i, n in enumerate(sizes)]
            frames, _ = encode(codec, tensors, encoder=encoder)
            assert frames is not None
            for tensor, frame in zip(tensors, frames, strict=True):
                check(codec, tensor, frame)


def test_few_layouts_in_a_warm_up() -> None:
    """In every step another number of entries is sent."""
    encoder, decoder, tensor = MessageEncoder(DEVICE), MessageDecoder(DEVICE), with_memory(numbers(30000))
    for step in range(20):
        codec = gradwire.codec(f"topk:p={0.1 * 0.98**step:.3g}")
        frames, _ = encode(codec, [tensor], encoder=encoder)
        assert frames is not None
        want = check(codec, tensor, frames[0])
        target = FrameTarget(codec.converter, [torch.full((30000,), float("nan"))])
        message = torch.frombuffer(bytearray(frames[0]), dtype=torch.uint8)
        assert decoder.average([target], [message], [[True]], 1.0).wait()
        assert torch.equal(target.tensors[0], want)
    assert 1 < len(encoder._layouts) < 5
    assert 1 < len(decoder._layouts) < 5


def test_the_same_bytes_again_in_memory_that_was_used_for_others() -> None:
    encoder, codec = MessageEncoder(DEVICE), gradwire.codec("stc")
    tensor, other = with_memory(numbers(30000)), with_memory(numbers(100000, 4, 1e5))
    first, _ = encode(codec, [tensor], encoder=encoder)
    encode(gradwire.codec("sbc"), [other], encoder=encoder)
    encode(codec, [TensorTask(torch.zeros(30000), None, torch.empty(30000))], encoder=encoder)
    again, _ = encode(codec, [tensor], encoder=encoder)
    assert first == again


def test_memory_written_in_place() -> None:
    codec = gradwire.codec("topk")
    tensor, copy = with_memory(numbers(100000)), with_memory(numbers(100000))
    want, _ = encode(codec, [copy])
    assert tensor.before is not None
    task = FrameTask(codec.converter, [TensorTask(tensor.gradient, tensor.before, tensor.before)], (100000,), 0.9)
    out = torch.empty(600000, dtype=torch.uint8)
    length = MessageEncoder(DEVICE).encode([task], out).wait()
    assert want == [bytes(out[:length].numpy())]
    assert copy.after is not None
    assert torch.equal(tensor.before, copy.after)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_none_leaves_the_message_to_the_host(bad: float) -> None:
    gradient = numbers(50000)
    gradient[49999] = bad
    sound = with_memory(gradient.nan_to_num(0, 1e30, -1e30))
    frames, encoded = encode(gradwire.codec("topk"), [TensorTask(numbers(10)), sound])
    assert frames is not None
    frames, encoded = encode(
        gradwire.codec("topk"), [TensorTask(numbers(10)), TensorTask(gradient, None, torch.empty(50000))]
    )
    assert frames is None
    assert encoded.nonfinite


def test_what_stays_on_the_host() -> None:
    for spec in ("m22", "topk:values=fp8", "topk:positions=golomb"):
        assert not can_encode(gradwire.codec(spec).converter, torch.float32, DEVICE)
    assert not can_encode(TopK(threshold=0.5), torch.float32, DEVICE)
    assert can_encode(gradwire.codec("dgc").converter, torch.float32, DEVICE)


@pytest.mark.parametrize("spec", SPECS)
def test_velocities_start_again_where_something_was_sent(spec: str) -> None:
    codec, encoder = gradwire.codec(spec), MessageEncoder(DEVICE)
    tensors = [with_memory(numbers(n, n)) for n in (70001, 300, 5000)]
    frames, encoded = encode(codec, tensors, encoder=encoder)
    assert frames is not None
    velocities = [torch.ones(70001), None, torch.ones(5000)]
    addresses = torch.tensor([0 if v is None else v.data_ptr() for v in velocities])
    (batch,) = encoded.layout.batches.values()
    mask_sent(batch, addresses)
    for velocity, frame in zip(velocities, frames, strict=True):
        if velocity is not None:
            assert torch.equal(velocity, (gradwire.decode(frame) == 0).float())


def rank_messages(codec: gradwire.Codec, sizes: list[int], ranks: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return what every rank sends."""
    messages = []
    for rank in range(ranks):
        tensors = [with_memory(numbers(n, 100 * rank + i).to(dtype)) for i, n in enumerate(sizes)]
        frames, _ = encode(codec, tensors)
        assert frames is not None
        messages.append(
            torch.frombuffer(bytearray(b"".join(frames) + bytes(64)), dtype=torch.uint8)[: sum(map(len, frames))]
        )
    return messages


def mean_by_host(messages: list[torch.Tensor], index: int, like: torch.Tensor, weight: float) -> torch.Tensor:
    want = torch.empty_like(like)
    for rank, message in enumerate(messages):
        header, payload = codecs.open_frame(np.frombuffer(headers.split(memoryview(message.numpy()))[index], np.uint8))
        codecs.decode_payload(header, payload, want, weight, rank > 0)
    return want


@pytest.mark.parametrize("spec", [*SPECS, "topk:p=0.5", "sbc:p=0.001"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_mean_is_the_hosts(spec: str, dtype: torch.dtype) -> None:
    codec, sizes, decoder = (
        gradwire.codec(spec),
        [70001, 5, 9000, 300000 if spec == "topk" else 33],
        MessageDecoder(DEVICE),
    )
    for weight in (1.0, 1 / 3):
        messages = rank_messages(codec, sizes, 3, dtype)
        targets = [FrameTarget(codec.converter, [torch.full((n,), float("nan"), dtype=dtype)]) for n in sizes]
        assert decoder.average(targets, messages, [[True] * len(sizes)] * 3, weight).wait()
        for i, target in enumerate(targets):
            (mean,) = target.tensors
            assert torch.equal(mean, mean_by_host(messages, i, mean, weight))


def test_the_mean_of_frames_that_are_empty_or_absent() -> None:
    codec, count = gradwire.codec("stc"), 10000
    some, none = TensorTask(numbers(count)), TensorTask(torch.zeros(count))
    frames = [encode(codec, tensors)[0] for tensors in ([none, some], [some, none], [some])]
    messages = [torch.frombuffer(bytearray(b"".join(f or [])), dtype=torch.uint8) for f in frames]
    targets = [FrameTarget(codec.converter, [torch.full((count,), float("nan"))]) for _ in range(2)]
    present = [[True, True], [True, True], [False, True]]
    assert MessageDecoder(DEVICE).average(targets, messages, present, 0.5).wait()
    value = gradwire.decode((frames[2] or [])[0])
    assert torch.equal(targets[0].tensors[0], value * 0.5)
    assert torch.equal(targets[1].tensors[0], value * 0.5 + value * 0.5)


def test_damaged_messages_are_left_to_the_host() -> None:
    for spec in SPECS:
        codec, decoder = gradwire.codec(spec), MessageDecoder(DEVICE)
        message = rank_messages(codec, [3000], 1, torch.float32)[0]
        target = FrameTarget(codec.converter, [torch.empty(3000)])
        for at in range(0, len(message), 3):
            bad = message.clone()
            bad[at] ^= 0x15
            assert not decoder.average([target], [bad], [[True]], 1.0).wait()
            repaired = with_new_checksum(bad)  # so that only the kernels' own checks are left
            if decoder.average([target], [repaired], [[True]], 1.0).wait():
                assert torch.equal(target.tensors[0], gradwire.decode(bytes(repaired.numpy())))
        assert decoder.average([target], [message], [[True]], 1.0).wait()


def with_new_checksum(frame: torch.Tensor) -> torch.Tensor:
    raw = bytearray(frame.numpy().tobytes())
    raw[5:9] = zlib.crc32(raw[9:], zlib.crc32(raw[:5])).to_bytes(4, "little")
    return torch.frombuffer(raw, dtype=torch.uint8)


def test_a_golomb_code_is_left_to_the_host() -> None:
    gradient, codec = numbers(5000), gradwire.codec("topk:positions=golomb")
    message = torch.empty(codec.max_frame_bytes(gradient), dtype=torch.uint8)
    message = message[: codec.encode_into(gradient, message)]
    target = FrameTarget(gradwire.codec("topk").converter, [torch.empty(5000)])
    assert not MessageDecoder(DEVICE).average([target], [message], [[True]], 1.0).wait()
