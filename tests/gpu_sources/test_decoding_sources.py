"""The mean of the frames of several ranks on the GPU: the host's bit for bit, and nothing of what is damaged."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch

import gradwire
from gradwire import codecs
from gradwire.errors import FrameError
from gradwire.frame import headers
from gradwire.gpu.decoder import FrameTarget, MessageDecoder
from gradwire.gpu.encoder import MessageEncoder
from gradwire.gpu.families import TensorTask
from support.device_frames import HOST, arrived, encode, encode_on_host, frame_task, heavy

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SPECS = ["co3", "co3:format=fp8", "co3:format=e4m3"]
GROUPS = [[9001], [300, 21, 5, 4001], [40], [12_001], [2, 1, 8192]]  # tensors of each frame
Present = Sequence[Sequence[bool]]


pytestmark = pytest.mark.usefixtures("kernels_on_cpu")


@pytest.fixture(scope="module")
def encoder() -> MessageEncoder:
    """One for many messages, as in training."""
    return MessageEncoder(HOST)


@pytest.fixture(scope="module")
def decoder() -> MessageDecoder:
    """One for many messages, as in training."""
    return MessageDecoder(HOST)


def message_of(
    spec: str, groups: Sequence[Sequence[int]], dtype: torch.dtype, present: Sequence[bool],
    encoder: MessageEncoder | None, scale: float = 1.0,
) -> bytes:  # fmt: skip
    """Return a message with those tensors that are present, by the device's encoder, or by the host's codec."""
    flags, tasks = iter(present), []
    for sizes in groups:
        tensors = [TensorTask((heavy(n) * scale).to(dtype)) for n in sizes if next(flags)]
        if tensors:
            tasks.append(frame_task(spec, tensors))
    if encoder is not None and tasks:
        return b"".join(encode(tasks, encoder))
    # The host would store so few entries that there is nothing to decode.
    few = [task.count * task.dtype.itemsize <= 32 for task in tasks]
    return b"".join(
        encode([task])[0] if is_few else encode_on_host(spec, task)[0] for task, is_few in zip(tasks, few, strict=True)
    )


def host_mean(
    groups: Sequence[Sequence[int]], messages: Sequence[bytes], present: Present, weight: float, dtype: torch.dtype
) -> list[torch.Tensor]:
    """Return the mean as the host makes it; parts that some rank leaves out are added up one by one."""
    whole = all(map(all, present))
    sums = [torch.zeros(n, dtype=dtype) for sizes in groups for n in sizes]
    sent = [False] * len(sums)
    for message, flags in zip(messages, present, strict=True):
        frames, first = iter(headers.split(memoryview(message))), 0
        for sizes in groups:
            places = [first + i for i in range(len(sizes)) if flags[first + i]]
            first += len(sizes)
            if not places:
                continue
            header, payload = codecs.open_frame(np.frombuffer(next(frames), dtype=np.uint8))
            lengths = [len(sums[i]) for i in places]
            if whole:
                joined, adds = torch.cat([sums[i] for i in places]), sent[places[0]]
                codecs.decode_payload(header, payload, joined, weight, adds)
                for i, part in zip(places, joined.split(lengths), strict=True):
                    sums[i].copy_(part)
                    sent[i] = True
            else:
                joined = torch.empty(sum(lengths))
                codecs.decode_payload(header, payload, joined, weight, False)
                for i, part in zip(places, joined.split(lengths), strict=True):
                    sums[i].add_(part) if sent[i] else sums[i].copy_(part)
                    sent[i] = True
        assert next(frames, None) is None
    return sums


def device_mean(
    decoder: MessageDecoder, spec: str, groups: Sequence[Sequence[int]], messages: Sequence[bytes], present: Present,
    weight: float, dtype: torch.dtype, offset: int = 0,
) -> list[torch.Tensor] | None:  # fmt: skip
    """Return the mean that the kernels make; None if they leave it to the host. Nothing beside the tensors changes."""
    rooms = [[torch.full((n + offset + 4,), float("nan"), dtype=dtype) for n in sizes] for sizes in groups]
    targets = [
        FrameTarget(
            gradwire.codec(spec).converter, [r[offset : offset + n] for r, n in zip(of_frame, sizes, strict=True)]
        )
        for of_frame, sizes in zip(rooms, groups, strict=True)
    ]
    done = decoder.average(targets, [arrived(m) for m in messages], present, weight).wait()
    for of_frame, sizes in zip(rooms, groups, strict=True):
        for room, n in zip(of_frame, sizes, strict=True):
            assert bool(room[:offset].isnan().all()) and bool(room[offset + n :].isnan().all())
    return [t for target in targets for t in target.tensors] if done else None


def check_alike(found: list[torch.Tensor] | None, expected: list[torch.Tensor]) -> None:
    assert found is not None
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


CASES = [
    pytest.param(spec, dtype, marks=[] if i == j else [pytest.mark.thorough])
    for i, spec in enumerate(SPECS)
    for j, dtype in enumerate(DTYPES)
]


@pytest.mark.parametrize(("spec", "dtype"), CASES)
def test_the_mean_of_all_ranks(encoder: MessageEncoder, decoder: MessageDecoder, spec: str, dtype: torch.dtype) -> None:
    """Of frames by the host and by the device, with and without a weight, at addresses of all kinds."""
    torch.manual_seed(0)
    everything = [True] * sum(map(len, GROUPS))
    messages = [message_of(spec, GROUPS, dtype, everything, maker) for maker in (encoder, None, encoder, None, encoder)]
    for ranks in (1, 2, 5):
        for weight, offset in ((1 / ranks, 0), (1.0, 1)):
            some, present = messages[:ranks], [everything] * ranks
            found = device_mean(decoder, spec, GROUPS, some, present, weight, dtype, offset)
            check_alike(found, host_mean(GROUPS, some, present, weight, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_that_some_ranks_leave_out(
    encoder: MessageEncoder, decoder: MessageDecoder, dtype: torch.dtype
) -> None:
    rng = random.Random(1)
    torch.manual_seed(1)
    groups, count = [[3000], [300, 21, 5, 1001], [6001], [2, 1, 700]], 9
    for share in (0.3, 0.7):
        present = [[rng.random() < share for _ in range(count)] for _ in range(3)]
        present[0][0] = present[1][0] = present[2][0] = False  # by nobody: its mean is zero
        messages = [
            message_of("co3", groups, dtype, flags, encoder if rank else None) for rank, flags in enumerate(present)
        ]
        found = device_mean(decoder, "co3", groups, messages, present, 1 / 3, dtype)
        check_alike(found, host_mean(groups, messages, present, 1 / 3, dtype))


def test_a_rank_that_leaves_out_everything(encoder: MessageEncoder, decoder: MessageDecoder) -> None:
    torch.manual_seed(2)
    groups, present = [[3000], [20, 5]], [[False] * 3, [True] * 3]
    messages = [b"", message_of("co3", groups, torch.float32, present[1], encoder)]
    found = device_mean(decoder, "co3", groups, messages, present, 0.5, torch.float32)
    check_alike(found, host_mean(groups, messages, present, 0.5, torch.float32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_beyond_the_largest_number(encoder: MessageEncoder, decoder: MessageDecoder, dtype: torch.dtype) -> None:
    """Values saturate, and sums become infinite where the host's do."""
    torch.manual_seed(3)
    groups, present = [[2000], [100, 50]], [[True] * 3] * 3
    scale = 3e3 if dtype == torch.float16 else 2e37
    messages = [message_of("co3", groups, dtype, present[0], encoder, scale) for _ in present]
    for weight in (1.0, 1 / 3):
        found = device_mean(decoder, "co3", groups, messages, present, weight, dtype)
        check_alike(found, host_mean(groups, messages, present, weight, dtype))


# ── damage ────────────────────────────────────────────────────────────────────────────────────────


def is_usable(message: bytes, groups: Sequence[Sequence[int]], dtype: torch.dtype) -> bool:
    """Tell whether the host takes it for a message of these frames."""
    try:
        frames = headers.split(memoryview(message))
        if len(frames) != len(groups):
            return False
        for frame, sizes in zip(frames, groups, strict=True):
            header, payload = codecs.open_frame(np.frombuffer(frame, dtype=np.uint8))
            if header.elements != sum(sizes):
                return False
            codecs.decode_payload(header, payload, torch.empty(sum(sizes), dtype=dtype), 1.0, False)
    except FrameError:
        return False
    return True


def test_damaged_frames_are_left_to_the_host(encoder: MessageEncoder, decoder: MessageDecoder) -> None:
    """Any bit that is not what it was, and any byte that is missing or too much."""
    torch.manual_seed(4)
    rng = random.Random(4)
    groups, present = [[3000], [300, 20]], [[True] * 3] * 2
    good = message_of("co3", groups, torch.float32, present[0], encoder)
    first = len(headers.split(memoryview(good))[0])
    places = [*range(30), *range(first, first + 40), len(good) - 1, *(rng.randrange(len(good)) for _ in range(30))]
    damaged = []
    for place in places:
        copy = bytearray(good)
        copy[place] ^= 1 << rng.randrange(8)
        damaged.append(bytes(copy))
    damaged += [good[:cut] for cut in (0, 1, 8, 12, first - 1, first, first + 1, len(good) - 1)]
    damaged += [good + b"\0", good + good, good[first:], good[first:] + good[:first]]
    for bad in damaged:
        both = [good, bad] if rng.random() < 0.5 else [bad, good]
        assert device_mean(decoder, "co3", groups, both, present, 0.5, torch.float32) is None
    check_alike(
        device_mean(decoder, "co3", groups, [good, good], present, 0.5, torch.float32),
        host_mean(groups, [good, good], present, 0.5, torch.float32),
    )


def resealed(frame: bytearray) -> bytes:
    """Return the frame with the checksum that belongs to it, if its header can be read."""
    try:
        header = headers.read_header(memoryview(frame))
    except FrameError:
        return bytes(frame)
    if header.frame_length == len(frame):
        headers.seal(memoryview(frame), header.codec, header.dtype, header.shape, header.flags, header.payload_length)
    return bytes(frame)


@pytest.mark.parametrize(
    ("spec", "groups", "tries"),
    [
        ("co3", [[1500]], 50),
        ("co3", [[300, 20, 7]], 80),
        pytest.param("co3", [[2500]], 150, marks=pytest.mark.thorough),
        pytest.param("co3", [[30, 200, 7]], 150, marks=pytest.mark.thorough),
        pytest.param("co3:format=fp8", [[3000]], 100, marks=pytest.mark.thorough),
        pytest.param("co3:format=e4m3", [[130, 20, 7]], 150, marks=pytest.mark.thorough),
        pytest.param("co3", [[12]], 300, marks=pytest.mark.thorough),
    ],
)
def test_false_frames_with_true_checksums(
    encoder: MessageEncoder, decoder: MessageDecoder, spec: str, groups: list[list[int]], tries: int
) -> None:
    """What somebody made up is never read out of bounds, and means the same as to the host, or is left to it."""
    torch.manual_seed(5)
    rng = random.Random(5)
    present = [[True] * len(groups[0])]
    goods = [message_of(spec, groups, torch.float32, present[0], maker) for maker in (encoder, None)]
    taken = 0
    for k in range(tries):
        frame = bytearray(goods[k % 2])
        for _ in range(rng.choice([1, 1, 2, 5])):
            start = len(frame) if rng.random() < 0.4 else min(45, len(frame))  # mostly where sizes and tables are
            frame[rng.randrange(3, start)] = rng.choice([0, 1, 2, 127, 128, 255, rng.randrange(256)])
        bad = resealed(frame)
        found = device_mean(decoder, spec, groups, [bad], present, 1.0, torch.float32)
        if found is not None:
            taken += 1
            assert is_usable(bad, groups, torch.float32), k
            check_alike(found, host_mean(groups, [bad], present, 1.0, torch.float32))
    assert taken, "some of it is another frame, as good as the first"


def test_segments_of_other_lengths_are_left_to_the_host(encoder: MessageEncoder, decoder: MessageDecoder) -> None:
    """The host goes by the lengths that the frame states, so that its mean would be another one."""
    torch.manual_seed(6)
    [frame] = encode([frame_task("co3", [TensorTask(heavy(n) * s) for n, s in ((60, 1.0), (40, 100.0))])], encoder)
    present = [[True, True]]
    assert device_mean(decoder, "co3", [[60, 40]], [frame], present, 1.0, torch.float32) is not None
    assert device_mean(decoder, "co3", [[40, 60]], [frame], present, 1.0, torch.float32) is None
